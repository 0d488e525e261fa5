"""Tokenizers, the folders that prepare.py makes, and the batches of a training step.

A description, a dictionary of plain values, stands for a tokenizer in meta.json and in checkpoints. The batch
of a step is a pure function of (seed, step). What a file says is checked before it is believed.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.common import UserError
from rucksack.toy import TOY_PATTERN

GPT2, GPT2_VOCAB = {'name': 'gpt2'}, 50257
PIECE = 1 << 16  # characters that tiktoken gets at a time
CUT = re.compile(r'.*\S(?=\s)', re.DOTALL)


def vocabulary_of(description: dict | None) -> int:
    """How many ids the described tokenizer has; UserError where it is none we know.

    Descriptions come in untrusted files, and a regular expression can be made to run for ever: so a pattern
    must be the known one.
    """
    if description == GPT2:
        return GPT2_VOCAB
    try:
        pieces = {piece.encode() for piece in description['pieces'] if len(piece.encode()) > 1}
        if description == {'name': 'toy', 'pattern': TOY_PATTERN, 'pieces': description['pieces']} \
                and len(pieces) == len(description['pieces']):
            return 256 + len(pieces) + 1
    except (TypeError, LookupError, AttributeError, ValueError):
        pass
    raise UserError("no known tokenizer is described; take a checkpoint of train.py, or weights with GPT-2's "
                    'vocabulary')


def load_tokenizer(description: dict | None) -> tiktoken.Encoding:
    """The tiktoken.Encoding that a description stands for; ids 0 .. n_vocab - 1, end-of-text the last."""
    vocabulary_of(description)
    return _encoding(json.dumps(description))


@lru_cache(maxsize=4)
def _encoding(description: str) -> tiktoken.Encoding:
    d = json.loads(description)
    if d == GPT2:
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception as error:  # requests, urllib3 and tiktoken each raise their own without a network
            raise UserError(f"GPT-2's vocabulary cannot be fetched ({type(error).__name__}); connect once, "
                            'or set TIKTOKEN_CACHE_DIR to a folder that holds it')
    tokens = [bytes([b]) for b in range(256)] + [piece.encode() for piece in d['pieces']]
    return tiktoken.Encoding('toy', pat_str=TOY_PATTERN, special_tokens={'<|endoftext|>': len(tokens)},
                             mergeable_ranks={token: i for i, token in enumerate(tokens)})


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces that encode as the whole does: tiktoken gives up on, say, a million spaces.

    No pre-token of these tokenizers has white space after anything else, so cuts there change nothing. A
    stretch of PIECE characters without such a place is cut anywhere.
    """
    start = 0
    while len(text) - start > PIECE:
        cut = CUT.match(text, start, start + PIECE)
        end = cut.end() if cut else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """The ids of a text of any length, special tokens as plain text."""
    return [i for piece in pieces_of(text) for i in encoding.encode_ordinary(piece)]

DATA_NAME = r'(?!.*\.\.)\w[\w./-]*'  # of a folder in data/, never outside it


def token_dtype(n_vocab: int) -> str:
    """uint16 while every id fits, else uint32."""
    return 'uint16' if n_vocab <= 1 << 16 else 'uint32'


def how_to_make(folder: Path) -> str:
    """The command that makes a data folder."""
    own = folder.name not in ('toy', 'openwebtext')
    return f'python prepare.py {folder.name}' + ' --text FILE...' * own


def read_meta(folder: Path) -> dict:
    """meta.json of a data folder; for nanoGPT folders, which have none, assume GPT-2's tokens."""
    if not folder.is_dir():
        raise UserError(f'{folder} does not exist; run {how_to_make(folder)}')
    if not (folder / 'meta.json').exists():
        tokens = {path.stem: path.stat().st_size // 2 for path in sorted(folder.glob('*.bin'))}
        return {'tokenizer': GPT2, 'vocab_size': GPT2_VOCAB, 'dtype': 'uint16', 'tokens': tokens}
    try:
        meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
        n, facts = vocabulary_of(meta['tokenizer']), [meta['tokens'], meta['sha256']]
        kinds = [type(fact[name]) for fact in facts for name in ('train', 'val')]
        if (meta['vocab_size'], meta['dtype'], kinds) != (n, token_dtype(n), [int, int, str, str]):
            raise ValueError('values that do not fit together')
        return meta
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f'{folder}/meta.json is damaged; run {how_to_make(folder)} --overwrite')


def open_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """The ids in NAME.bin of a data folder, mapped from the file; UserError unless it has its size."""
    path, n = folder / f'{name}.bin', meta['tokens'].get(name, 0)
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    size = path.stat().st_size if path.is_file() else None
    if size != n * dtype.itemsize:
        has = 'is missing' if size is None else f'has {size:,} bytes, not {n:,} tokens of {dtype.itemsize}'
        raise UserError(f'{path} {has}; run {how_to_make(folder)} --overwrite')
    return np.memmap(path, dtype, mode='r') if n else np.zeros(0, dtype)


def read_bin(folder: Path, name: str, meta: dict, checksum: bool = False) -> np.ndarray:
    """open_bin, after all ids have been read; UserError where one is beyond the vocabulary, or where the
    checksum, if asked for, is not the one in meta.json.
    """
    ids, digest, path = open_bin(folder, name, meta), hashlib.sha256(), folder / f'{name}.bin'
    for i in range(0, len(ids), 1 << 24):
        chunk = ids[i:i + (1 << 24)]
        if (largest := chunk.max()) >= meta['vocab_size']:
            raise UserError(f'{path} holds the id {largest}, beyond a vocabulary of {meta["vocab_size"]:,}; '
                            f'run {how_to_make(folder)} --overwrite')
        if checksum:
            digest.update(chunk.tobytes())
    if checksum and digest.hexdigest() != meta.get('sha256', {}).get(name):
        raise UserError(f'{path} has another checksum than meta.json; run {how_to_make(folder)} --overwrite')
    return ids


class TokenDataset:
    """A bin cut into n texts of block_size tokens, each with its targets: the same text one token later."""

    def __init__(self, folder: Path, name: str, meta: dict, block_size: int):
        self.tokens, self.block_size = read_bin(folder, name, meta), block_size
        self.n = (len(self.tokens) - 1) // block_size
        if self.n < 1:
            raise UserError(f'{folder / name}.bin holds {len(self.tokens):,} tokens, but one text takes '
                            f'block_size + 1 = {block_size + 1}; give more text, or a smaller --block_size')

    def __call__(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """The chosen texts and their targets, (len(chosen), block_size) each."""
        spans = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        ids = torch.from_numpy(self.tokens[spans].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the n texts in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def texts_of_step(seed: int, step: int, size: int, n: int) -> np.ndarray:
    """Which of n texts a step of size texts reads: epochs follow without a seam, each has every text once."""
    return np.array([epoch_order(seed, i // n, n)[i % n] for i in range(step * size, (step + 1) * size)])


def inputs_of(idx: Tensor, targets: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What model.DistinctIds takes, on the device: idx and targets (B, T), the distinct ids (n,), padded with
    id 0 to a multiple of 64 so that fewer shapes are compiled, and the place (B, T) of each token among them.
    """
    distinct, place = idx.unique(return_inverse=True)
    inputs = idx, targets, F.pad(distinct, (0, -len(distinct) % 64)), place
    if device.startswith('cuda'):  # copied while it still computes on the batch before
        inputs = tuple(t.pin_memory() for t in inputs)
    inputs = tuple(t.to(device, non_blocking=True) for t in inputs)
    torch._dynamo.mark_dynamic(inputs[2], 0)  # one compiled graph for any number of distinct ids
    return inputs
