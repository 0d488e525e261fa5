"""Tokenizers, the folders that prepare.py makes, and the batches of a training step."""

import hashlib
import json
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tiktoken_ext.openai_public import r50k_pat_str
from torch import Tensor, nn
from torch.nn import functional as F

from model import Backpack
from rucksack.common import UserError, one_line
from rucksack.toy import TOY_PATTERN, toy_tokenizer

GPT2, GPT2_VOCAB = {'name': 'gpt2'}, 50257
DATA_NAME = r'(?!.*\.\.)\w[\w./-]*'  # of a folder in data/, never outside it
PIECE = re.compile(r'.{1,65535}\S(?=[ \t\r\n])|.{1,65536}', re.DOTALL)


def vocabulary_of(description: dict | None) -> int:
    """How many ids the described tokenizer has; UserError for unknown ones, whose patterns could hang."""
    if description == GPT2:
        return GPT2_VOCAB
    with suppress(TypeError, LookupError, AttributeError, ValueError):
        if 'merges' in description and description == GPT2 | {'merges': description['merges']}:
            return len(merged_tokens(tuple(description['merges']))) + 1
        if description == toy_tokenizer(description['pieces']):
            return 256 + len(description['pieces']) + 1
    raise UserError("unknown tokenizer; take a checkpoint of train.py, or weights with GPT-2's vocabulary or "
                    'with the merges of another in merges.txt')


def load_tokenizer(description: dict | None) -> tiktoken.Encoding:
    """The tiktoken.Encoding of a description, as in meta.json: ids 0 .. n_vocab - 1, end-of-text the last.
    {'name': 'gpt2', 'merges': [..]} is GPT-2's BPE cut after these merges, and needs no download.
    """
    vocabulary_of(description)
    return _encoding(json.dumps(description))


@lru_cache(maxsize=4)
def _encoding(text: str) -> tiktoken.Encoding:
    if (description := json.loads(text)) == GPT2:
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception as error:  # requests, urllib3 and tiktoken each raise their own without a network
            raise UserError(f'connect, or set TIKTOKEN_CACHE_DIR: no GPT-2 vocabulary ({one_line(error)})')
    if 'merges' in description:
        pattern, tokens = r50k_pat_str, merged_tokens(tuple(description['merges']))
    else:
        pieces = [piece.encode() for piece in description['pieces']]
        pattern, tokens = TOY_PATTERN, [bytes([b]) for b in range(256)] + pieces
    return tiktoken.Encoding(description['name'], pat_str=pattern,
                             mergeable_ranks={token: i for i, token in enumerate(tokens)},
                             special_tokens={'<|endoftext|>': len(tokens)})


# GPT-2's ids 0 to 255: bytes, printable ones first, and the character that stands for each in merges
BYTES = sorted(range(256), key=lambda b: not chr(b).isprintable() or b == 32)
NAMES = {b: chr(b if i < 188 else 68 + i) for i, b in enumerate(BYTES)}
CODES = {name: b for b, name in NAMES.items()}


@lru_cache(maxsize=4)
def merged_tokens(merges: tuple[str, ...]) -> list[bytes]:
    """The tokens of a BPE by rank, from its merges "a b"; ValueError unless each joins two before it."""
    tokens = dict.fromkeys(NAMES.values())
    for merge in merges:
        a, b = merge.split(' ')
        if a + b in tokens or not {a, b} <= tokens.keys():
            raise ValueError(f'{merge!r} joins no two tokens into a new one')
        tokens[a + b] = None
    return list(map(bytes_of, tokens))


def gpt2_tokenizer(n: int | None) -> dict:
    """The description of GPT-2's BPE, cut after its first n merges or whole."""
    return GPT2 if n is None else GPT2 | {'merges': merges_of(load_tokenizer(GPT2))[:n]}


def written(token: bytes) -> str:
    """A token as Hugging Face's files have it, with a character for each byte."""
    return ''.join(NAMES[b] for b in token)


def bytes_of(name: str) -> bytes:
    """The token that is written so."""
    return bytes(CODES[character] for character in name)


def merges_of(encoding: tiktoken.Encoding) -> list[str]:
    """The merges "a b" of a BPE, in order of rank; none for a token that smaller ones do not make."""
    ranks, merges = encoding._mergeable_ranks, []
    for token in sorted(ranks, key=ranks.get)[256:]:
        parts, best = [bytes([b]) for b in token], 0
        while len(parts) > 2 and best < len(ranks):  # merge those of the lowest rank, as in a text
            best, i = min((ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        merges += [' '.join(map(written, parts))] * (len(parts) == 2 and best < len(ranks))
    return merges


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """The ids of a text of any length, special tokens as text. tiktoken gives up on a million spaces, so it
    gets a PIECE at a time, cut where white space begins: no pre-token has it after anything else.
    """
    return [i for piece in PIECE.findall(text) for i in encoding.encode_ordinary(piece)]


def read_meta(folder: Path) -> dict:
    """meta.json of a data folder; for nanoGPT folders, which have none, assume GPT-2's tokens."""
    path = folder / 'meta.json'
    if not folder.is_dir():
        raise UserError(f'{folder} does not exist; run python prepare.py {folder.name}')
    if not path.exists():
        tokens = {file.stem: file.stat().st_size // 2 for file in sorted(folder.glob('*.bin'))}
        return {'tokenizer': GPT2, 'vocab_size': GPT2_VOCAB, 'dtype': 'uint16', 'tokens': tokens}
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        meta = json.loads(path.read_text(encoding='utf-8'))
        n, facts = vocabulary_of(meta['tokenizer']), [meta['tokens'], meta['sha256']]
        kinds = [type(fact[name]) for fact in facts for name in ('train', 'val')]
        if (meta['vocab_size'], meta['dtype'], kinds) == (n, 'uint16', [int, int, str, str]):
            return meta
    raise UserError(f'{path} is damaged; run python prepare.py {folder.name} --overwrite')


def read_bin(folder: Path, name: str, meta: dict, checksum: bool = False) -> np.ndarray:
    """The ids in NAME.bin, a memory map; UserError unless size, ids and, if asked, checksum fit meta."""
    path, n, n_vocab = folder / f'{name}.bin', meta['tokens'].get(name, 0), meta['vocab_size']
    dtype, again = np.dtype('<u2'), f'python prepare.py {folder.name} --overwrite'
    if not path.is_file():
        raise UserError(f'{path} is missing; run {again}')
    if (size := path.stat().st_size) != n * dtype.itemsize:
        raise UserError(f'{path} has {size:,} bytes, not {n:,} tokens of {dtype.itemsize}; run {again}')
    ids = np.memmap(path, dtype, mode='r') if n else np.zeros(0, dtype)
    if (largest := ids.max(initial=0)) >= n_vocab:
        raise UserError(f'{path} holds the id {largest}, beyond a vocabulary of {n_vocab:,}; run {again}')
    if checksum and hashlib.sha256(ids).hexdigest() != meta.get('sha256', {}).get(name):
        raise UserError(f'{path} has another checksum than meta.json; run {again}')
    return ids


class TokenDataset:
    """A bin cut into n texts of block_size tokens, each with its targets: the same text one token later."""

    def __init__(self, folder: Path, name: str, meta: dict, block_size: int):
        self.tokens, self.block_size = read_bin(folder, name, meta), block_size
        self.n = (len(self.tokens) - 1) // block_size
        if self.n < 1:
            raise UserError(f'{folder / name}.bin has {len(self.tokens)} tokens; take a smaller --block_size')

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


# -----------------------------------------------------------------------------
# Distinct ids. Senses depend on the id alone, so a batch needs those of each distinct id once.
# inputs_of finds the distinct ids on the host, DistinctIds uses them in the compiled model.


def inputs_of(idx: Tensor, targets: Tensor, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What DistinctIds takes, on the device: idx and targets (B, T), distinct (n,), place (B, T).

    distinct holds the distinct ids of idx, padded with id 0 to a multiple of 64 so that fewer shapes
    are compiled; place says where in it each token's id stands.
    """
    distinct, place = idx.unique(return_inverse=True)
    distinct = F.pad(distinct, (0, -len(distinct) % 64))
    inputs = (idx, targets, distinct, place)
    on_gpu = device.startswith('cuda')
    if on_gpu:  # pinned, to be copied while the device still computes on the batch before
        inputs = tuple(tensor.pin_memory() for tensor in inputs)
    inputs = tuple(tensor.to(device, non_blocking=on_gpu) for tensor in inputs)
    torch._dynamo.mark_dynamic(inputs[2], 0)  # one compiled graph for any number of distinct ids
    return inputs


class DistinctIds(nn.Module):
    """Plain form: model(idx, targets). The form used for training.

    The caller finds the distinct ids, so that one compiled graph computes the senses of each of
    them once, whatever their number.
    """

    def __init__(self, model: Backpack):
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor, distinct: Tensor, place: Tensor) -> Tensor:
        """The loss of idx and targets (B, T), where idx is distinct[place]: (n,) and (B, T)."""
        C = None
        if self.model.config.n_sense:
            C = self.model.senses_at(distinct, place)  # (B, T, k, d)
        return self.model(idx, targets, C=C)
