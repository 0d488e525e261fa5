"""The words of the command line that stand for senses and edits."""

import io
import re
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from model import Backpack, Edit
from rucksack.common import UserError
from rucksack.data import pieces_of
from senses import STRENGTHS, separation

# -----------------------------------------------------------------------------
# Words.


def shown(encoding: tiktoken.Encoding, token: int) -> str:
    """A token as it can stand in a table: the quotes show its space, control characters are written out."""
    return repr(encoding.decode_single_token_bytes(token).decode('utf-8', errors='replace'))


def word_id(encoding: tiktoken.Encoding, word: str) -> int:
    """The id of a word inside a text, the space before it included; UserError where it is several tokens."""
    ids = encoding.encode_ordinary(' ' + word) if word else []
    if len(ids) != 1:
        pieces = ' + '.join(shown(encoding, i) for i in ids) or 'nothing'
        raise UserError(f'{word!r} is no single word of this vocabulary but {pieces}; take one that is')
    return ids[0]


def word_forms(encoding: tiktoken.Encoding, word: str) -> list[int]:
    """The ids a word goes by: inside a text and, where that is one token too, at its start."""
    at_start = encoding.encode_ordinary(word)
    return [word_id(encoding, word)] + (at_start if len(at_start) == 1 else [])


def bag_of_words(encoding: tiktoken.Encoding, words: list[str]) -> list[int]:
    """The ids of a bag of words, each once; of a word of several tokens every piece (the published code: the
    first). UserError for an empty bag and for a word that this vocabulary can only spell.
    """
    bag = []
    for word in map(str.strip, words):
        ids = encoding.encode_ordinary(' ' + word)
        if not word or not ids or encoding.decode_single_token_bytes(ids[0]) == b' ':
            raise UserError(f'{word!r} is no word of this vocabulary; take others for the bag')
        bag += ids
    if not bag:
        raise UserError('the bag of words is empty; give words, as in "arts, culture"')
    return sorted(set(bag))


# -----------------------------------------------------------------------------
# The words of the command line that stand for edits.


def parse_word_senses(text: str, model: Backpack,
                      encoding: tiktoken.Encoding) -> tuple[list[int] | None, list[int], str]:
    """The ids and the senses in WORD:SENSES, and a line on them; ids are None for WORD *, every word.

    SENSES are numbers and ranges (3,10 or 3-5), or A/B: the one sense of WORD whose separation of these two
    words is largest, for or against. UserError where the text is malformed or names a word or a sense that is
    not there.
    """
    word, _, which = (part.strip() for part in text.rpartition(':'))
    if not word or not which:
        raise UserError(f'{text!r} is not WORD:SENSES, as nurse:10, nurse:3-5,10, nurse:she/he or *:10')
    forms = None if word == '*' else word_forms(encoding, word)
    if '/' in which:
        a, b = pair_of(encoding, which)
        if forms is None:
            raise UserError(f'{text!r}: A/B picks a sense of one word, and * is every word; give its number')
        scores = separation(model, forms[0], a, b)  # (k,)
        best, *rest = scores.abs().argsort(descending=True).tolist()
        line = (f'sense {best} of {word}, which most separates {shown(encoding, a)} from '
                f'{shown(encoding, b)} (by {scores[best]:+.2f} logits')
        return forms, [best], line + (f'; sense {rest[0]}: {scores[rest[0]]:+.2f})' if rest else ')')
    senses = sense_numbers(which, model.config.n_sense)
    of = 'every word' if forms is None else word
    return forms, senses, f'sense{"s" * (len(senses) > 1)} {", ".join(map(str, senses))} of {of}'


def pair_of(encoding: tiktoken.Encoding, text: str) -> tuple[int, int]:
    """The ids of A and B in A/B."""
    a, _, b = (part.strip() for part in text.partition('/'))
    if not a or not b or a == b:
        raise UserError(f'{text!r} is not A/B, two words as in she/he')
    return word_id(encoding, a), word_id(encoding, b)


def sense_numbers(text: str, n_sense: int) -> list[int]:
    """The numbers in 3,10 or 3-5, each below n_sense."""
    senses = []
    for part in text.split(','):
        match = re.fullmatch(r'([0-9]{1,9})(?:-([0-9]{1,9}))?', part.strip())
        if not match:
            raise UserError(f'{text!r} is neither sense numbers, as 3,10 or 3-5, nor two words, as she/he')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= n_sense:
            raise UserError(f'there is no sense {part.strip()}; this model has senses 0 to {n_sense - 1}')
        senses += range(first, last + 1)
    return senses


def parse_factor(text: str) -> tuple[str, float]:
    """WORD:SENSES and the factor in WORD:SENSES=F."""
    senses, _, factor = text.rpartition('=')
    try:
        if senses and abs(float(factor)) <= 1000:
            return senses, float(factor)
    except ValueError:
        pass
    raise UserError(f'{text!r} is not WORD:SENSES=FACTOR, as in nurse:10=0.5, with at most 1000 as FACTOR')


def parse_replacement(text: str, encoding: tiktoken.Encoding) -> tuple[list[int], int, int]:
    """The forms of WORD and the ids of OLD and NEW in "WORD: OLD -> NEW"."""
    word, _, rest = text.partition(':')
    old, _, new = rest.partition('->')
    if not (word.strip() and old.strip() and new.strip()):
        raise UserError(f'{text!r} is not "WORD: OLD -> NEW", as in "MacBook: Apple -> HP"')
    return (word_forms(encoding, word.strip()), word_id(encoding, old.strip()),
            word_id(encoding, new.strip()))


def parse_strength(text: str) -> tuple[float, ...]:
    """The weights of a row of Table 11, by its number or as four numbers with commas."""
    if text in map(str, range(len(STRENGTHS))):
        return STRENGTHS[int(text)]
    try:
        weights = tuple(float(part) for part in text.split(','))
    except ValueError:
        weights = ()
    if len(weights) != 4 or not all(0 <= w <= 1000 for w in weights):
        raise UserError(f'strength {text!r} is neither 0, 1, 2 or 3 nor four numbers from 0 to 1000, as '
                        '3.3,3.3,3,1')
    return weights

PROMPT = 'When the nurse came into the room,'


def read_prompt(start: str, encoding: tiktoken.Encoding, block_size: int) -> tuple[list[int], str]:
    """Ids of the prompt, end-of-text where it is empty; only its end, and a line that says so, where it is
    longer than block_size.
    """
    if start.startswith('FILE:'):
        try:
            start = Path(start.removeprefix('FILE:')).read_text(encoding='utf-8-sig').rstrip('\n')
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'--start {start} cannot be read as text: {error}')
    pieces = map(encoding.encode_ordinary, pieces_of(io.StringIO(start, newline='')))  # tiktoken's limit
    ids = [i for piece in pieces for i in piece] or [encoding.eot_token]
    cropped = f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.'
    return ids[-block_size:], cropped if len(ids) > block_size else ''


def not_there(words: list[int] | None, ids: list[int]) -> str:
    """A remark on an edit of words that the prompt ids does not have; words are None for all."""
    return '' if words is None or set(words) & set(ids) else ' (not a word of the prompt)'


# -----------------------------------------------------------------------------
# Explain.


@torch.no_grad()
def predict(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Probabilities of the word after the text idx (1, T): (V,)."""
    return model(idx, edit=edit)[0][0, -1, :model.config.n_vocab].softmax(-1)
