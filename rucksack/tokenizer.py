"""Tokenizers: GPT-2's BPE, whole or cut to its first N merges, and lists of whole words.

A tokenizer is described by a dictionary, stored in meta.json and in checkpoints:

    {'name': 'gpt2'}                        GPT-2's BPE, which tiktoken downloads once
    {'name': 'gpt2', 'merges': ['Ġ t', ..]} the same, cut after these merges; no download
    {'name': 'gpt2', 'merges': [..], 'special': {..}}   another byte-level BPE
    {'name': 'words', 'pieces': [..]}       every piece, such as ' nurse', is one token

'special' maps special tokens to their ids; by default, end-of-text comes last. The other ids, from
0 on, are the 256 bytes in GPT-2's order, and then the merges or pieces.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from rucksack.cli import HOME
from rucksack.errors import UserError, user_errors

GPT2 = {'name': 'gpt2'}
GPT2_VOCAB = 50257
# SHA-256 of GPT-2's merges, and of their first 16,384, which tiktoken is known to merge alike.
GPT2_MERGES = '04e3597d7996f292ca9b8b7285ca4d58a6ae171ac47d73fc7140ceb0c7a6bbc0'
ENGLISH_MERGES = 'cd90b8166097385267968d1a67b6dd37c9df2ccafd00bcfce0cf0bdcb957460c'
END_OF_TEXT = '<|endoftext|>'
WORDS_PATTERN = r' ?\w+|[^\w\s]|\s+'
PATTERNS = {'gpt2': r50k_pat_str, 'words': WORDS_PATTERN}
ENGLISH = HOME / 'pretrained' / 'english'  # the bundled model

# GPT-2 puts the printable bytes first. Its files spell each byte as one character; the other 68
# bytes become characters from 256 on.
BYTES = sorted(
    range(256),
    key=lambda byte: not chr(byte).isprintable() or byte == 32)
CHARACTERS = [
    chr(i)
    for i in range(256 + 68)
    if chr(i).isprintable() and i != 32]
CHARACTER_OF = dict(zip(BYTES, CHARACTERS))
BYTE_OF = dict(zip(CHARACTERS, BYTES))


def spell(token: bytes) -> str:
    """Spell a token as GPT-2's files do, one character per byte."""
    return token.decode('latin-1').translate(CHARACTER_OF)


def unspell(text: str) -> bytes:
    """Return the token with this spelling."""
    return bytes(BYTE_OF[character] for character in text)


# -----------------------------------------------------------------------------
# From a description to an encoding.


def words_tokenizer(texts: list[str]) -> dict:
    """Describe a tokenizer in which each word of the texts, with its space, is one token."""
    pieces = {piece for text in texts for piece in re.findall(WORDS_PATTERN, text)}
    longer_than_a_byte = [
        piece for piece in sorted(pieces)
        if len(piece.encode()) > 1]
    return {'name': 'words', 'pieces': longer_than_a_byte}


def tokens_of(description: dict) -> list[bytes]:
    """List the tokens of a description, without special ones: bytes, then merges in order.

    For {'name': 'gpt2', 'merges': ['Ġ t', 'h e', 'Ġt he']}, the last are b' t', b'he', b' the'.
    """
    if description['name'] == 'words':
        single_bytes = [bytes([byte]) for byte in range(256)]
        return single_bytes + [piece.encode() for piece in description['pieces']]
    longer = [merge.replace(' ', '') for merge in description['merges']]
    return [unspell(token) for token in [*BYTE_OF, *longer]]


def ranks_of(description: dict) -> dict[bytes, int]:
    """Map the tokens of a description to the ids, from 0 on, that no special token has."""
    taken = description.get('special', {}).values()
    free = (i for i in count() if i not in taken)
    ranks = dict(zip(tokens_of(description), free))
    if description.get('ids') not in (None, [*ranks.values()]):  # ids are listed in older files
        raise ValueError('its ids are in another order than its merges')
    return ranks


def vocab_size(description: dict) -> int:
    """Count the ids, special tokens included."""
    if description == GPT2:
        return GPT2_VOCAB  # known without a download
    return load_tokenizer(description).n_vocab


def load_tokenizer(description: dict) -> tiktoken.Encoding:
    """Make the tiktoken.Encoding of a description."""
    if description == GPT2:
        hint = ('connect to the internet, set TIKTOKEN_CACHE_DIR, or run prepare.py with '
                '--like english')
        with user_errors("GPT-2's vocabulary", hint):
            return tiktoken.get_encoding('gpt2')
    name = description['name']
    ranks = ranks_of(description)
    return tiktoken.Encoding(
        name,
        pat_str=PATTERNS[name],
        mergeable_ranks=ranks,  # ids rise with merges: the lowest is merged first
        special_tokens=description.get('special', {END_OF_TEXT: len(ranks)}))


def ids_that_differ(one: tiktoken.Encoding, other: tiktoken.Encoding) -> list[int]:
    """List the ids whose bytes differ between two encodings, or that one of them lacks."""
    tokens = one._mergeable_ranks.items() ^ other._mergeable_ranks.items()
    special = one._special_tokens.items() ^ other._special_tokens.items()
    return sorted({i for _, i in tokens | special})


def lacks(encoding: tiktoken.Encoding, text: str) -> bool:
    """Tell whether a vocabulary of whole words lacks a word of a text (and spells it in bytes)."""
    if encoding.name != 'words':
        return False
    pieces = re.findall(WORDS_PATTERN, text)
    return any(piece.encode() not in encoding._mergeable_ranks for piece in pieces)


def merges_of(ranks: dict[bytes, int]) -> list[str]:
    """List the merges 'a b' from which tiktoken builds the tokens of a BPE, in order of rank.

    A token that is not made of two smaller ones has no merge.
    """
    merges = []
    for token in sorted(ranks, key=ranks.get):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            made = [
                ranks.get(a + b, ranks[token])
                for a, b in zip(parts, parts[1:])]
            first = made.index(min(made))
            if made[first] == ranks[token]:
                break
            parts[first] += parts.pop(first + 1)
        if len(parts) == 2:
            merges.append(' '.join(map(spell, parts)))
    return merges


def encode_all(encoding: tiktoken.Encoding, texts: Iterable[str]) -> Iterator[list[int]]:
    """Encode texts in order, a thousand at a time in several threads."""
    texts = iter(texts)
    for batch in iter(lambda: list(islice(texts, 1000)), []):
        yield from encoding.encode_ordinary_batch(batch)


# -----------------------------------------------------------------------------
# tokenizer.json, as transformers reads and writes it.


BYTE_LEVEL = {  # how transformers splits a text before BPE: GPT-2's way
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': False,
    'use_regex': True}


def tokenizer_files(description: dict, block_size: int | None = None) -> dict[str, dict]:
    """Make the JSON files from which transformers loads a tokenizer, by name.

    block_size is the length at which the tokenizer truncates texts.
    """
    encoding = load_tokenizer(description)
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': END_OF_TEXT,
        'eos_token': END_OF_TEXT,
        'model_input_names': ['input_ids', 'attention_mask'],  # no token_type_ids
        'clean_up_tokenization_spaces': False,
        'model_max_length': block_size}
    generation = {
        'eos_token_id': encoding.eot_token,
        'pad_token_id': encoding.eot_token}
    return {
        'tokenizer.json': tokenizer_json(encoding),
        'tokenizer_config.json': config,
        'generation_config.json': generation}


def tokenizer_json(encoding: tiktoken.Encoding) -> dict:
    """Make the contents of tokenizer.json; raises UserError unless texts are split as GPT-2's."""
    if encoding._pat_str != r50k_pat_str:
        raise UserError("its encoding splits text differently from GPT-2's; export a model with a "
                        'byte-level BPE')
    special = encoding._special_tokens
    flags = dict.fromkeys(['single_word', 'lstrip', 'rstrip', 'normalized'], False)
    added_tokens = [
        {'id': i, 'content': content, 'special': True, **flags}
        for content, i in special.items()]
    vocab = {spell(token): i for token, i in encoding._mergeable_ranks.items()}
    if special != {END_OF_TEXT: len(vocab)}:  # transformers would number them from the end
        vocab |= special
    bpe = {
        'type': 'BPE',
        'vocab': vocab,
        'merges': merges_of(encoding._mergeable_ranks),
        'ignore_merges': False}
    return {
        'version': '1.0',
        'added_tokens': added_tokens,
        'model': bpe,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [BYTE_LEVEL.copy()]},
        'decoder': BYTE_LEVEL.copy()}


def read_tokenizer(path: Path, end: int | None = None) -> dict | None:
    """Describe the tokenizer in a tokenizer.json or a folder; None for a folder without one.

    end is the id of end-of-text if no token has that name. Raises UserError if transformers would
    produce different tokens from our encoding of the files.
    """
    hint = "give a byte-level BPE that splits text as GPT-2's does"
    with user_errors(f'the tokenizer in {path}', hint):
        tokenizer = load_json(path) if path.suffix == '.json' else tokenizer_in(path)
        if tokenizer is None:
            return None
        check_parts(tokenizer)
        return description_of(tokenizer, end)


def tokenizer_in(folder: Path) -> dict | None:
    """Load tokenizer.json, with the settings beside it; None for a folder without a tokenizer."""
    if not (folder / 'tokenizer.json').is_file():
        if (folder / 'vocab.json').is_file():
            raise ValueError('it has no tokenizer.json; load it with AutoTokenizer of '
                             'transformers, and save it again')
        return None
    config = folder / 'tokenizer_config.json'
    settings = load_json(config) if config.is_file() else {}
    return settings | load_json(folder / 'tokenizer.json')


def load_json(path: Path) -> dict:
    """Read a JSON file in UTF-8, with or without a byte order mark."""
    return json.loads(path.read_text(encoding='utf-8-sig'))


def description_of(tokenizer: dict, end: int | None = None) -> dict:
    """Describe the contents of a tokenizer.json; end is end-of-text if no token has that name.

    Raises ValueError if there is no end-of-text, or if tiktoken would merge in another order.
    """
    vocab = tokenizer['model']['vocab']
    merges = [
        merge if isinstance(merge, str) else ' '.join(merge)  # newer files have lists
        for merge in tokenizer['model']['merges']]
    description = GPT2 | {'merges': merges}
    known = {spell(token) for token in tokens_of(description)}
    added = {
        token['content']: token['id']
        for token in tokenizer.get('added_tokens', [])}
    all_ids = {END_OF_TEXT: end, **vocab, **added}
    special = {
        content: i
        for content, i in all_ids.items()
        if content not in known}
    if special.get(END_OF_TEXT) is None:
        raise ValueError(f'none of its special tokens is {END_OF_TEXT}')
    if special != {END_OF_TEXT: len(known)}:
        description['special'] = special
    ranks = ranks_of(description)
    for token, i in ranks.items():
        if vocab[spell(token)] != i:  # raises KeyError for a byte or merge without an id
            raise ValueError(f'its ids are not in the order of its merges: {token} should be {i}')
    checksum = hashlib.sha256('\n'.join(merges).encode()).hexdigest()
    if checksum == GPT2_MERGES and 'special' not in description:
        return GPT2
    if checksum != ENGLISH_MERGES and merges != merges_of(ranks):
        raise ValueError('tiktoken would make its tokens from other merges')
    return description


def check_parts(tokenizer: dict) -> None:
    """Raise ValueError, naming the part, if transformers would split a text differently."""
    settings = tokenizer | tokenizer['model']
    parts = settings['pre_tokenizer']
    parts = parts.get('pretokenizers', [parts])
    parts = [{'use_regex': True, **part, 'trim_offsets': False} for part in parts]
    if parts == [BYTE_LEVEL]:
        del settings['pre_tokenizer']
    processor = settings.get('post_processor') or {'type': 'ByteLevel'}
    if processor['type'] == 'ByteLevel' or processor.get('special_tokens') == {}:
        settings['post_processor'] = None
    added = tokenizer.get('added_tokens', [])
    settings['added token'] = [token['content'] for token in added if not token['special']]
    for name in ('pre_tokenizer', 'post_processor', 'add_prefix_space', 'normalizer', 'dropout',
                 'ignore_merges', 'continuing_subword_prefix', 'end_of_word_suffix',
                 'byte_fallback', 'added token'):
        if settings.get(name):
            raise ValueError(f'its {name} is not supported: {json.dumps(settings[name])}')
