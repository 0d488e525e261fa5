"""Load published weights: Backpacks as stanfordnlp/backpack-gpt2, GPT-2s, and nanoGPT's files."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from rucksack.checkpoint import load_file, model_with
from rucksack.errors import UserError
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
LAYERS = [  # ours, theirs without BODY, and whether theirs is a Conv1D: its weight is transposed
    ('wte', 'wte', False),
    ('contextualizer.wpe', 'wpe', False),
    ('contextualizer.blocks.{}.ln_1', 'h.{}.ln_1', False),
    ('contextualizer.blocks.{}.attn.c_attn', 'h.{}.attn.c_attn', True),
    ('contextualizer.blocks.{}.attn.c_proj', 'h.{}.attn.c_proj', True),
    ('contextualizer.blocks.{}.ln_2', 'h.{}.ln_2', False),
    ('contextualizer.blocks.{}.mlp.c_fc', 'h.{}.mlp.c_fc', True),
    ('contextualizer.blocks.{}.mlp.c_proj', 'h.{}.mlp.c_proj', True),
    ('contextualizer.ln_f', 'ln_f', False),
    ('sense_weights.c_attn', 'backpack.sense_weight_net.c_attn', False),
    ('sense_network.ln_0', 'backpack.sense_network.ln', False),
    ('sense_network.ln_1', 'backpack.sense_network.block.ln_1', False),
    ('sense_network.mlp.c_fc', 'backpack.sense_network.block.mlp.c_fc', True),
    ('sense_network.mlp.c_proj', 'backpack.sense_network.block.mlp.c_proj', True),
    ('sense_network.ln_2', 'backpack.sense_network.block.ln_2', False),
    ('sense_network.final_mlp.c_fc', 'backpack.sense_network.final_mlp.c_fc', True),
    ('sense_network.final_mlp.c_proj', 'backpack.sense_network.final_mlp.c_proj', True)]
COPIES = {  # second copies of tied weights, named without BODY
    'lm_head.weight': 'wte.weight',
    'backpack.word_embeddings.weight': 'wte.weight',
    'backpack.position_embeddings.weight': 'wpe.weight'}


def layers_of(n_layer: int) -> list[tuple[str, str, bool]]:
    """List LAYERS with the number of each block filled in."""
    return [(ours.format(i), theirs.format(i), is_conv)
            for i in range(n_layer) for ours, theirs, is_conv in LAYERS]


def to_our_names(state: dict[str, Tensor], n_layer: int, has_conv: bool = True
                 ) -> dict[str, Tensor]:
    """Rename weights to our names, and transpose those of Conv1D layers if the file has such.

    Raises ValueError if copies of tied weights differ.
    """
    layers = {theirs: (ours, is_conv) for ours, theirs, is_conv in layers_of(n_layer)}
    own = {}
    for theirs, weight in state.items():
        if theirs.endswith(('.attn.bias', '.attn.masked_bias')):  # a mask
            continue
        theirs = re.sub(rf'^(_orig_mod\.)?(transformer\.|{BODY})?', '', theirs)
        layer, _, kind = COPIES.get(theirs, theirs).rpartition('.')
        ours, is_conv = layers.get(layer, (layer, False))
        if kind == 'weight' and is_conv and has_conv:
            weight = weight.t()
        name = f'{ours}.{kind}'
        if name in own and not torch.equal(own[name], weight):
            raise ValueError(f'{theirs} differs from another copy of {name}')
        own[name] = weight
    return own


def from_published(folder: Path, n_ids: float) -> Backpack | GPT:
    """Load a published Backpack or GPT-2 from its folder; rows beyond n_ids are padding."""
    files = [folder / name for name in WEIGHTS if (folder / name).exists()]
    if not files:
        raise UserError(f'it has no {" or ".join(WEIGHTS)}; if its weights are in shards, save '
                        'them again in one file, with a large max_shard_size')
    load = load_safetensors if files[0].suffix == '.safetensors' else load_file
    settings = load_json(folder / 'config.json')
    config = config_from_json(settings, n_ids)
    model = model_with(config, to_our_names(load(files[0]), config.n_layer))
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


def config_from_json(settings: dict, n_ids: float) -> Config:
    """Make our Config from a config.json; raises ValueError for another architecture."""
    for name, allowed in FIXED.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise ValueError(f'its {name} is {settings[name]}; it must be {allowed[0]}')
    defaults = {'num_senses': 0, 'sense_hidden': 0, 'resid_pdrop': 0.0,
                'n_vocab': min(settings['vocab_size'], n_ids)}
    settings = defaults | settings
    return Config(**{ours: settings[theirs] for theirs, ours in SIZE_NAMES.items()})


def from_nanogpt(checkpoint: dict, n_ids: float) -> GPT:
    """Load a Transformer that nanoGPT's train.py saved; biases that it lacks are 0.

    NOTE: nanoGPT computes GELU exactly; ours is GPT-2's approximation, so logits differ slightly.
    """
    args = checkpoint['model_args']
    weights = to_our_names(checkpoint['model'], args['n_layer'], has_conv=False)
    if not args.pop('bias'):
        for name, weight in list(weights.items()):
            if not name.endswith(('wte.weight', 'wpe.weight')):
                weights[name.replace('.weight', '.bias')] = torch.zeros(len(weight))
    return model_with(Config(**args, n_vocab=min(args['vocab_size'], n_ids), n_sense=0), weights)
