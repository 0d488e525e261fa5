"""The folders that prepare.py makes, and the batches of a training step."""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rucksack.cli import UserError, reading
from rucksack.tokenizer import GPT2, GPT2_VOCAB

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
        with reading(path, MAKE_IT_AGAIN):
            return json.loads(path.read_text(encoding='utf-8'))
    if (folder / 'meta.pkl').exists():
        raise UserError(f'{folder} has a meta.pkl: its ids are characters, not GPT-2 tokens; '
                        f'run python prepare.py {folder.name} --text input.txt --overwrite')
    files = sorted(folder.glob('*.bin'))
    tokens = {file.stem: file.stat().st_size // BIN_DTYPE.itemsize for file in files}
    return {'tokenizer': GPT2, 'vocab_size': GPT2_VOCAB, 'tokens': tokens}


def facts_of(meta: dict) -> str:
    """Tell the data of one meta.json from other data: the tokens and the checksums of its bins."""
    return str([meta['tokens'], meta.get('sha256')])


def read_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """Map the ids in NAME.bin into memory; UserError if its checksum or an id does not fit meta."""
    path = folder / f'{name}.bin'
    with reading(path, MAKE_IT_AGAIN):
        ids = np.memmap(path, BIN_DTYPE, mode='r')  # ValueError for an empty file
    checksum = meta.get('sha256', {}).get(name)
    if checksum:
        if hashlib.sha256(ids).hexdigest() != checksum:
            raise UserError(f'{path} does not match its checksum in meta.json; {MAKE_IT_AGAIN}')
    else:  # not made by prepare.py
        is_wide = ids[0::2].any() != ids[1::2].any()  # every second id is 0
        is_npy = ids[:3].tobytes() == b'\x93NUMPY'
        if is_wide or is_npy:
            raise UserError(f'{path} does not hold uint16 ids, as nanoGPT writes them, but wider '
                            'numbers or a .npy file')
    if ids.max() >= meta['vocab_size']:
        raise UserError(f'{path} holds the id {ids.max()}, beyond a vocabulary of '
                        f'{meta["vocab_size"]:,}; {MAKE_IT_AGAIN}')
    return ids


class TokenDataset:
    """A .bin file cut into n texts of block_size tokens; targets are shifted by one token."""

    def __init__(self, folder: Path, name: str, meta: dict, block_size: int):
        self.tokens = read_bin(folder, name, meta)
        self.block_size = block_size
        self.n = (len(self.tokens) - 1) // block_size
        if self.n < 1:
            raise UserError(f'{folder / name}.bin has {len(self.tokens)} tokens, too few for '
                            'one text; choose a smaller --block_size')

    def __call__(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the chosen texts and their targets, (len(chosen), block_size) each."""
        spans = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        ids = torch.from_numpy(self.tokens[spans].astype(np.int64))
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
