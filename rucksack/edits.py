"""Turn lines such as nurse:10, typed or in a file, into one edit of the senses.

Lines are parsed into changes before a model is loaded. Then the model and its encoding turn words
into ids, and all changes into one edit, in the order of the lines. FORMS lists the forms of a line.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.errors import UserError, user_errors
from rucksack.learning import load_shift
from rucksack.model import Backpack
from rucksack.senses import (
    STRENGTHS,
    Edit,
    Words,
    compose,
    explain,
    occurrences,
    replace_word,
    scale_senses,
    topic,
)
from rucksack.words import (
    count_whole,
    describe,
    edit_targets,
    parse_bag,
    parse_pair,
    read_lines,
    tokens_of,
    topic_scores,
    word_ids,
    word_list,
)

WORD = r'([^:]*[^:\s]|:)'  # a word ends at the first colon
NUMBER = r'(?:[0-9]{1,4}(?:\.[0-9]*)?|\.[0-9]+)'
LEARNED = rf'@(.+\.safetensors)\s*(?:=\s*(-?{NUMBER}))?'
FORMS = {  # form of a line -> what it does
    'nurse:10': 'turn sense 10 of nurse off',
    'nurse,teacher:3-5,10=0.5': 'multiply senses by 0.5',
    'nurse:she/he': 'turn off the sense that most separates she from he after the prompt',
    '*:3': 'turn off sense 3 of every word',
    'MacBook: Apple -> HP': 'give HP what MacBook gave Apple',
    'topic music=2': 'turn up the senses that favour a topic from Table 10',
    'topic jazz, piano': 'the same for your own words (strength: 0 to 3 [2], or four factors)',
    '@FILE.safetensors=0.5': 'apply an edit learned by edit.py, scaled by 0.5 [1]',
    '@FILE': 'a file with one LINE per line (for @FILE:10, one word per line)'}


# -----------------------------------------------------------------------------
# From lines to changes.


@dataclass(frozen=True)
class SensesOf:
    """Senses of a word to multiply by a factor, as in nurse:10, *:3-5=0.5 or nurse:she/he."""

    word: str
    numbers: list[int]  # [] means all
    pair: tuple[str, str] | None = None  # (A, B): the sense that most separates A from B
    factor: float = 0.0
    text: str = field(default='', compare=False)  # as typed


@dataclass(frozen=True)
class Replacement:
    """A word whose contribution to the word old should go to the word new."""

    word: str
    old: str
    new: str


@dataclass(frozen=True)
class Topic:
    """A bag of words, and the four factors of its strength (Table 11)."""

    bag: list[str]
    factors: Sequence[float]
    word: str = '*'


@dataclass(frozen=True)
class FromFile:
    """A learned edit in a .safetensors file, times a factor."""

    path: str
    factor: float
    word: str = '*'


Change = SensesOf | Replacement | Topic | FromFile


def parse_lines(lines: list[str]) -> list[Change]:
    """Parse lines; a line @FILE stands for all lines in that file."""
    changes = []
    for line in lines:
        if not re.fullmatch('@[^:]+', line) or '.safetensors' in line:
            changes += parse_line(line.strip())
            continue
        lines_of_file = read_lines(line)
        with user_errors(line):
            for one in lines_of_file:
                changes += parse_line(one.strip())
    return changes


def parse_line(line: str) -> list[Change]:
    """Parse a line into one change for each of its words; raises UserError for any other form."""
    of_file = re.fullmatch(LEARNED, line)
    if of_file:
        path, factor = of_file.groups('1')
        return [FromFile(path, float(factor))]
    strength = rf'[0-3]|{NUMBER}(?:,{NUMBER}){{3}}'
    of_topic = re.fullmatch(rf'topic\s+([^:=]+?)\s*(?:=\s*({strength}))?', line)
    if of_topic:
        bag, strength = of_topic.groups('2')
        factors = tuple(map(float, strength.split(',')))
        if len(factors) == 1:
            factors = STRENGTHS[int(strength)]
        return [Topic(parse_bag(bag), factors)]
    of_replacement = re.fullmatch(rf'{WORD}\s*:\s*(\S.*?)\s*->\s*(\S.*)', line)
    if of_replacement:
        change = Replacement(*of_replacement.groups())
    else:
        change = parse_senses(line)
    words = word_list(change.word)
    if '*' in words and isinstance(change, SensesOf) and change.pair:
        raise UserError(f'{line!r} needs a word in place of *, because the sense differs between '
                        'words')
    return [replace(change, word=word) for word in words]


def parse_senses(text: str) -> SensesOf:
    """Parse WORD:SENSES or WORD:SENSES=FACTOR; raises UserError, which lists the valid forms.

    *:A/B is refused, because the sense differs between words.
    """
    span = '[0-9]{1,4}(?:-[0-9]{1,4})?'
    which = rf'{span}(?:\s*,\s*{span})*|[^/]+/[^/]+?'
    match = re.fullmatch(rf'(?!\*.*/){WORD}\s*:\s*({which})\s*(?:=\s*(-?{NUMBER}))?\s*', text)
    if not match:
        raise UserError(f'{text!r} cannot be read; write one of {", ".join(map(repr, FORMS))}')
    word, which, factor = match.groups('0')
    if '/' in which:
        return SensesOf(word, [], parse_pair(which), float(factor), text)
    numbers = [number for span in which.split(',') for number in parse_span(span)]
    return SensesOf(word, numbers, None, float(factor), text)


def parse_span(text: str) -> range:
    """Parse the sense numbers in 3 or 3-5; raises UserError for 5-3."""
    first, _, last = text.partition('-')
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise UserError(f'senses {text}: give the smaller number first')
    return numbers


# -----------------------------------------------------------------------------
# From changes to an edit.


def find_senses(senses: SensesOf, model: Backpack, encoding: Encoding,
                prompts: Collection[Tensor] = ()) -> tuple[Words, list[int], str]:
    """Find the ids of the word and the numbers of its senses, and describe them.

    prompts, ids (1, T) each, determine the sense of a pair (see pair_scores).
    """
    k = model.config.n_sense
    numbers = senses.numbers
    reason = ''
    if senses.pair:
        scores, where = pair_scores(senses, model, encoding, prompts)  # (k,)
        by_size = scores.abs().argsort(descending=True).tolist()
        numbers = by_size[:1]
        two_best = ', '.join(f'sense {l}: {scores[l]:+.2f} logits' for l in by_size[:2])
        reason = f', which most separates {" from ".join(senses.pair)} {where} ({two_best})'
    elif not numbers:
        numbers = list(range(k))
    if max(numbers) >= k:
        raise UserError(f'{senses.word} has no sense {max(numbers)}; choose from 0 to {k - 1}')
    noun = 'sense' if len(numbers) == 1 else 'senses'
    what = f'{noun} {", ".join(map(str, numbers))} of {describe(encoding, senses.word)}{reason}'
    return edit_targets(encoding, senses.word), numbers, what


def pair_scores(senses: SensesOf, model: Backpack, encoding: Encoding,
                prompts: Collection[Tensor]) -> tuple[Tensor, str]:
    """Measure in logits how far each sense of a word separates A from B, (k,); also say where.

    The score is the sum of the sense's terms alpha * C.(E_a - E_b), averaged over the prompts that
    contain the word. If none does, the score is C.(E_a - E_b), the term at weight 1.
    """
    a, b = word_ids(encoding, senses.pair)
    E = model.wte.weight
    words = edit_targets(encoding, senses.word)
    texts = [idx for idx in prompts if occurrences(idx, words).any()]
    where = 'after the prompt'
    if not texts:
        words = [tokens_of(encoding, senses.word)[-1]]
        texts = [torch.tensor([words], device=E.device)]  # alone, so all weights are 1
        where = 'at weight 1'
    total = E.new_zeros(model.config.n_sense)
    for idx in texts:
        alpha, scores = explain(model, idx, E[a] - E[b])  # (1, T, k) each
        terms = alpha * scores * occurrences(idx, words)[..., 0]
        total += terms.sum((0, 1))
    return total / len(texts), where


def make_edit(changes: list[Change], model: Backpack, encoding: Encoding,
              prompts: Collection[Tensor] = ()) -> tuple[Edit, list[str]]:
    """Make one edit that applies changes in order; also returns a sentence about each change.

    prompts, ids (1, T) each, determine the sense in nurse:she/he. By default, it is the sense
    that most separates the two words at weight 1.
    """
    steps = []
    sentences = []
    for change in changes:
        if isinstance(change, Topic):
            scores, = topic_scores(model, encoding, [change.bag])  # (V, k)
            steps.append(topic(model, scores, change.factors))
            bag_of_words = ', '.join(change.bag)
            sentences.append(f'Topic: {bag_of_words}; senses scaled by {change.factors}')
        elif isinstance(change, FromFile):
            shift = load_shift(change.path, model, encoding)
            steps.append(shift.edit(change.factor))
            sentences.append(f'Learned edit, scaled by {change.factor:g}: {len(shift.ids)} senses '
                             f'({change.path})')
        elif isinstance(change, Replacement):
            old, new = word_ids(encoding, [change.old, change.new])
            words = edit_targets(encoding, change.word)
            steps.append(replace_word(model, words, old, new))
            what = describe(encoding, change.word)
            sentences.append(f'Replaced: {what} gives {change.new} what it gave {change.old}')
        else:
            words, numbers, what = find_senses(change, model, encoding, prompts)
            steps.append(scale_senses(words, numbers, change.factor))
            verb = f'Scaled by {change.factor:g}' if change.factor else 'Off'
            sentences.append(f'{verb}: {what}')
    return compose(steps), sentences


def count_word(word: str, encoding: Encoding, prompts: Collection[Tensor]) -> tuple[int, int]:
    """Count the places in prompts, ids (1, T) each, that an edit of a word touches.

    The second number counts only whole words. An edit of land touches Finland if its tokens are
    Fin and land.
    """
    ids = edit_targets(encoding, word)
    touched = [occurrences(idx, ids).sum().item() for idx in prompts]
    whole = [count_whole(word, encoding.decode(idx[0].tolist())) for idx in prompts]
    return sum(touched), sum(whole)
