"""What people type, parsed: words, pairs A/B, bags, WORD:SENSES, WORD: OLD -> NEW, strengths, prompts."""

import json
import re
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor

import senses
from model import Backpack, Edit
from rucksack.common import UserError, one_line
from rucksack.data import encode
from senses import STRENGTHS, TOPICS, Words

PROMPT = 'When the nurse came into the room,'
EDITS = ('senses_off', 'senses_scale', 'replace', 'topic', 'strength')  # flags of sample.py that say an edit
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


def pieces_of(encoding: Encoding, word: str) -> list[int]:
    """The ids of a word inside a text, the space before it included; UserError if it can only be spelled."""
    ids = encoding.encode_ordinary(' ' + word)
    return ids if word and encoding.decode_single_token_bytes(ids[0]) != b' ' else [word_id(encoding, word)]


def word_forms(encoding: Encoding, word: str) -> list[int | tuple[int, ...]]:
    """What a word goes by inside a text; and at its start, if both are one id or both are pieces."""
    inside, at_start = pieces_of(encoding, word), encoding.encode_ordinary(word)
    same = [ids for ids in (inside, at_start) if (len(ids) > 1) == (len(inside) > 1)]
    return [tuple(ids) if len(ids) > 1 else ids[0] for ids in same]


def named(encoding: Encoding, word: str) -> str:
    """The word or, if it is several pieces, what an edit of it means."""
    *others, last = (shown(encoding, i) for i in pieces_of(encoding, word))
    return f"{word} (its last piece {last}, after {' + '.join(others)})" if others else word


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
        numbers = [l for end in ends for l in range(int(end[0]), int(end[-1]) + 1)]
        if numbers and max(numbers) < n_sense:
            return numbers
    raise UserError(f'{text!r} is neither sense numbers, as 3-5,10 of senses 0 to {n_sense - 1}, nor A/B')


def parse_word_senses(text: str, model: Backpack, encoding: Encoding) -> tuple[Words, list[int], str]:
    """The word (None for *: every word) and the senses in WORD:SENSES, numbers or A/B, and a line on them."""
    word, _, which = (part.strip() for part in text.rpartition(':'))
    if not word or not which or word == '*' and '/' in which:
        raise UserError(f'{text!r} is not WORD:SENSES, as nurse:10, nurse:3-5,10, nurse:she/he or *:10')
    forms, of = (None, 'every word') if word == '*' else (word_forms(encoding, word), named(encoding, word))
    if '/' not in which:
        numbers = sense_numbers(which, model.config.n_sense)
        return forms, numbers, f'sense{"s" * (len(numbers) > 1)} {", ".join(map(str, numbers))} of {of}'
    a, b = pair_of(encoding, which)
    scores = senses.separation(model, pieces_of(encoding, word)[-1], a, b)  # (k,): the largest size decides
    best, *rest = scores.abs().argsort(descending=True).tolist()
    second = ''.join(f'; sense {l}: {scores[l]:+.2f}' for l in rest[:1])
    return forms, [best], (f'sense {best} of {of}, which most separates {shown(encoding, a)} from '
                           f'{shown(encoding, b)} (by {scores[best]:+.2f} logits{second})')


def parse_factor(text: str) -> tuple[str, float]:
    """WORD:SENSES and the factor in WORD:SENSES=F."""
    if match := re.fullmatch(rf'(.+)=(-?{NUMBER})', text.strip()):
        return match[1], float(match[2])
    raise UserError(f'{text!r} is not WORD:SENSES=FACTOR, as in nurse:10=0.5')


def parse_replacement(text: str, encoding: Encoding) -> tuple[str, int, int]:
    """WORD, and the ids of OLD and NEW, in "WORD: OLD -> NEW"."""
    if match := re.fullmatch(r'(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)', text.strip()):
        return match[1], word_id(encoding, match[2]), word_id(encoding, match[3])
    raise UserError(f'{text!r} is not "WORD: OLD -> NEW", as in "MacBook: Apple -> HP"')


def parse_strength(text: str) -> tuple[float, ...]:
    """The weights of a row of Table 11, by its number or as four numbers with commas."""
    if text in map(str, range(len(STRENGTHS))):
        return STRENGTHS[int(text)]
    if not re.fullmatch(rf'{NUMBER}(,{NUMBER}){{3}}', text):
        raise UserError(f'strength {text!r} is neither 0, 1, 2 or 3 nor four numbers, as 3.3,3.3,3,1')
    return tuple(map(float, text.split(',')))


def read_prompt(start: str, encoding: Encoding, block_size: int) -> tuple[list[int], list[str]]:
    """The last block_size ids of a prompt, end-of-text if it is empty; and notices on it."""
    ids, lines = encode(encoding, start) or [encoding.eot_token], []
    if len(ids) > block_size:
        lines.append(f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.')
    words = dict.fromkeys(re.findall(r'\w+', start)) if encoding.name == 'toy' else {}
    if unknown := [word for word in words if len(encoding.encode_ordinary(f' {word}')) > 1
                   and len(encoding.encode_ordinary(word)) > 1]:
        lines.append(f'The model has never seen {", ".join(unknown[:8])}: it reads that letter by letter.')
    return ids[-block_size:], lines


def absent(words: Words, idx: Tensor | None) -> str:
    """A remark on an edit of words that the prompt idx (1, T), if there is one, does not have."""
    return '' if idx is None or senses.occurrences(idx, words).any() else ' (not in the prompt)'


def make_edit(asked: dict[str, list[str]], model: Backpack, encoding: Encoding, idx: Tensor | None = None
              ) -> tuple[Edit, list[str]]:
    """The edit that values of the flags EDITS ask for, and a line on each part, for a prompt idx (1, T)."""
    edits, lines, off = [], [], [(text, 0.0) for text in asked['senses_off']]
    for text, factor in [*off, *map(parse_factor, asked['senses_scale'])]:
        words, chosen, line = parse_word_senses(text, model, encoding)
        edits.append(senses.scale_senses(words, chosen, factor))
        lines.append((f'Times {factor:g}: ' if factor else 'Off: ') + line + absent(words, idx))
    for text in asked['replace']:
        word, old, new = parse_replacement(text, encoding)
        edits.append(senses.replace_word(model, words := word_forms(encoding, word), old, new))
        lines.append(f'Replaced: what {named(encoding, word)} says of {shown(encoding, old)} it says of '
                     f'{shown(encoding, new)}{absent(words, idx)}')
    topics = [words_of_bag(text) for text in asked['topic']]
    strengths = [parse_strength(text) for text in asked['strength']]
    bags = [bag_of_words(encoding, words) for words in topics]
    scores = senses.affinities(model, bags) if bags else []  # (topics, V, k)
    for words, its, weights in zip(topics, scores, strengths):
        edits.append(senses.topic(model, its, weights))
        lines.append(f'Topic: {", ".join(words)}; senses times {", ".join(f"{w:g}" for w in weights)}')
    return senses.compose(edits), lines


def read_edit(path: str | Path, model: Backpack) -> dict[str, list[str]]:
    """The values of the flags EDITS in a file of sample.py --save-edit; UserError unless for this model."""
    try:
        file = json.loads(Path(path).open('rb').read(1 << 20))
        asked = {flag: file['edits'].pop(flag) for flag in EDITS}
        if file['edits'] or len(asked['topic']) != len(asked['strength']) or not all(type(of) is list and all(
                type(text) is str and len(text) < 50_000 for text in of) for of in asked.values()):
            raise ValueError('it has other parts')
        if file['vocabulary'] == model.config.n_vocab:
            return asked
        why = f'it is for {file["vocabulary"]!r} ids, not {model.config.n_vocab}'
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        why = one_line(error)
    raise UserError(f'{path}: {why}; --edit takes a file of sample.py --save-edit, of the same vocabulary')


@torch.no_grad()
def predict(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Probabilities of the token after the text idx (1, T), under an edit or as it is: (V,)."""
    C = senses.edited(model, idx, edit) if model.config.n_sense else None
    return model(idx, C=C)[0, -1, :model.config.n_vocab].softmax(-1)
