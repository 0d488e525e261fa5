"""The folders that prepare.py makes, and the chunks of ids that a training step reads."""

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rucksack.errors import UserError, user_errors

BIN_DTYPE = np.dtype('<u2')
MAKE_IT_AGAIN = 'run prepare.py (see --help), with --overwrite if it ran before'


def data_folder(name: str) -> Path:
    """Return the folder of a dataset: data/NAME, or NAME if that is an absolute path or in ~."""
    return Path('data', Path(name).expanduser())


def read_meta(folder: Path) -> dict:
    """Read a data folder's meta.json. Raises UserError if vocab_size is not its tokenizer's."""
    from rucksack.tokenizer import vocab_size  # here: most readers of data need no tiktoken
    path = folder / 'meta.json'
    with user_errors(path, MAKE_IT_AGAIN):
        meta = json.loads(path.read_text(encoding='utf-8'))
        if meta['vocab_size'] != vocab_size(meta['tokenizer']):  # no checkpoint would load
            raise ValueError('vocab_size is not the number of ids in its tokenizer')
        return meta


def data_id(meta: dict) -> str:
    """Identify the data of a meta.json by token counts and checksums."""
    return str([meta['tokens'], meta.get('sha256')])


def sha256_of_start(ids: np.ndarray) -> str:
    """Compute a checksum of the first half million ids, a fast way to tell datasets apart."""
    return hashlib.sha256(ids[:1 << 19]).hexdigest()


def read_bin(path: Path, meta: dict) -> np.ndarray:
    """Memory-map the ids in a .bin; raises UserError if their number or start is not meta's."""
    with user_errors(path, MAKE_IT_AGAIN):
        ids = np.memmap(path, BIN_DTYPE, mode='r')  # raises ValueError for an empty file
    checksum = meta.get('sha256_of_start', {}).get(path.stem)
    n_ids = meta['tokens'].get(path.stem)
    if len(ids) != n_ids or checksum not in (None, sha256_of_start(ids)):
        raise UserError(f'{path} is not the file that meta.json describes; {MAKE_IT_AGAIN}')
    return ids


def read_chunks(path: Path, meta: dict, block_size: int) -> np.ndarray:
    """Memory-map the chunks of a .bin, each with the id after it: (n_chunks, block_size + 1)."""
    ids = read_bin(path, meta)
    with user_errors(path, 'choose a smaller --block_size', problem='has too few ids'):
        return sliding_window_view(ids, block_size + 1)[::block_size]


def check_ids(ids: np.ndarray, meta: dict, path: Path) -> None:
    """Raise UserError for an id beyond the vocabulary, which would crash CUDA."""
    if ids.max() >= meta['vocab_size']:
        raise UserError(f'{path} holds the id {ids.max()}, beyond its vocabulary; {MAKE_IT_AGAIN}')
