"""Canonical examples (arXiv 2402.06155): how far texts do what examples wish for."""

import math
from itertools import compress
from pathlib import Path

from torch import Tensor

from rucksack.errors import UserError
from rucksack.examples import WISHES, Example, read_examples
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score
from rucksack.table import Table

# Success, as published for the capitals, StereoSet, the verbs and the pronouns: a probability of
# at least, or below; times as likely at least, or at most.
THRESHOLDS = {'more': 0.2, 'less': 0.001, 'order': 16, 'equal': 1.5}
SUCCESS = {
    'more': 'p(A) is at least 0.2',
    'less': 'p(A) is below 0.001',
    'order': 'A is at least 16 times as likely as B',
    'equal': 'one is at most 1.5 times as likely as the other'}
MEASURES = {
    'more': '-ln p(A)', 'less': '-ln p(A)', 'order': 'ln p(A)/p(B)', 'equal': '|ln p(A)/p(B)|'}


def log_odds(loaded: LoadedModel, examples: list[Example]) -> Tensor:
    """Compute ln p(A) or, with two continuations, ln p(A)/p(B) for each example: (examples,)."""
    compares = [example.wish in ('order', 'equal') for example in examples]  # A with B
    pairs = [(example.prompt, example.likelier or example.less_likely) for example in examples]
    for example in compress(examples, compares):
        pairs.append((example.prompt, example.less_likely))
    logp = score(loaded, pairs, 'examples').logp  # (pairs,)
    n = len(examples)
    values = logp[:n]
    values[compares] -= logp[n:]
    return values


def successes(values: Tensor, wish: str, threshold: float | None = None) -> Tensor:
    """Tell which log_odds (n,) of examples of one wish succeed, by THRESHOLDS by default: (n,)."""
    limit = math.log(threshold or THRESHOLDS[wish])
    if wish == 'less':
        return values < limit
    if wish == 'equal':
        return values.abs() <= limit
    return values >= limit


def examples_for(loaded: LoadedModel, path: str | None, wish: str | None) -> list[Example]:
    """Read the examples in a file; UserError without one."""
    if path is None:
        raise UserError('examples needs --data FILE, with one example per line or a .jsonl')
    return read_examples(Path(path), loaded.encoding, loaded.config.block_size, wish)


def examples_table(models: list[LoadedModel], path: str | None, wish: str | None,
                   threshold: float | None) -> Table:
    """Measure examples under each loaded: the mean, and the share that succeeds, by wish."""
    rows = []
    means = {}
    for loaded in models:
        examples = examples_for(loaded, path, wish)
        values = log_odds(loaded, examples)  # (examples,)
        for name in WISHES:
            of_wish = [example.wish == name for example in examples]
            found = values[of_wish]
            if not len(found):
                continue
            share = successes(found, name, threshold).double().mean().item()
            measured = found if name == 'order' else found.abs()  # as in MEASURES
            mean = measured.mean().item()
            change = mean - means.setdefault(name, mean)
            rows.append([str(loaded), name, len(found), MEASURES[name], mean, change, share])
    title = f'Examples of {path}: nats, and the share that succeeds'
    columns = {'model': '', 'wish': str, 'examples': 'd', 'measure': str, 'nats': '.3f',
               'change': '+.3f', 'success': '.3f'}
    notes = []
    if threshold is None:
        notes = [f'Success of {name}: {SUCCESS[name]}.' for name in means]
    return Table(title, columns, rows, notes)
