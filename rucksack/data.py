"""Tokenizers, data folders, and the batches of a step."""

import hashlib
import io
import json
import os
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

DATA_NAME = r'(?!.*\.\.)\w[\w./-]*'  # of a folder below data/, never outside it

END_OF_TEXT = '<|endoftext|>'


# -----------------------------------------------------------------------------
# The tokenizer. Its description, a dictionary of plain values, travels in meta.json and in every checkpoint.

GPT2 = {'name': 'gpt2'}


def vocabulary_of(description: dict | None) -> int:
    """How many words the tokenizer has that a description stands for; UserError where none does.

    Descriptions come in files from others. So a pattern is not tried, it must be the known one: a regular
    expression can be made to take for ever.
    """
    if description == GPT2:
        return 50257
    try:
        if (description['name'], description['pattern']) == ('toy', TOY_PATTERN):
            pieces = {piece.encode() for piece in description['pieces']}
            if len(pieces) == len(description['pieces']) and all(len(piece) > 1 for piece in pieces):
                return 256 + len(pieces) + 1
    except (TypeError, LookupError, AttributeError, ValueError):
        pass
    raise UserError("no tokenizer is known for this vocabulary, or its description is damaged; take a "
                    "checkpoint of train.py, or weights with GPT-2's vocabulary")


@lru_cache(maxsize=4)
def _encoding(description: str) -> tiktoken.Encoding:
    d = json.loads(description)
    if d['name'] == 'gpt2':
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception as error:  # requests, urllib3 and tiktoken each raise their own without a network
            raise UserError(f"GPT-2's vocabulary could not be fetched ({type(error).__name__}); connect "
                            'once, or set TIKTOKEN_CACHE_DIR to a folder that holds it')
    tokens = [bytes([b]) for b in range(256)] + [piece.encode() for piece in d['pieces']]
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding(d['name'], pat_str=d['pattern'], mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(tokens)})


def load_tokenizer(description: dict | None) -> tiktoken.Encoding:
    """The tiktoken.Encoding that a description stands for; ids 0 .. n_vocab - 1, end-of-text the last."""
    vocabulary_of(description)
    return _encoding(json.dumps(description))


# -----------------------------------------------------------------------------
# Data folders, as train.py and eval.py read them too. Whatever a file says is checked before it is believed.


def token_dtype(n_vocab: int) -> str:
    """uint16 while every id fits, else uint32."""
    return 'uint16' if n_vocab <= 1 << 16 else 'uint32'


def how_to_make(folder: Path) -> str:
    """The command that makes a data folder."""
    own = folder.name not in ('toy', 'openwebtext')
    return f'python prepare.py {folder.name}' + ' --text FILE...' * own


def is_meta(meta: dict) -> bool:
    """Whether the content of a meta.json is what prepare writes."""
    try:
        counts = [meta['tokens'][name] for name in ('train', 'val')]
        sums = [meta['sha256'][name] for name in ('train', 'val')]
        return (type(meta['vocab_size']) is int and meta['vocab_size'] == vocabulary_of(meta['tokenizer'])
                and meta['dtype'] == token_dtype(meta['vocab_size'])
                and all(type(n) is int and 0 <= n < 1 << 48 for n in counts)
                and all(type(s) is str and re.fullmatch('[0-9a-f]{64}', s) for s in sums))
    except (KeyError, TypeError, UserError):
        return False


def read_meta(folder: Path) -> dict:
    """meta.json of a data folder; of one without, as nanoGPT makes it, what it would say: GPT-2's tokens."""
    if not os.path.isdir(folder):
        raise UserError(f'{folder} does not exist; run {how_to_make(folder)}')
    path = folder / 'meta.json'
    if not path.exists():
        tokens = {name: (folder / f'{name}.bin').stat().st_size // 2
                  for name in ('train', 'val') if (folder / f'{name}.bin').is_file()}
        return {'tokenizer': GPT2, 'vocab_size': 50257, 'dtype': 'uint16', 'tokens': tokens}
    try:
        meta = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        meta = {}
    if not is_meta(meta):
        raise UserError(f'{path} is damaged; run {how_to_make(folder)} --overwrite')
    return meta


def open_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """The ids in NAME.bin of a data folder, mapped from the file; UserError unless it has its size."""
    path, dtype = folder / f'{name}.bin', np.dtype(meta['dtype']).newbyteorder('<')
    if not path.is_file():
        raise UserError(f'{path} does not exist, or is no file; run {how_to_make(folder)} --overwrite')
    n, odd = divmod(path.stat().st_size, dtype.itemsize)
    if odd or n != meta['tokens'][name]:
        raise UserError(f'{path} has {path.stat().st_size:,} bytes, not {meta["tokens"][name]:,} tokens of '
                        f'{dtype.itemsize}; run {how_to_make(folder)} --overwrite')
    return np.memmap(path, dtype, mode='r') if n else np.zeros(0, dtype)


def read_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """The same; UserError where an id is beyond the vocabulary, for which all of the file is read."""
    ids = open_bin(folder, name, meta)
    largest = max((int(ids[i:i + (1 << 24)].max()) for i in range(0, len(ids), 1 << 24)), default=0)
    if largest >= meta['vocab_size']:
        raise UserError(f'{folder / name}.bin holds the token id {largest}, beyond the vocabulary of '
                        f'{meta["vocab_size"]:,}; run {how_to_make(folder)} --overwrite')
    return ids


def verify(folder: Path) -> None:
    """Raise UserError unless both bins of a folder have the ids and the checksums that meta.json has."""
    meta = read_meta(folder)
    if 'sha256' not in meta:
        raise UserError(f'{folder} has no meta.json, so nothing to check its bins by')
    for name in ('train', 'val'):
        digest = hashlib.sha256()
        ids = read_bin(folder, name, meta)
        for i in range(0, len(ids), 1 << 24):
            digest.update(ids[i:i + (1 << 24)].tobytes())
        if digest.hexdigest() != meta['sha256'][name]:
            raise UserError(f'{folder / name}.bin is damaged: its checksum is not that in meta.json; run '
                            f'{how_to_make(folder)} --overwrite')
        print(f'{folder / name}.bin: {len(ids):,} tokens, the checksum is right')


# -----------------------------------------------------------------------------
# Reading. Any corpus becomes rows (text, end); a long document is several rows, and its last one has end.

PIECE = 1 << 16  # characters of a document held in memory at once


def pieces_of(stream: io.TextIOBase) -> Iterator[str]:
    """The text of a stream in pieces of about PIECE characters that encode as the whole does.

    GPT-2's tokenizer parts a text wherever white space follows something else, so a cut there is harmless.
    """
    text = ''
    while more := stream.read(PIECE):
        text += more
        places = [m.end() for m in re.finditer(r'\S(?=\s)', text)]
        if not places and len(text) > 8 * PIECE:  # no white space at all: cut anywhere
            places = [len(text)]
        if places:
            yield text[:places[-1]]
            text = text[places[-1]:]
    if text:
        yield text


# -----------------------------------------------------------------------------
# Data: the batch of a step is a pure function of (seed, step).


class Blocks:
    """A bin cut into texts of block_size tokens, each with its targets, the same texts one token later."""

    def __init__(self, folder: Path, name: str, meta: dict, block_size: int):
        self.tokens, self.block_size = read_bin(folder, name, meta), block_size
        self.n = (len(self.tokens) - 1) // block_size
        if self.n < 1:
            raise UserError(f'{folder / name}.bin holds {len(self.tokens):,} tokens, but one text takes '
                            f'block_size + 1 = {block_size + 1}; take more text, or a smaller --block_size')

    def __call__(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Texts and targets (len(chosen), block_size) of the chosen blocks."""
        spans = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        ids = torch.from_numpy(self.tokens[spans].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the n blocks in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def blocks_of_step(seed: int, step: int, size: int, n: int) -> np.ndarray:
    """The size blocks of a step: epochs run on without a seam, and each has every block once."""
    places = np.arange(step * size, (step + 1) * size)
    return np.array([epoch_order(seed, int(place) // n, n)[place % n] for place in places])


def distinct_words(idx: Tensor) -> tuple[Tensor, Tensor]:
    """The words of idx (..), (n,), and the place (..) of every token among them: words[place] is idx.

    Each is there once, then word 0 again, where no place points to, up to a multiple of 64: fewer sizes.
    """
    words, place = idx.unique(return_inverse=True)
    return F.pad(words, (0, -len(words) % 64)), place


def inputs_of(idx: Tensor, targets: Tensor, device: str) -> dict:
    """What a model takes to learn from texts and targets (B, T), on the device: these, their distinct words.

    To CUDA they go from pinned memory, copied while it still computes on what came before.
    """
    def move(t: Tensor) -> Tensor:
        """A tensor on the device."""
        return t.pin_memory().to(device, non_blocking=True) if device.startswith('cuda') else t.to(device)

    words, place = map(move, distinct_words(idx))
    torch._dynamo.mark_dynamic(words, 0)  # one compiled model for any number of them
    return {'idx': move(idx), 'targets': move(targets), 'distinct': (words, place), 'loss_only': True}
