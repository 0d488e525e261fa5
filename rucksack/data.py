"""The folders that prepare.py makes, and the batches of a training step."""

import hashlib
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rucksack.errors import LocalError, UserError, user_errors
from rucksack.tokenizer import GPT2, GPT2_VOCAB, load_json, vocab_size

BIN_DTYPE = np.dtype('<u2')
MAKE_IT_AGAIN = 'repeat its prepare.py command with --overwrite'


def data_folder(name: str) -> Path:
    """Return the folder of a dataset, data/NAME; UserError for a name that leads elsewhere."""
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise UserError(f'{name!r} is not the name of a folder in data/: letters, digits, _, -, .')
    return Path('data', name)


def read_meta(folder: Path) -> dict:
    """Read a data folder's meta.json; without one (as in nanoGPT), the tokens are GPT-2's."""
    if not folder.is_dir():
        raise UserError(f'{folder} is not a folder; python prepare.py --help says how to make it')
    path = folder / 'meta.json'
    if path.exists():
        with user_errors(path, MAKE_IT_AGAIN):
            meta = load_json(path)
            n_vocab = vocab_size(meta['tokenizer'])
            if meta['vocab_size'] != n_vocab:
                raise ValueError(f'its tokenizer has {n_vocab:,} ids')
            return meta
    if (folder / 'meta.pkl').exists():
        raise UserError(f'{folder} has a meta.pkl: its ids are characters, not GPT-2 tokens; '
                        f'run python prepare.py {folder.name} --text input.txt --overwrite')
    files = sorted(folder.glob('*.bin'))
    tokens = {file.stem: file.stat().st_size // BIN_DTYPE.itemsize for file in files}
    return {'tokenizer': GPT2, 'vocab_size': GPT2_VOCAB, 'tokens': tokens}


def facts_of(meta: dict) -> str:
    """Tell the data of one meta.json from other data: the tokens and the checksums of its bins."""
    return str([meta['tokens'], meta.get('sha256')])


def sha256_of_start(ids: np.ndarray) -> str:
    """Compute a checksum of the first half million ids, which tells data from other data fast."""
    return hashlib.sha256(ids[:1 << 19]).hexdigest()


def read_bin(path: Path, meta: dict) -> np.ndarray:
    """Map the ids in a .bin into memory; UserError if their number or start does not fit meta.

    Of a large file only the start is read; check_ids looks at ids when they are used.
    """
    with user_errors(path, MAKE_IT_AGAIN):
        ids = np.memmap(path, BIN_DTYPE, mode='r')  # ValueError for an empty file
    checksum = meta.get('sha256_of_start', {}).get(path.stem)
    if len(ids) != meta['tokens'].get(path.stem) or checksum not in (None, sha256_of_start(ids)):
        raise UserError(f'{path} is not the file that meta.json describes; {MAKE_IT_AGAIN}')
    if 'sha256' not in meta:  # not made by prepare.py
        start = ids[:1 << 20]
        if start[0::2].any() != start[1::2].any():  # every second id is 0
            raise UserError(f'{path} does not hold uint16 ids, as nanoGPT writes them, but wider '
                            'numbers')
    return ids


def check_ids(ids: np.ndarray, meta: dict, path: Path) -> None:
    """Raise LocalError for an id beyond the vocabulary, which one process alone may have read."""
    if ids.max() >= meta['vocab_size']:
        raise LocalError(f'{path} holds the id {ids.max()}, beyond a vocabulary of '
                         f'{meta["vocab_size"]:,}; {MAKE_IT_AGAIN}')


class TokenDataset:
    """A .bin file cut into n texts of block_size tokens; targets are shifted by one token."""

    def __init__(self, folder: Path, name: str, meta: dict, block_size: int):
        self.path = folder / f'{name}.bin'
        self.meta = meta
        self.tokens = read_bin(self.path, meta)
        self.block_size = block_size
        self.n = (len(self.tokens) - 1) // block_size
        if self.n < 1:
            raise UserError(f'{self.path} has {len(self.tokens)} tokens, too few for '
                            'one text; choose a smaller --block_size')

    def __call__(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the chosen texts and their targets, (len(chosen), block_size) each."""
        spans = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        ids = self.tokens[spans].astype(np.int64)
        check_ids(ids, self.meta, self.path)
        ids = torch.from_numpy(ids)
        return ids[:, :-1], ids[:, 1:]

    def spread(self, most: int) -> np.ndarray:
        """Choose at most `most` texts, spread evenly over the data."""
        n = min(self.n, most)
        return np.arange(n) * self.n // n


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Draw the order of the n texts in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def texts_of_step(seed: int, step: int, size: int, n: int) -> np.ndarray:
    """Choose a step's texts among n, (size,). An epoch has each once; a step may span epochs."""
    places = range(step * size, (step + 1) * size)
    return np.array([epoch_order(seed, i // n, n)[i % n] for i in places])
