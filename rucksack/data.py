"""The folders that prepare.py makes, and the chunks of ids that a training step reads."""

import hashlib
import re
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rucksack.errors import UserError, user_errors
from rucksack.tokenizer import GPT2, GPT2_VOCAB, load_json, vocab_size

BIN_DTYPE = np.dtype('<u2')
MAKE_IT_AGAIN = 'repeat its prepare.py command with --overwrite'


def data_folder(name: str) -> Path:
    """Return the folder of a dataset, data/NAME; raises UserError if it would be elsewhere."""
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise UserError(f'{name!r} cannot name a folder in data/; use letters, digits, _, - and .')
    return Path('data', name)


def read_meta(folder: Path) -> dict:
    """Read a data folder's meta.json; without one (as in nanoGPT), the tokens are GPT-2's."""
    if not folder.is_dir():
        raise UserError(f'{folder} is not a folder; see python prepare.py --help to make it')
    path = folder / 'meta.json'
    if path.exists():
        with user_errors(path, MAKE_IT_AGAIN):
            meta = load_json(path)
            n_vocab = vocab_size(meta['tokenizer'])
            if meta['vocab_size'] != n_vocab:
                raise ValueError(f'vocab_size is {meta["vocab_size"]}, but its tokenizer has '
                                 f'{n_vocab} ids')
            return meta
    if (folder / 'meta.pkl').exists():
        raise UserError(f'{folder} has a meta.pkl: its ids are characters, not GPT-2 tokens; '
                        f'run python prepare.py {folder.name} --text input.txt --overwrite')
    files = sorted(folder.glob('*.bin'))
    tokens = {file.stem: file.stat().st_size // BIN_DTYPE.itemsize for file in files}
    return {'tokenizer': GPT2, 'vocab_size': GPT2_VOCAB, 'tokens': tokens}


def data_id(meta: dict) -> str:
    """Identify the data of a meta.json by token counts and checksums."""
    return str([meta['tokens'], meta.get('sha256')])


def sha256_of_start(ids: np.ndarray) -> str:
    """Compute a checksum of the first half million ids, a fast way to tell datasets apart."""
    return hashlib.sha256(ids[:1 << 19]).hexdigest()


def read_bin(path: Path, meta: dict) -> np.ndarray:
    """Memory-map the ids in a .bin; raises UserError if their number or start does not match meta.

    Only the start of a large file is read; check_ids checks ids when they are used.
    """
    with user_errors(path, MAKE_IT_AGAIN):
        ids = np.memmap(path, BIN_DTYPE, mode='r')  # raises ValueError for an empty file
    checksum = meta.get('sha256_of_start', {}).get(path.stem)
    if len(ids) != meta['tokens'].get(path.stem) or checksum not in (None, sha256_of_start(ids)):
        raise UserError(f'{path} is not the file that meta.json describes; {MAKE_IT_AGAIN}')
    if 'sha256' not in meta:  # not made by prepare.py
        start = ids[:1 << 20]
        if start[:3].tobytes() == b'\x93NUMPY':
            raise UserError(f'{path} is a .npy file; save the ids with ids.tofile(path)')
        if start[0::2].any() != start[1::2].any():  # every second id is 0
            raise UserError(f'{path} holds numbers wider than 16 bits; write uint16 ids, as '
                            'nanoGPT does')
    return ids


def read_chunks(path: Path, meta: dict, block_size: int) -> np.ndarray:
    """Memory-map the chunks of a .bin, each with the id after it: (n_chunks, block_size + 1)."""
    ids = read_bin(path, meta)
    with user_errors(path, 'choose a smaller --block_size', problem='has too few ids'):
        return sliding_window_view(ids, block_size + 1)[::block_size]


def check_ids(ids: np.ndarray, meta: dict, path: Path) -> None:
    """Raise UserError for an id beyond the vocabulary."""
    if ids.max() >= meta['vocab_size']:
        raise UserError(f'{path} holds the id {ids.max()}, but its vocabulary has only '
                        f'{meta["vocab_size"]:,} ids; {MAKE_IT_AGAIN}')
