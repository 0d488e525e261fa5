"""One edit a line: turn the lines that people type or keep in files into an edit of the senses.

    nurse:10                        turn sense 10 of nurse off
    nurse,teacher:3-5,10=0.5        multiply senses of two words by 0.5; @FILE:10 lists words
    nurse:she/he                    turn off the sense of nurse that most separates she from he
    *:3                             turn sense 3 of every word off
    MacBook: Apple -> HP            give HP what MacBook gave Apple
    topic music=2                   turn up the senses that favour a topic or words, "topic A, B"
    @FILE                           the lines of a file

First, each line is parsed into objects, before a model is loaded. Then the model and its encoding
turn words into ids and objects into one edit, in the order of the lines.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.cli import UserError
from rucksack.model import Backpack
from rucksack.senses import (
    STRENGTHS,
    Edit,
    Words,
    compose,
    occurrences,
    replace_word,
    scale_senses,
    separation,
    topic,
)
from rucksack.words import (
    bag_ids,
    describe,
    parse_bag,
    parse_pair,
    pieces_of,
    read_lines,
    scores_of_bags,
    word_forms,
    word_id,
    word_list,
)

NUMBER = r'(?:[0-9]{1,4}(?:\.[0-9]*)?|\.[0-9]+)'
FORMS = ('write nurse:10, nurse,teacher:3-5,10=0.5, nurse:she/he, *:3, "MacBook: Apple -> HP", '
         '"topic music=2" (strength 0 to 3, or four factors) or @FILE')


# -----------------------------------------------------------------------------
# From lines to objects.


@dataclass(frozen=True)
class SensesOf:
    """Senses of a word to multiply by a factor, as in nurse:10, *:3-5=0.5 or nurse:she/he."""

    word: str
    numbers: list[int]  # [] is all
    pair: tuple[str, str] | None = None  # (A, B): the sense that most separates A from B
    factor: float = 0.0


@dataclass(frozen=True)
class Replacement:
    """A word that should give new what it gave old; all three are words."""

    word: str
    old: str
    new: str


@dataclass(frozen=True)
class Topic:
    """A bag of words, and the four factors of its strength (Table 11)."""

    bag: list[str]
    factors: Sequence[float]
    word: str = '*'


Line = SensesOf | Replacement | Topic


def parse_lines(lines: list[str]) -> list[Line]:
    """Parse edits, one a line; a line @FILE stands for the lines of a file."""
    edits = []
    for line in lines:
        is_file = re.fullmatch('@[^:]+', line)
        for one in read_lines(line) if is_file else [line]:
            edits += parse_line(one.strip())
    return edits


def parse_line(line: str) -> list[Line]:
    """Parse a line into one edit for each of its words; UserError lists the forms of a line."""
    strength = rf'[0-3]|{NUMBER}(?:,{NUMBER}){{3}}'
    of_topic = re.fullmatch(rf'topic\s+([^:=]+?)\s*(?:=\s*({strength}))?', line)
    if of_topic:
        bag, strength = of_topic.groups()
        return [Topic(parse_bag(bag), parse_strength(strength or '2'))]
    of_replacement = re.fullmatch(r'(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)', line)
    if of_replacement:
        edit = Replacement(*of_replacement.groups())
    else:
        edit = parse_senses(line)
    return [replace(edit, word=word) for word in word_list(edit.word)]


def parse_strength(text: str) -> tuple[float, ...]:
    """Parse a strength: the number of a row of Table 11, or four factors."""
    numbers = text.split(',')
    if len(numbers) == 1:
        return STRENGTHS[int(text)]
    return tuple(map(float, numbers))


def parse_senses(text: str) -> SensesOf:
    """Parse WORD:SENSES or WORD:SENSES=FACTOR; UserError lists the forms of a line.

    *:A/B is refused, as the sense differs by word.
    """
    span = '[0-9]{1,4}(?:-[0-9]{1,4})?'
    which = rf'{span}(?:\s*,\s*{span})*|[^/]+/[^/]+?'
    match = re.fullmatch(rf'(?!\*.*/)(.*\S)\s*:\s*({which})\s*(?:=\s*(-?{NUMBER}))?\s*', text)
    if not match:
        raise UserError(f'{text!r} cannot be read; {FORMS}')
    word, which, factor = match.groups()
    factor = float(factor or 0)
    if '/' in which:
        return SensesOf(word, [], parse_pair(which), factor)
    numbers = [number for span in which.split(',') for number in parse_span(span)]
    return SensesOf(word, numbers, None, factor)


def parse_span(text: str) -> range:
    """Parse the sense numbers in 3 or 3-5; UserError for 5-3."""
    first, _, last = text.partition('-')
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise UserError(f'senses {text}: give the smaller number first')
    return numbers


# -----------------------------------------------------------------------------
# From objects to an edit.


def find_words(word: str, encoding: Encoding) -> tuple[Words, str]:
    """Find the ids of a word and describe it; * is every word."""
    if word == '*':
        return None, 'every word'
    return word_forms(encoding, word), describe(encoding, word)


def find_senses(senses: SensesOf, model: Backpack, encoding: Encoding
                ) -> tuple[Words, list[int], str]:
    """Find the ids of the word and the numbers of its senses, and describe them."""
    words, word = find_words(senses.word, encoding)
    k = model.config.n_sense
    numbers = senses.numbers
    reason = ''
    if senses.pair:
        a, b = (word_id(encoding, one) for one in senses.pair)
        last_piece = pieces_of(encoding, senses.word)[-1:]
        ids = torch.tensor(last_piece, device=model.wte.weight.device)  # (1,)
        scores = separation(model, ids, a, b)[0]  # (k,)
        by_size = scores.abs().argsort(descending=True).tolist()
        numbers = by_size[:1]
        two_best = ', '.join(f'sense {l}: {scores[l]:+.2f} logits' for l in by_size[:2])
        reason = f', which most separates {" from ".join(senses.pair)} ({two_best})'
    elif not numbers:
        numbers = list(range(k))
    if max(numbers) >= k:
        raise UserError(f'{senses.word} has no sense {max(numbers)}; choose from 0 to {k - 1}')
    noun = 'sense' if len(numbers) == 1 else 'senses'
    return words, numbers, f'{noun} {", ".join(map(str, numbers))} of {word}{reason}'


def make_edit(edits: list[Line], model: Backpack, encoding: Encoding) -> tuple[Edit, list[str]]:
    """Make one edit that applies parsed edits in order; also returns a line about each."""
    steps = []
    lines = []
    for edit in edits:
        if isinstance(edit, Topic):
            bag = bag_ids(encoding, edit.bag)
            scores, = scores_of_bags(model, [bag])  # (V, k)
            steps.append(topic(model, scores, edit.factors))
            factors = ', '.join(map(str, edit.factors))
            lines.append(f'Topic: {", ".join(edit.bag)}; senses scaled by {factors}')
        elif isinstance(edit, Replacement):
            words, what = find_words(edit.word, encoding)
            old = word_id(encoding, edit.old)
            new = word_id(encoding, edit.new)
            steps.append(replace_word(model, words, old, new))
            lines.append(f'Replaced: {what} gives {edit.new} what it gave {edit.old}')
        else:
            words, numbers, what = find_senses(edit, model, encoding)
            steps.append(scale_senses(words, numbers, edit.factor))
            change = f'Times {edit.factor:g}' if edit.factor else 'Off'
            lines.append(f'{change}: {what}')
    return compose(steps), lines


def absent_words(edits: list[Line], encoding: Encoding, prompts: Iterable[Tensor]) -> list[str]:
    """Choose the edited words that none of the prompts, ids (1, T) each, has."""
    absent = []
    for word in dict.fromkeys(edit.word for edit in edits):
        ids, _ = find_words(word, encoding)
        if not any(occurrences(idx, ids).any() for idx in prompts):
            absent.append(word)
    return absent
