"""Turn lines such as nurse:10, typed or in a file, into one edit of the senses.

LINE is the grammar of a line; the page reads its lines by it too. parse_lines needs no model.
make_edit then finds words and senses in the model, and composes one edit of senses.py.
`sample.py --help` says what each form does.
"""

import re
from collections.abc import Collection
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.errors import UserError
from rucksack.model import Backpack
from rucksack.senses import (
    STRENGTHS,
    Edit,
    compose,
    explain,
    occurrences,
    replace_word,
    scale_senses,
    separation,
    topic,
)
from rucksack.words import edit_targets, parse_pair, read_lines, tokens_of, word_ids, word_list

FORMS = ('nurse:10, nurse,teacher:3-5,10=0.5, nurse:she/he, *:3, MacBook: Apple -> HP, '
         'topic music=2, topic jazz, piano, @FILE.safetensors=0.5 or @FILE')
NUMBER = r'(?:[0-9]+\.?[0-9]*|\.[0-9]+)'
DRIVE = r'(?:@[A-Za-z]:)?'  # the colon in @C:\nouns.txt:10 ends no word
LEARNED = rf'@(?P<file>.+\.safetensors)(?:\s*=\s*(?P<times>-?{NUMBER}))?'
TOPIC = rf'topic\s+(?P<bag>{DRIVE}[^:=]+?)(?:\s*=\s*(?P<strength>[0-3]))?'
REPLACEMENT = r'(?P<old>\S.*?)\s*->\s*(?P<new>\S.*)'
SCALING = rf'(?P<senses>[^=\\/][^=]*?)(?:\s*=\s*(?P<factor>-?{NUMBER}))?'
LINE = rf'{LEARNED}|{TOPIC}|(?P<words>{DRIVE}.[^:]*?)\s*:\s*(?:{REPLACEMENT}|{SCALING})'

Change = dict[str, str | None]  # a parsed line: the named groups of LINE; None where it has none


def parse_lines(lines: list[str]) -> list[Change]:
    """Parse lines; a line @FILE stands for all lines in that file."""
    changes = []
    for line in lines:
        match = re.fullmatch(LINE, line.strip())
        if match:
            changes.append(match.groupdict())
        elif line.startswith('@'):
            changes += parse_lines(read_lines(line))
        else:
            raise UserError(f'{line!r} cannot be read; write a line like {FORMS}')
    return changes


def make_edit(changes: list[Change], model: Backpack, encoding: Encoding,
              prompts: Collection[Tensor] = ()) -> tuple[Edit, list[str]]:
    """Make one edit that applies changes in order; also returns what a person should know of it.

    prompts, ids (1, T) each, determine the sense in nurse:she/he. By default, it is the sense
    that most separates the two words at weight 1.
    """
    edits = []
    notices = []
    for change in changes:
        if change['file']:
            from rucksack.edits.shifts import load_shift  # no other line needs it
            shift = load_shift(Path(change['file']).expanduser(), model, encoding)
            edits.append(shift.edit(float(change['times'] or 1)))
        elif change['bag']:
            edits.append(topic_edit(change, model, encoding))
        else:
            for word in word_list(change['words']):
                edit, about = word_edit(change, word, model, encoding, prompts)
                edits.append(edit)
                notices += about
    return compose(edits), notices


def topic_edit(change: Change, model: Backpack, encoding: Encoding) -> Edit:
    """Make the edit for a bag of words, at a strength of Table 11."""
    from rucksack.vocabulary import parse_bag, topic_scores  # no other line needs it
    strength = int(change['strength'] or 2)
    scores, = topic_scores(model, encoding, [parse_bag(change['bag'])])  # (V, k)
    return topic(model, scores, STRENGTHS[strength])


def word_edit(change: Change, word: str, model: Backpack, encoding: Encoding,
              prompts: Collection[Tensor]) -> tuple[Edit, list[str]]:
    """Make the edit that scales senses of a word, or gives NEW what the word gave OLD."""
    notices = []
    words = edit_targets(encoding, word)
    if prompts and not any(occurrences(idx, words).any() for idx in prompts):
        notices.append(f'Not in any prompt, so no effect on the next word: {word}')
    if change['old']:
        old, new = word_ids(encoding, [change['old'], change['new']])
        return replace_word(model, words, old, new), notices
    factor = float(change['factor'] or 0)
    numbers, why = find_senses(word, change['senses'], model, encoding, prompts)
    if why:
        verb = f'Scaled by {factor:g}' if factor else 'Off'
        notices.append(f'{verb}: {why}')
    return scale_senses(words, numbers, factor), notices


def find_senses(word: str, which: str, model: Backpack, encoding: Encoding,
                prompts: Collection[Tensor] = ()) -> tuple[list[int], str]:
    """List the senses of a word that people name, and say why, if that is not in the name.

    which is 3-5,10, or '' for all senses, or A/B for the sense that most separates A from B: whose
    terms alpha * C.(E_a - E_b) have the largest sum, positive or negative, on average over the
    prompts, ids (1, T) each, that contain the word. If none does, the terms are those at weight 1.
    """
    k = model.config.n_sense
    if '/' not in which:
        return sense_numbers(which or f'0-{k - 1}', k), ''
    if word == '*':
        raise UserError(f'*:{which} needs a word in place of *: the sense differs between words')
    pair = parse_pair(which)
    a, b = word_ids(encoding, pair)
    E = model.wte.weight
    words = edit_targets(encoding, word)
    found = []
    for idx in prompts:
        is_word = occurrences(idx, words)[..., 0]  # (1, T, 1)
        if is_word.any():
            alpha, along = explain(model, idx, E[a] - E[b])  # (1, T, k) each
            terms = alpha * along * is_word
            found.append(terms.sum((0, 1)))
    where = 'after the prompt'
    if not found:
        where = 'at weight 1'
        last = torch.tensor(tokens_of(encoding, word)[-1:], device=E.device)  # (1,)
        found = [separation(model, last, a, b)[0]]
    scores = torch.stack(found).mean(0)  # (k,)
    best = scores.abs().topk(min(2, k)).indices.tolist()
    logits = ', '.join(f'sense {l}: {scores[l]:+.2f} logits' for l in best)
    apart = ' from '.join(pair)
    return best[:1], f'sense {best[0]} of {word}, which most separates {apart} {where} ({logits})'


def sense_numbers(spans: str, k: int) -> list[int]:
    """List the numbers in spans, such as 3-5,10; raises UserError unless all are below k."""
    numbers = []
    for span in spans.split(','):
        match = re.fullmatch(r'\s*([0-9]+)(?:-([0-9]+))?\s*', span)
        first, last = match.groups(match[1]) if match else (k, k)
        if not int(first) <= int(last) < k:
            raise UserError(f'{span!r} is not a sense; write 10, 3-5,10 (up to {k - 1}) or she/he')
        numbers += range(int(first), int(last) + 1)
    return numbers
