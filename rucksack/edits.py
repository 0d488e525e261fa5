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
from collections.abc import Sequence
from dataclasses import dataclass

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
    quoted,
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
    """Senses of a word, as in nurse:10, *:3-5 or nurse:she/he."""

    word: str
    numbers: list[int]
    pair: tuple[str, str] | None = None  # (A, B): the sense that most separates A from B


@dataclass(frozen=True)
class Scaling:
    """Senses to multiply by a factor."""

    senses: SensesOf
    factor: float


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
    weights: Sequence[float]


def parse_edits(lines: list[str]) -> list[Scaling | Replacement | Topic]:
    """Parse edits, one a line; a line @FILE stands for the lines of a file."""
    edits = []
    for line in lines:
        is_file = re.fullmatch('@[^:]+', line)
        for one in read_lines(line) if is_file else [line]:
            edits += parse_edit(one.strip())
    return edits


def parse_edit(line: str) -> list[Scaling | Replacement | Topic]:
    """Parse a line into one edit for each of its words; UserError lists the forms of a line."""
    strength = rf'[0-3]|{NUMBER}(?:,{NUMBER}){{3}}'
    of_topic = re.fullmatch(rf'topic\s+([^:=]+?)\s*(?:=\s*({strength}))?', line)
    if of_topic:
        bag, strength = of_topic.groups()
        return [Topic(parse_bag(bag), parse_strength(strength or '2'))]
    of_replacement = re.fullmatch(r'(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)', line)
    if of_replacement:
        words, old, new = of_replacement.groups()
        return [Replacement(word, old, new) for word in word_list(words)]
    senses, factor = re.fullmatch(rf'(.*?)(?:=\s*(-?{NUMBER}))?', line, re.DOTALL).groups()
    parsed = parse_senses(senses, f'{line!r} is not an edit; {FORMS}')
    return [Scaling(one, float(factor or 0)) for one in parsed]


def parse_strength(text: str) -> tuple[float, ...]:
    """Parse a strength: the number of a row of Table 11, or four factors."""
    numbers = text.split(',')
    if len(numbers) == 1:
        return STRENGTHS[int(text)]
    return tuple(map(float, numbers))


def parse_senses(text: str, complaint: str | None = None) -> list[SensesOf]:
    """Parse WORD:SENSES for one word or a list; UserError, with the complaint, for other texts.

    *:A/B is refused, as the sense differs by word.
    """
    complaint = complaint or (f'{text!r} is not WORD:SENSES, as in nurse:10, nurse:3-5,10, '
                              'nurse:she/he or *:10')
    span = '[0-9]{1,4}(?:-[0-9]{1,4})?'
    match = re.fullmatch(rf'(?!\*.*/)(.*\S)\s*:\s*({span}(?:\s*,\s*{span})*|[^/]+/[^/]+)\s*', text)
    if not match:
        raise UserError(complaint)
    words, which = match.groups()
    pair = None
    spans = []
    if '/' in which:
        pair = parse_pair(which)
    else:
        spans = [parse_span(span) for span in which.split(',')]
    if not all(spans):
        raise UserError(complaint)
    numbers = [number for span in spans for number in span]
    return [SensesOf(word, numbers, pair) for word in word_list(words)]


def parse_span(text: str) -> range:
    """Parse the sense numbers in 3 or 3-5; 5-3 has none."""
    first, _, last = text.partition('-')
    return range(int(first), int(last or first) + 1)


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
    numbers = senses.numbers
    reason = ''
    if senses.pair:
        last_piece = pieces_of(encoding, senses.word)[-1]
        number, reason = separating_sense(last_piece, senses.pair, model, encoding)
        numbers = [number]
    last = model.config.n_sense - 1
    if max(numbers) > last:
        raise UserError(f'{senses.word} has no sense {max(numbers)}; choose from 0 to {last}')
    noun = 'sense' if len(numbers) == 1 else 'senses'
    return words, numbers, f'{noun} {", ".join(map(str, numbers))} of {word}{reason}'


def separating_sense(w: int, pair: tuple[str, str], model: Backpack, encoding: Encoding
                     ) -> tuple[int, str]:
    """Find the sense of the id w that most separates a pair, and say by how much it does."""
    a, b = (word_id(encoding, word) for word in pair)
    ids = torch.tensor([w], device=model.wte.weight.device)
    scores = separation(model, ids, a, b)[0]  # (k,)
    by_size = scores.abs().argsort(descending=True).tolist()
    best = by_size[0]
    second = ''
    if len(by_size) > 1:
        second = f'; sense {by_size[1]}: {scores[by_size[1]]:+.2f}'
    return best, (f', which most separates {quoted(encoding, a)} from {quoted(encoding, b)} '
                  f'(by {scores[best]:+.2f} logits{second})')


def make_edit(edits: list[Scaling | Replacement | Topic], model: Backpack, encoding: Encoding
              ) -> tuple[Edit, list[str]]:
    """Make one edit that applies parsed edits in order; also returns a line about each."""
    topics = [edit for edit in edits if isinstance(edit, Topic)]
    bags = [bag_ids(encoding, edit.bag) for edit in topics]
    scores = iter(scores_of_bags(model, bags).unbind(-1) if bags else [])  # (V, k) each
    steps = []
    lines = []
    for edit in edits:
        if isinstance(edit, Topic):
            steps.append(topic(model, next(scores), edit.weights))
            factors = ', '.join(f'{weight:g}' for weight in edit.weights)
            lines.append(f'Topic: {", ".join(edit.bag)}; senses scaled by {factors}')
        elif isinstance(edit, Replacement):
            words, what = find_words(edit.word, encoding)
            old = word_id(encoding, edit.old)
            new = word_id(encoding, edit.new)
            steps.append(replace_word(model, words, old, new))
            lines.append(f'Replaced: {what} gives {quoted(encoding, new)} '
                         f'what it gave {quoted(encoding, old)}')
        else:
            words, numbers, what = find_senses(edit.senses, model, encoding)
            steps.append(scale_senses(words, numbers, edit.factor))
            change = f'Times {edit.factor:g}' if edit.factor else 'Off'
            lines.append(f'{change}: {what}')
    return compose(steps), lines


def edited_words(edits: list[Scaling | Replacement | Topic]) -> list[str]:
    """List the words that edits change, each once; * if there is an edit of every word."""
    words = []
    for edit in edits:
        if isinstance(edit, Topic):
            words.append('*')
        elif isinstance(edit, Replacement):
            words.append(edit.word)
        else:
            words.append(edit.senses.word)
    return list(dict.fromkeys(words))


def absent_words(words: list[str], encoding: Encoding, prompts: Sequence[Tensor]) -> list[str]:
    """Choose the words that none of the prompts, ids (1, T) each, has."""
    absent = []
    for word in words:
        ids, _ = find_words(word, encoding)
        if not any(occurrences(idx, ids).any() for idx in prompts):
            absent.append(word)
    return absent
