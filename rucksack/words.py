"""Parse what people type (words, lists, pairs, prompts) and find its token ids.

Where a flag takes a word, it also takes a list: a,b,c, or @FILE with one word per line.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from tiktoken import Encoding

from rucksack.errors import UserError, user_errors
from rucksack.senses import Words
from rucksack.tokenizer import lacks

PROMPT = 'When the nurse came into the room,'
# Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese: scripts without spaces between words.
WITHOUT_SPACES = ('[\u0e00-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef'
                  '\U00020000-\U0003ffff]')


def read_lines(text: str, has_comments: bool = True) -> list[str]:
    """Read the lines of the file in @FILE, except blank ones; raises UserError if none are left.

    If has_comments is True, lines that begin with # are skipped.
    """
    path = Path(text.removeprefix('@')).expanduser()
    with user_errors(path, 'save it as UTF-8, with one item per line'):
        lines = path.read_text(encoding='utf-8-sig').split('\n')
    if has_comments:
        lines = [line for line in lines if not line.startswith('#')]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise UserError(f'{path} has no lines; write one item per line')
    return lines


def word_list(text: str) -> list[str]:
    """List the words in a,b,c or @FILE, each once; a text with an empty part, as ",", is a word."""
    parts = read_lines(text) if text.startswith('@') else text.split(',')
    words = [part.strip() for part in parts]
    return list(dict.fromkeys(words)) if all(words) else [text]


def read_prompts(texts: list[str] | None) -> list[str]:
    """List prompts: texts, in which @FILE stands for the lines of a file; by default, PROMPT."""
    prompts = []
    for text in texts or [PROMPT]:
        if text.startswith('@'):
            prompts += read_lines(text, has_comments=False)
        else:
            prompts.append(text)
    return prompts


def word_and_senses(text: str) -> tuple[str, str]:
    """Split WORD:SENSES, as in nurse:3-5; raises UserError for * and for a list of words."""
    word, _, which = text.partition(':')
    if word == '*' or word_list(word) != [word]:
        raise UserError(f'{text!r} does not name one word; write, for example, nurse:3-5')
    return word, which


def parse_pair(text: str) -> list[str]:
    """Parse the two words in A/B."""
    words = [word.strip() for word in text.split('/')]
    if len(words) != 2 or words[0] == words[1]:
        raise UserError(f'{text!r} is not A/B; give two different words, as in she/he')
    return words


def token_texts(encoding: Encoding, ids: list[int]) -> list[str]:
    """List the texts of tokens; bytes that are only part of a character become U+FFFD."""
    return [encoding.decode([v]) for v in ids]


def tokens_with_zeros(encoding: Encoding, ids: list[int], text: str) -> list[bool]:
    """Tell which tokens have a byte that is 0 in a text of as many bytes."""
    marks = text.encode()
    found = []
    for token in encoding.decode_tokens_bytes(ids):
        found.append(0 in marks[:len(token)])
        marks = marks[len(token):]
    return found


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
        tokens = ' + '.join(map(repr, token_texts(encoding, ids)))
        raise UserError(f'{word!r} is not one token (it splits into {tokens}); choose another word')
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
