"""Parse what people type (words, lists, pairs, bags, prompts) and find its token ids.

Where a flag takes a word, it also takes a list: a,b,c, or @FILE with one word per line.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.cli import progress
from rucksack.device import bfloat16_unit
from rucksack.errors import UserError, user_errors
from rucksack.model import Backpack
from rucksack.paper_lists import BAGS
from rucksack.senses import Words, affinities
from rucksack.tokenizer import encode, lacks

PROMPT = 'When the nurse came into the room,'
# Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese: scripts without spaces between words.
WITHOUT_SPACES = ('[\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef'
                  '\U00020000-\U0003ffff]')
IDS_AT_ONCE = 128  # in Eq. 17, 128 ids of Small have 103M logits


# -----------------------------------------------------------------------------
# Lists, bags and pairs.


def read_lines(text: str, has_comments: bool = True) -> list[str]:
    """Read the lines of the file in @FILE, except blank ones; raises UserError if none are left.

    If has_comments is True, lines that begin with # are skipped.
    """
    path = text.removeprefix('@')
    with user_errors(text, 'give a text file with one item per line'):
        lines = Path(path).read_text(encoding='utf-8-sig').split('\n')
    if has_comments:
        lines = [line for line in lines if not line.lstrip().startswith('#')]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise UserError(f'{text}: the file is empty; write one item per line')
    return lines


def word_list(text: str) -> list[str]:
    """List the words in a,b,c or @FILE, each once. A text with an empty part is one word.

    Raises UserError for an empty text.
    """
    if not text.strip():
        raise UserError(f'{text!r} has no words; give some, as in she,he')
    parts = read_lines(text) if re.match('@.', text) else text.split(',')
    words = [part.strip() for part in parts]
    return list(dict.fromkeys(words)) if all(words) else [text]


def parse_pair(text: str) -> tuple[str, str]:
    """Parse the two words in A/B."""
    match = re.fullmatch(r'\s*(\S.*?)\s*/\s*(\S.*?)\s*', text)
    if not match or match[1] == match[2]:
        raise UserError(f'{text!r} is not A/B; give two different words, as in she/he')
    return match.groups()


def parse_bag(text: str) -> list[str]:
    """Parse the words in "A, B", A+B, A B or @FILE, or take the words of a topic of Table 10."""
    if re.match('@.', text):
        return word_list(text)
    words = BAGS.get(text.strip(), re.findall(r'[^\s,+]+', text))
    if not words:
        raise UserError('the bag of words is empty; give words, as in music+guitar')
    return words


# -----------------------------------------------------------------------------
# Words and ids.


def token_texts(encoding: Encoding, ids: list[int]) -> list[str]:
    """List the texts of tokens; bytes that are only part of a character become U+FFFD."""
    return [encoding.decode([v]) for v in ids]


def quoted(encoding: Encoding, ids: list[int]) -> str:
    """Write tokens for people to read: in quotes, with control characters escaped."""
    return ' + '.join(map(repr, token_texts(encoding, ids)))


def inside_text(word: str) -> str:
    """Write a word as it appears in a text: after a space, unless its script has no spaces."""
    return word if re.match(WITHOUT_SPACES, word) else f' {word}'


def tokens_of(encoding: Encoding, word: str) -> tuple[int, ...]:
    """Find the ids of a word inside a text, leaving out a leading space that is a separate token.

    Raises UserError for a word that a vocabulary of whole words lacks.
    """
    if not word or word != word.strip():
        raise UserError(f'{word!r} is not a word; give one without spaces around it')
    text = inside_text(word)
    if lacks(encoding, text):
        raise UserError(f'{word!r} is not in the vocabulary; choose another word')
    ids = encoding.encode_ordinary(text)
    if encoding.decode_single_token_bytes(ids[0]) == b' ':
        ids = ids[1:]
    return tuple(ids)


def word_id(encoding: Encoding, word: str) -> int:
    """Find the id of a word inside a text; raises UserError if it has several."""
    ids = tokens_of(encoding, word)
    if len(ids) > 1:
        raise UserError(f'{word!r} is not one token (it splits into {quoted(encoding, ids)}); '
                        'choose another word')
    return ids[0]


def word_ids(encoding: Encoding, words: Iterable[str]) -> list[int]:
    """Find the ids of words inside a text; raises UserError unless each has one."""
    return [word_id(encoding, word) for word in words]


def edit_targets(encoding: Encoding, word: str) -> Words:
    """Find what an edit of a word changes: its ids inside a text and at the start; None for *.

    The form at the start counts only if both forms are one token or both are several.
    """
    if word == '*':
        return None
    forms = [tokens_of(encoding, word), tuple(encoding.encode_ordinary(word))]
    if len(forms[0]) == 1:
        return [ids[0] for ids in forms if len(ids) == 1]
    return [ids for ids in forms if len(ids) > 1]


def bag_ids(encoding: Encoding, words: list[str]) -> list[int]:
    """Find the ids of a bag of words, each once; a word of several tokens gives all of them.

    The published code takes only a word's first token. Raises UserError for an unknown word.
    """
    ids = {i for word in words for i in tokens_of(encoding, word)}
    return sorted(ids)


def describe(encoding: Encoding, word: str) -> str:
    """Name the word of an edit; if it has several tokens, say where the edit applies."""
    if word == '*':
        return 'every word'
    ids = tokens_of(encoding, word)
    if len(ids) == 1:
        return word
    return f'{word} (the last token of {quoted(encoding, ids)})'


def count_whole(word: str, text: str) -> int:
    """Count a word in a text, except where it is part of a longer word."""
    if re.match(WITHOUT_SPACES, word):
        return text.count(word)
    edge = r'(?!(?<=\w)(?=\w))'  # but not between two letters
    return len(re.findall(edge + re.escape(word) + edge, text))


def read_prompt(start: str, encoding: Encoding, block_size: int) -> tuple[list[int], list[str]]:
    """Encode a prompt; returns its last block_size ids (end-of-text if it has none) and notices."""
    ids = encode(encoding, start) or [encoding.eot_token]
    notices = []
    if len(ids) > block_size:
        notices.append(f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.')
    if start.endswith(' '):
        notices.append('The prompt ends in a space; drop it: the next word begins with one.')
    return ids[-block_size:], notices


# -----------------------------------------------------------------------------
# Scores of the whole vocabulary.


def over_vocabulary(model: Backpack, score: Callable[..., Tensor], **options) -> Tensor:
    """Compute score(model, ids, **options) for all V ids, a slice (n,) at a time: (V, ..)."""
    ids = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (V,)
    slices = progress(ids.split(IDS_AT_ONCE), 'vocabulary')
    return torch.cat([score(model, some_ids, **options) for some_ids in slices])


def scores_of_bags(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Compute Eq. 17 for all ids, (bags, V, k); in bfloat16 for many ids, if that is fast."""
    device = model.wte.weight.device
    is_large = model.config.n_vocab > 1 << 14
    in_bfloat16 = is_large and bfloat16_unit(str(device)) is not None
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
        scores = over_vocabulary(model, affinities, bags=bags)  # (V, k, bags)
    return scores.movedim(-1, 0).contiguous()  # (bags, V, k)


def topic_scores(model: Backpack, encoding: Encoding, bags: list[list[str]]) -> Tensor:
    """Compute Eq. 17 for topic edits, (bags, V, k).

    End-of-text has the score 0, as in the authors' code, so topics leave its senses alone.
    """
    scores = scores_of_bags(model, [bag_ids(encoding, bag) for bag in bags])
    scores[:, encoding.eot_token] = 0
    return scores
