"""Load published weights: Backpacks as stanfordnlp/backpack-gpt2, and GPT-2s."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from rucksack.checkpoint import load_file, model_with
from rucksack.hub.find import WEIGHTS
from rucksack.model import GPT, Backpack, Config
from rucksack.tokenizer import load_json

FIXED = {  # settings of a config.json and their allowed values; export writes the first
    'model_type': ('gpt2', 'backpack-gpt2'),
    'activation_function': ('gelu_new',),
    'layer_norm_epsilon': (1e-5,),
    'scale_attn_weights': (True,),
    'tie_word_embeddings': (True,),
    'sense_intermediate_scale': (4,)}
SIZE_NAMES = {  # settings of a config.json -> fields of our Config
    'n_positions': 'block_size', 'vocab_size': 'vocab_size', 'n_vocab': 'n_vocab',
    'n_layer': 'n_layer', 'n_head': 'n_head', 'n_embd': 'n_embd', 'resid_pdrop': 'dropout',
    'num_senses': 'n_sense', 'sense_hidden': 'sense_hidden'}
LEVANTER = 'backpack_model.'  # Levanter's auto_map names this module; its architectures is a string

BODY = 'backpack.gpt2_model.'  # a GPT-2's own files have 'transformer.' instead, or nothing
RENAMED = {  # prefixes of our names and of theirs, without BODY; the first that fits counts
    'wte.': 'wte.',
    'sense_weights.': 'backpack.sense_weight_net.',
    'sense_network.ln_0.': 'backpack.sense_network.ln.',
    'sense_network.final_mlp.': 'backpack.sense_network.final_mlp.',
    'sense_network.': 'backpack.sense_network.block.',
    'contextualizer.blocks.': 'h.',
    'contextualizer.': ''}
COPIES = {  # second copies of tied weights, named without BODY
    'lm_head.weight': 'wte.weight',
    'backpack.word_embeddings.weight': 'wte.weight',
    'backpack.position_embeddings.weight': 'wpe.weight'}


def is_transposed(name: str) -> bool:
    """Tell whether a weight with this published name is a Conv1D's: ours, transposed."""
    return name.startswith(('h.', 'backpack.sense_network.')) and '.c_' in name


def to_our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to our names, and transpose those of Conv1D layers.

    Raises ValueError if copies of tied weights differ.
    """
    own = {}
    for key, weight in state.items():
        if key.endswith(('.attn.bias', '.attn.masked_bias')):  # a mask
            continue
        theirs = re.sub(rf'^(transformer\.|{BODY})?', '', key)
        theirs = COPIES.get(theirs, theirs)
        if is_transposed(theirs):
            weight = weight.t()  # a bias stays as it is
        ours, prefix = next(
            pair for pair in RENAMED.items()
            if theirs.startswith(pair[1]))
        name = ours + theirs.removeprefix(prefix)
        if name in own and not torch.equal(own[name], weight):
            raise ValueError(f'{key} differs from another copy of {name}')
        own[name] = weight
    return own


def from_published(folder: Path, n_ids: int) -> Backpack | GPT:
    """Load a published Backpack or GPT-2 from its folder; rows beyond n_ids are padding."""
    safe, pickled = [folder / name for name in WEIGHTS]
    state = load_safetensors(safe) if safe.exists() else load_file(pickled)
    settings = load_json(folder / 'config.json')
    config = config_from_json(settings, n_ids)
    model = model_with(config, to_our_names(state))
    is_levanters = (LEVANTER in str(settings.get('auto_map'))
                    or isinstance(settings.get('architectures'), str))
    if config.n_sense and is_levanters:
        for part in model.sense_network.final_mlp.c_proj.parameters():
            part.data /= config.n_sense  # Levanter divides Eq. 2's sum by k
    # In the published class, layer i divides its scores by i + 1 unless the config says no.
    if settings.get('scale_attn_by_inverse_layer_idx', config.n_sense > 0):
        for i, block in enumerate(model.contextualizer.blocks):
            for weight in block.attn.c_attn.parameters():
                weight.data[:config.n_embd] /= i + 1  # divides queries, and thus scores
    return model


def config_from_json(settings: dict, n_ids: int) -> Config:
    """Make our Config from a config.json; raises ValueError for another architecture."""
    for name, allowed in FIXED.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise ValueError(f'its {name} is {settings[name]}; it must be {allowed[0]}')
    defaults = {
        'num_senses': 0,
        'sense_hidden': 0,
        'resid_pdrop': 0.0,
        'n_vocab': min(settings['vocab_size'], n_ids)}
    settings = defaults | settings
    return Config(**{ours: settings[theirs] for theirs, ours in SIZE_NAMES.items()})
