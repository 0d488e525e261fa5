"""Weights by name: a checkpoint, a folder, the Hugging Face Hub; and the format of the published weights."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from model import Backpack, Config
from rucksack.checkpoint import from_checkpoint, load_file, load_state
from rucksack.common import UserError, one_line
from rucksack.data import GPT2, GPT2_VOCAB, bytes_of, load_tokenizer, merges_of, vocabulary_of, written
from rucksack.toy import toy_tokenizer

ENGLISH = Path(__file__).parents[1] / 'pretrained' / 'english'  # the Backpack that comes with the code
CODE = Path(__file__).with_name('modeling_backpack.py')  # what transformers runs, beside exported weights
WEIGHTS = ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin',  # the first that is
           'pytorch_model.bin.index.json')  # there; an index names the files of a large model
# Ids are GPT-2's if there are as many as GPT-2 has, or a few more as padding (50,264 in
# stanfordnlp/backpack-gpt2); else the first of these files says what they mean.
TOKENIZERS = ('merges.txt', 'tokenizer.json')
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
        there = [f for f in ('config.json', *WEIGHTS) if isinstance(try_to_load_from_cache(name, f), str)]
        cached = len(there) > 1 and there[0] == 'config.json'
        if not cached:  # one question, since snapshot_download would wait for ever behind a firewall
            there = [file.rfilename for file in model_info(name, timeout=10).siblings]
        kind = '.safetensors' if any(file.startswith(WEIGHTS[0]) for file in there) else '.bin'
        return Path(snapshot_download(name, local_files_only=cached, allow_patterns=[
            'config.json', *TOKENIZERS, f'*{kind}', f'*{kind}.index.json']))
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
    weights_file = next((folder / name for name in WEIGHTS if (folder / name).exists()), folder / WEIGHTS[0])
    state = {str(key): weight for file in files_of(weights_file) for key, weight in load_file(file).items()
             if not str(key).endswith(('.attn.bias', '.attn.masked_bias'))}  # GPT-2's causal masks
    try:
        settings = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
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
        model.tokenizer = GPT2 if config.n_vocab == GPT2_VOCAB else read_tokenizer(folder, config.n_vocab)
        return model
    except (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        why = f'{folder} is no Backpack and no GPT-2 ({type(error).__name__}: {one_line(error)})'
        raise error if isinstance(error, UserError) else UserError(why)


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files beside it that an index names; UserError if it names others."""
    if path.suffix != '.json':
        return [path]
    try:
        names = set(json.loads(path.read_text(encoding='utf-8'))['weight_map'].values())
        if not names or not all(re.fullmatch(r'[\w-][\w.-]*\.(safetensors|bin)', name) for name in names):
            raise ValueError('it names no weights beside it')
        return [path.with_name(name) for name in sorted(names)]
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f'{path} is no index of weights ({one_line(error)}); fetch it again')


def read_tokenizer(folder: Path, n_vocab: int) -> dict | None:
    """What the n_vocab ids of a published model mean, by the first of TOKENIZERS that is there, if any is;
    UserError where it is damaged, of another size, or neither GPT-2's BPE cut short nor the toy's.
    """
    path = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), None)
    try:
        if not path or path.suffix == '.txt':  # a version, a merge a line
            description = path and GPT2 | {'merges': path.read_text(encoding='utf-8').split('\n')[1:-1]}
        else:
            bpe = json.loads(path.read_text(encoding='utf-8'))['model']
            description = GPT2 | {'merges': [m if isinstance(m, str) else ' '.join(m) for m in bpe['merges']]}
            if bpe.get('ignore_merges'):
                tokens = map(bytes_of, sorted(bpe['vocab'], key=bpe['vocab'].get))
                description = toy_tokenizer([token.decode() for token in tokens if len(token) > 1])
            if bpe['vocab'] != tokenizer_files(description)[path.name]['model']['vocab']:
                raise ValueError('its ids are in another order')
        if path and (n := vocabulary_of(description)) != n_vocab:
            raise ValueError(f'it has {n:,} ids, the model {n_vocab:,}')
        return description
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is neither GPT-2's BPE cut short nor the toy's ({one_line(error)})")


def tokenizer_files(description: dict) -> dict[str, dict]:
    """The files from which transformers, and read_tokenizer, make a tokenizer: their names and contents."""
    encoding, end, toy = load_tokenizer(description), '<|endoftext|>', 'pieces' in description
    tokens = sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.get)
    split = [{'type': 'Split', 'pattern': {'Regex': description['pattern']}, 'behavior': 'Isolated',
              'invert': False}] if toy else []
    spell = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': not toy}
    return {
        'tokenizer.json': {
            'version': '1.0', 'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [*split, spell]},
            'added_tokens': [{'id': encoding.eot_token, 'content': end, 'special': True, 'single_word': False,
                              'lstrip': False, 'rstrip': False, 'normalized': False}], 'decoder': spell,
            'model': {'type': 'BPE', 'vocab': {written(token): i for i, token in enumerate(tokens)},
                      'merges': merges_of(encoding), 'ignore_merges': toy}},
        'tokenizer_config.json': {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': end,
                                  'eos_token': end, 'clean_up_tokenization_spaces': False},
        'generation_config.json': {'eos_token_id': encoding.eot_token, 'pad_token_id': encoding.eot_token,
                                   'use_cache': False}}


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
        settings |= {'model_type': 'backpack-gpt2', 'num_senses': c.n_sense, 'use_cache': False,
                     'architectures': ['BackpackForCausalLM'], 'auto_map': {
                         'AutoConfig': f'{CODE.stem}.BackpackConfig',
                         'AutoModelForCausalLM': f'{CODE.stem}.BackpackForCausalLM'}}
    state = {key: weight.to(dtype).contiguous().cpu() for key, weight in published(model).items()}
    try:
        with tempfile.TemporaryDirectory(prefix='.partial-', dir=folder.parent) as partial:
            new = Path(partial, folder.name)
            new.mkdir()
            save_file(state, new / WEIGHTS[0], {'format': 'pt'})
            tokenizer = tokenizer_files(model.tokenizer) if model.tokenizer else {}
            for name, content in ({'config.json': settings} | tokenizer).items():
                (new / name).write_text(json.dumps(content, ensure_ascii=False) + '\n', encoding='utf-8')
            if merges := (model.tokenizer or {}).get('merges'):
                (new / TOKENIZERS[0]).write_text('\n'.join(['#version: 0.2', *merges, '']), encoding='utf-8')
            card = CODE.with_name('card.md').read_text(encoding='utf-8').format(
                kind='Backpack' if c.n_sense else 'Transformer', c=c, n=model.n_params()['total'] / 1e6)
            (new / 'README.md').write_text(card, encoding='utf-8')
            if c.n_sense:
                shutil.copy(CODE, new)
            new.rename(folder)  # complete, or not there
    except (OSError, RuntimeError) as error:
        raise UserError(f'{folder} cannot be written ({one_line(error)}); export to another folder')
