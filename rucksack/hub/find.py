"""Find weights by name, and read their tokenizer without making the model."""

import re
import sys
from pathlib import Path

from rucksack.errors import UserError, user_errors
from rucksack.tokenizer import ENGLISH, GPT2, GPT2_VOCAB, load_json, read_tokenizer

BUNDLED = {'english': ENGLISH, 'english_gpt': ENGLISH.with_name('english_gpt')}  # name -> folder
WEIGHTS = ('model.safetensors', 'pytorch_model.bin')  # the first one in a folder counts
SMALL_FILES = ('config.json', 'tokenizer.json', 'tokenizer_config.json', 'vocab.json')
HUB_NAME = r'(?!out/|data/)(gpt2(-\w+)?|[\w-][\w.-]*/[\w.-]+)'


def find(source: str | Path) -> Path:
    """Find the checkpoint or folder of weights that a source names; download it if needed."""
    source = str(source)
    path = BUNDLED.get(source, Path(source).expanduser())
    if (path / 'ckpt.pt').exists():
        return path / 'ckpt.pt'
    if path.is_file() or (path / 'config.json').exists():
        return path
    if re.fullmatch(HUB_NAME, source) and not path.exists():
        return download(source)
    raise UserError(f'no weights found at {source!r}; give a checkpoint, the folder of a run in '
                    'out/, an exported folder, a name on the Hugging Face Hub, or english')


def download(name: str) -> Path:
    """Download the config, tokenizer and weights of a repository; return their folder.

    Without a network, only cached files are used.
    """
    import huggingface_hub as hub
    problem = 'was not found locally, and downloading it failed'
    with user_errors(name, f'there is no folder {name} here', problem):
        for weights in WEIGHTS:
            folder = Path(hub.snapshot_download(name, allow_patterns=[*SMALL_FILES, weights]))
            if (folder / weights).exists():
                break
    return folder


def tokenizer_of(source: str | Path) -> dict:
    """Describe the tokenizer of weights, or the one in a .json.

    Weights without one get GPT-2's if they have the rows of its vocabulary, or up to 255 more as
    padding. Raises UserError for others.
    """
    if str(source).endswith('.json'):
        return read_tokenizer(Path(source).expanduser())
    path = find(source)
    if path.is_file():
        from rucksack.checkpoint import load_file  # here: it needs torch
        with user_errors(path):
            return load_file(path, mmap=True)['tokenizer']
    settings = load_json(path / 'config.json')
    tokenizer = read_tokenizer(path, settings.get('eos_token_id'))
    if tokenizer is not None:
        return tokenizer
    if not 0 <= settings.get('vocab_size', 0) - GPT2_VOCAB < 256:
        raise UserError(f"{path} has no tokenizer.json; use weights that have one, or GPT-2's ids")
    print(f"{path} has no tokenizer; assuming GPT-2's", file=sys.stderr)
    return GPT2
