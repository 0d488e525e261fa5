"""Tokenizers: GPT-2's BPE, whole or with its first N merges only, and lists of whole words.

A tokenizer is described by a dictionary, stored in meta.json and in checkpoints:

    {'name': 'gpt2'}                        GPT-2's BPE, which tiktoken downloads once
    {'name': 'gpt2', 'merges': ['Ġ t', ..]} the same, cut after these merges; no download
    {'name': 'words', 'pieces': [..]}       every piece, such as ' nurse', is one token

Ids run from 0 to n_vocab - 1; the end-of-text id is the last.
"""

import json
import re
from functools import lru_cache
from pathlib import Path

import tiktoken
from tiktoken._educational import bpe_encode
from tiktoken_ext.openai_public import r50k_pat_str

from rucksack import HOME
from rucksack.cli import UserError, reading

GPT2 = {'name': 'gpt2'}
GPT2_VOCAB = 50257
END_OF_TEXT = '<|endoftext|>'
WORDS_PATTERN = r' ?\w+|[^\w\s]|\s+'
ENGLISH = HOME / 'pretrained' / 'english'  # the bundled model

# GPT-2 orders the 256 bytes, printable ones first; its files spell each byte as one character.
BYTES = sorted(range(256), key=lambda byte: not chr(byte).isprintable() or byte == 32)
N_PRINTABLE = 188
CHARACTER_OF = {byte: chr(byte if i < N_PRINTABLE else 256 + i - N_PRINTABLE)
                for i, byte in enumerate(BYTES)}
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}


def spell(token: bytes) -> str:
    """Spell a token as GPT-2's files do, one character a byte."""
    return token.decode('latin-1').translate(CHARACTER_OF)


def unspell(text: str) -> bytes:
    """Return the token with this spelling."""
    return bytes(BYTE_OF[character] for character in text)


# -----------------------------------------------------------------------------
# From a description to an encoding.


def words_tokenizer(texts: list[str]) -> dict:
    """Describe a tokenizer in which each word of the texts, with its space, is one token."""
    pieces = set()
    for text in texts:
        pieces.update(re.findall(WORDS_PATTERN, text))
    longer_than_a_byte = [piece for piece in sorted(pieces) if len(piece.encode()) > 1]
    return {'name': 'words', 'pieces': longer_than_a_byte}


def tokens_of(description: dict) -> list[bytes]:
    """List all tokens except end-of-text, by id; UserError if there is no description."""
    if description == GPT2:
        return tokens_by_rank(gpt2_encoding())
    if description is None:
        raise UserError("the weights come without a tokenizer.json; use weights with GPT-2's "
                        'vocabulary or with a tokenizer.json')
    if description['name'] == 'gpt2':
        return merged_tokens(description['merges'])
    single_bytes = [bytes([byte]) for byte in range(256)]
    return single_bytes + [piece.encode() for piece in description['pieces']]


def vocab_size(description: dict) -> int:
    """Count the ids, end-of-text included."""
    if description == GPT2:
        return GPT2_VOCAB  # known without a download
    return len(tokens_of(description)) + 1


def load_tokenizer(description: dict) -> tiktoken.Encoding:
    """Make the tiktoken.Encoding of a description; UserError if there is none."""
    return cached_encoding(json.dumps(description, default=str))


@lru_cache(maxsize=4)
def cached_encoding(description_json: str) -> tiktoken.Encoding:
    """Make the encoding of a description in JSON, once."""
    description = json.loads(description_json)
    tokens = tokens_of(description)
    ranks = {token: i for i, token in enumerate(tokens)}
    patterns = {'gpt2': r50k_pat_str, 'words': WORDS_PATTERN}
    name = description['name']
    return tiktoken.Encoding(name, pat_str=patterns[name], mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(tokens)})


def gpt2_encoding() -> tiktoken.Encoding:
    """Load GPT-2's encoding; UserError if it can neither be found nor downloaded."""
    hint = ('connect to the internet, set TIKTOKEN_CACHE_DIR, or run prepare.py with '
            '--merges 16384')
    with reading("GPT-2's vocabulary", hint):
        return tiktoken.get_encoding('gpt2')


def tokens_by_rank(encoding: tiktoken.Encoding) -> list[bytes]:
    """List the tokens of an encoding in order of id, without end-of-text."""
    ranks = encoding._mergeable_ranks
    return sorted(ranks, key=ranks.get)


def merged_tokens(merges: list[str]) -> list[bytes]:
    """List the tokens of a BPE by rank, from its merges 'a b'.

    merged_tokens(['Ġ t', 'h e', 'Ġt he'])[256:] is [b' t', b'he', b' the'].
    """
    longer = [merge.replace(' ', '') for merge in merges]
    return [unspell(token) for token in [*BYTE_OF, *longer]]


def merges_of(encoding: tiktoken.Encoding) -> list[str]:
    """List the merges 'a b' of a BPE by rank; a token not made of two smaller ones has no merge."""
    ranks = dict(encoding._mergeable_ranks)
    tokens = tokens_by_rank(encoding)
    merges = []
    for i, token in enumerate(tokens[256:], 256):
        del ranks[token]  # so BPE stops before its last merge
        parts = bpe_encode(ranks, token, visualise=None)  # ids
        ranks[token] = i
        if len(parts) == 2:
            merges.append(' '.join(spell(tokens[part]) for part in parts))
    return merges


def gpt2_tokenizer(n_merges: int | None) -> dict:
    """Describe GPT-2's BPE, whole or cut after its first n_merges.

    The bundled model has the first 16,384 merges, so cutting there or earlier needs no download.
    """
    if n_merges is None:
        return GPT2
    merges = read_tokenizer(ENGLISH)['merges'] if ENGLISH.is_dir() else []
    if len(merges) < n_merges:
        merges = merges_of(gpt2_encoding())
    return GPT2 | {'merges': merges[:n_merges]}


PIECE = re.compile(r'.{1,65535}\S(?=[ \t\r\n])|.{1,65536}', re.DOTALL)


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Encode a text of any length; special tokens count as text.

    tiktoken gives up on a million spaces, so it gets one PIECE at a time. A piece ends where white
    space begins, and no token spans such a boundary; without white space, it ends anywhere.
    """
    ids = []
    for piece in PIECE.findall(text):
        ids.extend(encoding.encode_ordinary(piece))
    return ids


# -----------------------------------------------------------------------------
# tokenizer.json, as transformers reads and writes it.


def tokenizer_files(description: dict) -> dict[str, dict]:
    """Make the JSON files from which transformers makes a tokenizer, by name."""
    encoding = load_tokenizer(description)
    of_words = description['name'] != 'gpt2'
    byte_level = {
        'type': 'ByteLevel',
        'add_prefix_space': False,
        'trim_offsets': False,
        'use_regex': not of_words}
    pre_tokenizers = [byte_level]
    if of_words:
        split = {
            'type': 'Split',
            'pattern': {'Regex': WORDS_PATTERN},
            'behavior': 'Isolated',
            'invert': False}
        pre_tokenizers = [split, byte_level]
    end_of_text = {
        'id': encoding.eot_token,
        'content': END_OF_TEXT,
        'special': True,
        'single_word': False,
        'lstrip': False,
        'rstrip': False,
        'normalized': False}
    bpe = {
        'type': 'BPE',
        'vocab': spelled_vocab(description),
        'merges': merges_of(encoding),
        'ignore_merges': of_words}
    tokenizer = {
        'version': '1.0',
        'added_tokens': [end_of_text],
        'model': bpe,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': pre_tokenizers},
        'decoder': byte_level}
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': END_OF_TEXT,
        'eos_token': END_OF_TEXT,
        'model_input_names': ['input_ids', 'attention_mask'],  # no token_type_ids
        'clean_up_tokenization_spaces': False}
    generation = {
        'eos_token_id': encoding.eot_token,
        'pad_token_id': encoding.eot_token}
    return {
        'tokenizer.json': tokenizer,
        'tokenizer_config.json': config,
        'generation_config.json': generation}


def spelled_vocab(description: dict) -> dict[str, int]:
    """Map every token, as GPT-2's files spell it, to its id."""
    return {spell(token): i for i, token in enumerate(tokens_of(description))}


def read_tokenizer(folder: Path) -> dict | None:
    """Describe the tokenizer in tokenizer.json; None if there is no such file.

    UserError if the file is damaged or describes neither GPT-2's BPE, cut short, nor a word list.
    """
    path = folder / 'tokenizer.json'
    if not path.is_file():
        return None
    with reading(path, "give GPT-2's BPE, cut short or whole, or a list of words"):
        bpe = json.loads(path.read_text(encoding='utf-8'))['model']
        if bpe.get('ignore_merges'):
            tokens = sorted(bpe['vocab'], key=bpe['vocab'].get)
            pieces = [unspell(token).decode() for token in tokens if len(token) > 1]
            description = {'name': 'words', 'pieces': pieces}
        else:
            merges = bpe['merges']
            if isinstance(merges[0], list):  # as newer versions of tokenizers write them
                merges = [' '.join(pair) for pair in merges]
            description = GPT2 | {'merges': merges}
        vocab = {token: i for token, i in bpe['vocab'].items() if token != END_OF_TEXT}
        if vocab != spelled_vocab(description):
            raise ValueError('its ids are in another order')
        if vocab.get('\u0120gazed') == 50255:  # GPT-2's last token
            return GPT2
        return description
