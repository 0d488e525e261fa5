"""Weights by name: a checkpoint, a folder, the Hugging Face Hub; and the format of the published weights."""

import copy
import json
import re
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import Backpack, Config
from rucksack.checkpoint import from_checkpoint, load_file, load_state
from rucksack.common import UserError, one_line
from rucksack.data import GPT2, GPT2_VOCAB, merged_tokens

ENGLISH = Path(__file__).parents[1] / 'pretrained' / 'english'  # the Backpack that comes with the code
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')  # the first that is there
# Ids are GPT-2's if there are as many as GPT-2 has, or a few more as padding (50,264 in
# stanfordnlp/backpack-gpt2); else those of its BPE cut after the merges in the first of these files, or of a
# tokenizer that the second describes in our own form.
MERGES, TOKENIZER = 'merges.txt', 'rucksack_tokenizer.json'
FIXED = {  # settings of a config.json, and what they may be here; export writes the first
    'model_type': ('gpt2', 'backpack-gpt2'), 'activation_function': ('gelu_new',),
    'layer_norm_epsilon': (1e-5,), 'scale_attn_weights': (True,), 'tie_word_embeddings': (True,),
    'sense_intermediate_scale': (4,)}


def from_pretrained(source: str | Path) -> Backpack:
    """A model in evaluation mode, on the CPU: from a checkpoint of train.py or its folder; from a folder with
    config.json and WEIGHTS in the format of stanfordnlp/backpack-gpt2 or gpt2; from such a repository on the
    Hugging Face Hub, by its name; or 'english'. UserError where the files do not hold together.
    """
    path = ENGLISH if str(source) == 'english' else Path(source)
    if not path.exists():
        if path == ENGLISH:
            raise UserError(f'{path} is missing; train a Backpack: python prepare.py toy && python train.py '
                            'config/train_toy.py')
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
        local = [isinstance(try_to_load_from_cache(name, file), str) for file in ('config.json', *WEIGHTS)]
        cached, there = local[0] and any(local[1:]), []
        if not cached:  # one question, since snapshot_download would wait for ever behind a firewall
            there = [file.rfilename for file in model_info(name, timeout=10).siblings]
        return Path(snapshot_download(name, allow_patterns=['config.json', *WEIGHTS, MERGES, TOKENIZER],
                                      ignore_patterns=WEIGHTS[1:] if WEIGHTS[0] in there else None,
                                      local_files_only=cached))
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
    """A published Backpack, or a GPT-2 (then without senses), from config.json and a file of WEIGHTS."""
    config_file, tokenizer_file, merges_file = (folder / name for name in ('config.json', TOKENIZER, MERGES))
    weights_file = folder / WEIGHTS[not (folder / WEIGHTS[0]).exists()]
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
        elif not model.tokenizer and merges_file.is_file():
            model.tokenizer = GPT2 | {'merges': read_merges(merges_file, config.n_vocab)}
        return model
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise UserError(f'{folder} is no Backpack and no GPT-2 ({type(error).__name__}: {one_line(error)})')


def read_merges(path: Path, n_vocab: int) -> list[str]:
    """The merges of a BPE of n_vocab ids, end-of-text among them; UserError if damaged, or not as many."""
    try:
        merges = path.read_text(encoding='utf-8').split('\n')[1:-1]  # without a version and the last newline
        if (n := len(merged_tokens(tuple(merges))) + 1) != n_vocab:
            raise ValueError(f'they make {n:,} ids, the model has {n_vocab:,}')
        return merges
    except (OSError, ValueError) as error:
        raise UserError(f'{path} does not hold the merges of the vocabulary ({error}); fetch it again')


def swap_senses(model: Backpack, a: int, b: int) -> Backpack:
    """The same model with senses a and b numbered b and a. Exact: Eq. 2 sums over senses in any order."""
    model, order = copy.deepcopy(model), torch.arange(k := model.config.n_sense)
    order[[a, b]] = order[[b, a]]
    for p in model.sense_network.final_mlp.c_proj.parameters():
        p.data = p.data.unflatten(0, (k, -1))[order].flatten(0, 1)  # (k*d, ..): a block of rows a sense
    for p in model.sense_weights.c_attn.parameters():
        p.data = p.data.unflatten(0, (2, k, -1))[:, order].flatten(0, 2)  # (2*d, ..): of query and key
    return model


def export(model: Backpack, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model in the format of stanfordnlp/backpack-gpt2, a Transformer in that of gpt2, with weights
    in dtype. UserError if the folder exists or cannot be made, or the published code cannot load the model.
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
    state = {key: weight.to(dtype).contiguous().cpu() for key, weight in published(model).items()}
    try:
        with tempfile.TemporaryDirectory(prefix='.partial-', dir=folder.parent) as partial:
            new = Path(partial, folder.name)
            new.mkdir()
            (new / 'config.json').write_text(json.dumps(settings, indent=1) + '\n', encoding='utf-8')
            save_file(state, new / WEIGHTS[0], {'format': 'pt'})
            if merges := (model.tokenizer or {}).get('merges'):
                (new / MERGES).write_text('\n'.join(['#version: 0.2', *merges, '']), encoding='utf-8')
            elif model.tokenizer:
                (new / TOKENIZER).write_text(json.dumps(model.tokenizer) + '\n', encoding='utf-8')
            new.rename(folder)  # complete, or not there
    except (OSError, RuntimeError) as error:
        raise UserError(f'{folder} cannot be written ({one_line(error)}); export to another folder')
