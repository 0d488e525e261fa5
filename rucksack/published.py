"""Weights by name: a checkpoint, a folder, the Hugging Face Hub; and the format of the published weights."""

import json
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from model import Backpack, Config
from rucksack.checkpoint import from_checkpoint, load_file, load_state
from rucksack.common import UserError, one_line
from rucksack.data import GPT2, GPT2_VOCAB

# The third file is ours and describes the tokenizer; without it ids are GPT-2's if there are as many as GPT-2
# has, or a few more as padding (50,264 in stanfordnlp/backpack-gpt2).
PUBLISHED = ('config.json', 'pytorch_model.bin', 'rucksack_tokenizer.json')
FIXED = {  # settings of a config.json, and what they may be here; export writes the first
    'model_type': ('gpt2', 'backpack-gpt2'), 'activation_function': ('gelu_new',),
    'layer_norm_epsilon': (1e-5,), 'scale_attn_weights': (True,), 'tie_word_embeddings': (True,),
    'sense_intermediate_scale': (4,)}


def from_pretrained(source: str | Path) -> Backpack:
    """A model in evaluation mode, on the CPU, from a checkpoint of train.py or its folder; from a folder with
    config.json and pytorch_model.bin in the format of stanfordnlp/backpack-gpt2 or gpt2; or from such a
    repository on the Hugging Face Hub, by its name. UserError where the files do not hold together.
    """
    path = Path(source)
    if not path.exists():
        if not re.fullmatch(r'(?!out/|data/)(gpt2(-\w+)?|[\w-][\w.-]*/[\w.-]+)', str(source)):
            there = ', '.join(str(p.parent) for p in sorted(Path('out').glob('*/ckpt.pt')))
            raise UserError(f'no such file or folder: {source}; there is {there or "no run in out/ yet"}')
        path = download(str(source))
    path = path / 'ckpt.pt' if (path / 'ckpt.pt').exists() else path
    return from_published(path) if path.is_dir() else from_checkpoint(load_file(path), path)


def download(name: str) -> Path:
    """Fetch the files of a repository from the Hugging Face Hub, once; the folder of its cache with them."""
    from huggingface_hub import model_info, snapshot_download, try_to_load_from_cache  # comes with datasets
    try:
        cached = all(isinstance(try_to_load_from_cache(name, file), str) for file in PUBLISHED[:2])
        if not cached:  # one question, since snapshot_download would wait for ever behind a firewall
            model_info(name, timeout=10)
        return Path(snapshot_download(name, allow_patterns=list(PUBLISHED), local_files_only=cached))
    except Exception as error:  # the client's own kinds, and those of the HTTP library it uses
        raise UserError(f'{name} is nothing local and cannot be fetched from the Hub ({one_line(error)})')


def published(model: Backpack) -> dict[str, Tensor]:
    """The weights by their published names, as views."""
    gpt = 'backpack.gpt2_model.' if model.config.n_sense else 'transformer.'
    names = {'wte.': f'{gpt}wte.', 'contextualizer.blocks.': f'{gpt}h.', 'contextualizer.': gpt,
             'sense_weights.': 'backpack.sense_weight_net.',
             'sense_network.ln_0.': 'backpack.sense_network.ln.',
             'sense_network.final_mlp.': 'backpack.sense_network.final_mlp.',
             'sense_network.': 'backpack.sense_network.block.'}  # the first that fits
    views = {}
    for key, weight in model.state_dict().items():
        ours = next(prefix for prefix in names if key.startswith(prefix))
        if weight.dim() == 2 and ours.startswith(('contextualizer.blocks.', 'sense_network.')):
            weight = weight.t()  # Conv1D keeps its weight transposed; sense_weights is a plain Linear there
        views[names[ours] + key.removeprefix(ours)] = weight
    return views


COPIES = {  # of tied weights in a published file: with senses, and without
    True: {'lm_head.weight': 'backpack.gpt2_model.wte.weight',
           'backpack.word_embeddings.weight': 'backpack.gpt2_model.wte.weight',
           'backpack.position_embeddings.weight': 'backpack.gpt2_model.wpe.weight'},
    False: {'lm_head.weight': 'transformer.wte.weight'}}


def from_published(folder: Path) -> Backpack:
    """A published Backpack, or a GPT-2 (then without senses), from config.json and pytorch_model.bin."""
    config_file, weights_file, tokenizer_file = (folder / name for name in PUBLISHED)
    state = {str(key): weight for key, weight in load_file(weights_file).items()
             if not str(key).endswith(('.attn.bias', '.attn.masked_bias'))}  # GPT-2's causal masks
    try:
        settings = json.loads(config_file.read_text(encoding='utf-8'))
        for name, allowed in FIXED.items():
            if settings.get(name, allowed[0]) not in allowed:
                raise ValueError(f'its {name} is {settings[name]}, this architecture has {allowed[0]}')
        padded = GPT2_VOCAB <= settings['vocab_size'] < GPT2_VOCAB + 256
        config = Config(
            block_size=int(settings['n_positions']), vocab_size=settings['vocab_size'],
            n_vocab=settings.get('n_vocab', GPT2_VOCAB if padded else settings['vocab_size']),
            n_layer=int(settings['n_layer']), n_head=settings['n_head'], n_embd=settings['n_embd'],
            n_sense=settings.get('num_senses', 0),
            dropout=float(settings.get('resid_pdrop', 0.0)))  # of three, equal as published; for fine-tuning
        if not config.n_sense and any(key.startswith('backpack.') for key in state):
            raise ValueError(f'num_senses is missing, but {weights_file.name} holds a Backpack')
        if not config.n_sense:  # GPT-2's own file leaves "transformer." out
            state = {key if key.startswith(('transformer.', 'lm_head.')) else f'transformer.{key}': weight
                     for key, weight in state.items()}
        copies = COPIES[bool(config.n_sense)]
        own = {key: weight for key, weight in state.items() if key not in copies}
        model = load_state(config, published, own, weights_file)
        for key in copies:
            if key in state and not torch.equal(state[key], own[copies[key]]):
                raise UserError(f'{weights_file}: {key} differs from {copies[key]}, but the model ties them')
        # Layer i divides scores, here queries, by i + 1: in the published class unless its config denies it
        if settings.get('scale_attn_by_inverse_layer_idx', config.n_sense > 0):
            for i, block in enumerate(model.contextualizer.blocks):
                for weight in block.attn.c_attn.parameters():
                    weight.data[:config.n_embd] /= i + 1
        model.tokenizer = GPT2 if config.n_vocab == GPT2_VOCAB else None
        if tokenizer_file.is_file():
            model.tokenizer = json.loads(tokenizer_file.read_text(encoding='utf-8'))
        return model
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise UserError(f'{folder} is no Backpack and no GPT-2 ({type(error).__name__}: {one_line(error)})')


def export(model: Backpack, folder: str | Path) -> None:
    """Write a model in the format of stanfordnlp/backpack-gpt2, a Transformer in that of gpt2. UserError if
    the folder exists or cannot be made, and for a model that the published code cannot load.
    """
    c, folder = model.config, Path(folder)
    if c.n_sense and c.sense_hidden != 4 * c.n_embd:
        raise UserError(f'sense_hidden is {c.sense_hidden}; the published code can only load 4 * n_embd = '
                        f'{4 * c.n_embd}')
    if folder.exists():
        raise UserError(f'{folder} exists; export to a new folder')
    settings = {name: allowed[0] for name, allowed in FIXED.items()} | {
        'architectures': ['GPT2LMHeadModel'], 'scale_attn_by_inverse_layer_idx': False,
        'n_positions': c.block_size, 'vocab_size': c.vocab_size, 'n_vocab': c.n_vocab, 'n_layer': c.n_layer,
        'n_head': c.n_head, 'n_embd': c.n_embd, 'attn_pdrop': c.dropout, 'embd_pdrop': c.dropout,
        'resid_pdrop': c.dropout, 'bos_token_id': c.n_vocab - 1, 'eos_token_id': c.n_vocab - 1}
    if c.n_sense:
        code = 'stanfordnlp/backpack-gpt2--'  # where Hugging Face transformers finds the published classes
        settings |= {'num_senses': c.n_sense, 'architectures': ['BackpackGPT2LMHeadModel'], 'auto_map': {
            'AutoConfig': f'{code}configuration_backpack_gpt2.BackpackGPT2Config',
            'AutoModelForCausalLM': f'{code}modeling_backpack_gpt2.BackpackGPT2LMHeadModel'}}
    state = {key: weight.contiguous().cpu() for key, weight in published(model).items()}
    state |= {copy: state[original] for copy, original in COPIES[bool(c.n_sense)].items()}
    try:
        with tempfile.TemporaryDirectory(prefix='.partial-', dir=folder.parent) as partial:
            new = Path(partial, folder.name)
            new.mkdir()
            (new / PUBLISHED[0]).write_text(json.dumps(settings, indent=1) + '\n', encoding='utf-8')
            torch.save(state, new / PUBLISHED[1])
            if model.tokenizer:
                (new / PUBLISHED[2]).write_text(json.dumps(model.tokenizer) + '\n', encoding='utf-8')
            new.rename(folder)  # complete, or not there
    except (OSError, RuntimeError) as error:
        raise UserError(f'{folder} cannot be written ({one_line(error)}); export to another folder')
