"""What people type, parsed: words, pairs A/B, bags, WORD:SENSES, WORD: OLD -> NEW, strengths, prompts."""

import re
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor

from model import Backpack, Edit
from rucksack.common import UserError
from rucksack.data import encode
from senses import STRENGTHS, TOPICS, edited, separation

PROMPT = 'When the nurse came into the room,'
NUMBER = r'(?:[0-9]{1,4}(?:\.[0-9]*)?|\.[0-9]+)'


def shown(encoding: Encoding, token: int) -> str:
    """An id as it can stand in a table: the quotes show its space, control characters are written out."""
    return repr(encoding.decode_single_token_bytes(token).decode('utf-8', errors='replace'))


def word_id(encoding: Encoding, word: str) -> int:
    """The id of a word inside a text, the space before it included; UserError where it is several."""
    ids = encoding.encode_ordinary(' ' + word)
    if len(ids) != 1 or not word:
        pieces = ' + '.join(shown(encoding, i) for i in ids)
        raise UserError(f'{word!r} is no single word of this vocabulary but {pieces}; take one that is')
    return ids[0]


def word_forms(encoding: Encoding, word: str) -> list[int]:
    """The ids a word goes by: inside a text and, where that is one id too, at its start."""
    at_start = encoding.encode_ordinary(word)
    return [word_id(encoding, word)] + (at_start if len(at_start) == 1 else [])


def pair_of(encoding: Encoding, text: str) -> tuple[int, int]:
    """The ids of A and B in A/B."""
    a, _, b = (part.strip() for part in text.partition('/'))
    if not a or not b or a == b:
        raise UserError(f'{text!r} is not A/B, two words as in she/he')
    return word_id(encoding, a), word_id(encoding, b)


def words_of_bag(text: str) -> list[str]:
    """The words in "A, B", A+B or A B, or of a topic of Table 10; UserError where there is none."""
    if words := TOPICS.get(text.strip()) or re.findall(r'[^\s,+]+', text):
        return words
    raise UserError('the bag of words is empty; give words, as in music+guitar')


def bag_of_words(encoding: Encoding, words: list[str]) -> list[int]:
    """The ids of a bag of words, all pieces, each once; UserError for a word that can only be spelled."""
    bag = []
    for word in words:
        ids = encoding.encode_ordinary(' ' + word)
        if encoding.decode_single_token_bytes(ids[0]) == b' ':
            near = ', '.join(label for label in TOPICS if word in label) or 'others'
            raise UserError(f'{word!r} is no word of this vocabulary; take {near}')
        bag += ids  # the published code takes ids[0] alone
    return sorted(set(bag))


def sense_numbers(text: str, n_sense: int) -> list[int]:
    """The numbers in 3,10 or 3-5, each below n_sense."""
    if re.fullmatch(r'(\s*\d{1,4}(-\d{1,4})?\s*,)+', f'{text},'):
        ends = [part.split('-') for part in text.split(',')]
        senses = [l for end in ends for l in range(int(end[0]), int(end[-1]) + 1)]
        if senses and max(senses) < n_sense:
            return senses
    raise UserError(f'{text!r} is neither sense numbers, as 3-5,10 of senses 0 to {n_sense - 1}, nor A/B')


def parse_word_senses(text: str, model: Backpack, encoding: Encoding) -> tuple[list | None, list, str]:
    """The ids (None for *: every word) and the senses in WORD:SENSES, numbers or A/B, and a line on them."""
    word, _, which = (part.strip() for part in text.rpartition(':'))
    if not word or not which or word == '*' and '/' in which:
        raise UserError(f'{text!r} is not WORD:SENSES, as nurse:10, nurse:3-5,10, nurse:she/he or *:10')
    forms = None if word == '*' else word_forms(encoding, word)
    if '/' not in which:
        senses = sense_numbers(which, model.config.n_sense)
        of = 'every word' if forms is None else word
        return forms, senses, f'sense{"s" * (len(senses) > 1)} {", ".join(map(str, senses))} of {of}'
    a, b = pair_of(encoding, which)
    scores = separation(model, forms[0], a, b)  # (k,): the largest decides, for or against
    best, *rest = scores.abs().argsort(descending=True).tolist()
    second = ''.join(f'; sense {l}: {scores[l]:+.2f}' for l in rest[:1])
    return forms, [best], (f'sense {best} of {word}, which most separates {shown(encoding, a)} from '
                           f'{shown(encoding, b)} (by {scores[best]:+.2f} logits{second})')


def parse_factor(text: str) -> tuple[str, float]:
    """WORD:SENSES and the factor in WORD:SENSES=F."""
    if match := re.fullmatch(rf'(.+)=(-?{NUMBER})', text.strip()):
        return match[1], float(match[2])
    raise UserError(f'{text!r} is not WORD:SENSES=FACTOR, as in nurse:10=0.5')


def parse_replacement(text: str, encoding: Encoding) -> tuple[list[int], int, int]:
    """The ids of WORD, and those of OLD and NEW, in "WORD: OLD -> NEW"."""
    if match := re.fullmatch(r'(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)', text.strip()):
        return word_forms(encoding, match[1]), word_id(encoding, match[2]), word_id(encoding, match[3])
    raise UserError(f'{text!r} is not "WORD: OLD -> NEW", as in "MacBook: Apple -> HP"')


def parse_strength(text: str) -> tuple[float, ...]:
    """The weights of a row of Table 11, by its number or as four numbers with commas."""
    if text in map(str, range(len(STRENGTHS))):
        return STRENGTHS[int(text)]
    if not re.fullmatch(rf'{NUMBER}(,{NUMBER}){{3}}', text):
        raise UserError(f'strength {text!r} is neither 0, 1, 2 or 3 nor four numbers, as 3.3,3.3,3,1')
    return tuple(map(float, text.split(',')))


def read_prompt(start: str, encoding: Encoding, block_size: int) -> tuple[list[int], list[str]]:
    """The last block_size ids of a prompt or of FILE:path, end-of-text if it is empty; and notices on it."""
    if start.startswith('FILE:'):
        try:
            start = Path(start.removeprefix('FILE:')).read_text(encoding='utf-8-sig').rstrip('\n')
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'--start {start} cannot be read as text: {error}')
    ids, lines = encode(encoding, start) or [encoding.eot_token], []
    if len(ids) > block_size:
        lines.append(f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.')
    words = dict.fromkeys(re.findall(r'\w+', start)) if encoding.name == 'toy' else {}
    if unknown := [word for word in words if len(encoding.encode_ordinary(f' {word}')) > 1
                   and len(encoding.encode_ordinary(word)) > 1]:
        lines.append(f'The model has never seen {", ".join(unknown[:8])}: it reads that letter by letter.')
    return ids[-block_size:], lines


def absent(ids: list[int] | None, prompt: list[int]) -> str:
    """A remark on an edit of ids that the prompt does not have; ids are None for all."""
    return '' if ids is None or set(ids) & set(prompt) else ' (not a word of the prompt)'


@torch.no_grad()
def predict(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Probabilities of the token after the text idx (1, T), under an edit or as it is: (V,)."""
    C = edited(model, idx, edit) if model.config.n_sense else None
    return model(idx, C=C)[0, -1, :model.config.n_vocab].softmax(-1)
