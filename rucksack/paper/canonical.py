"""Canonical examples (arXiv 2402.06155): whether predictions fulfil the examples' wishes."""

from itertools import compress
from pathlib import Path

import torch
from torch import Tensor

from rucksack.errors import UserError
from rucksack.examples import WISHES, Example, loss_limit, read_examples
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score
from rucksack.table import Table

SUCCESS = {  # THRESHOLDS in words
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


def fulfilled(examples: list[Example], values: Tensor) -> Tensor:
    """Tell which examples are fulfilled (n,), given their values (n,) from log_odds."""
    found = []
    for example, value in zip(examples, values.tolist()):
        wish = example.wish
        losses = {'more': -value, 'order': -value, 'less': value, 'equal': abs(value)}
        found.append(losses[wish] <= loss_limit(wish))
    return torch.tensor(found)


def examples_for(loaded: LoadedModel, path: str | None, wish: str | None) -> list[Example]:
    """Read the examples in a file; raises UserError if path is None."""
    if path is None:
        raise UserError('examples needs --data FILE, with one example per line or a .jsonl')
    return read_examples(Path(path), loaded.encoding, loaded.config.block_size, wish)


def examples_table(models: list[LoadedModel], path: str | None, wish: str | None) -> Table:
    """Measure examples under each model: the mean, and the share that succeeds, by wish."""
    rows = []
    means = {}
    for loaded in models:
        examples = examples_for(loaded, path, wish)
        values = log_odds(loaded, examples)  # (examples,)
        succeeds = fulfilled(examples, values)
        for name in WISHES:
            of_wish = [example.wish == name for example in examples]
            found = values[of_wish]
            if not len(found):
                continue
            share = succeeds[of_wish].double().mean().item()
            measured = found if name == 'order' else found.abs()  # as in MEASURES
            mean = measured.mean().item()
            change = mean - means.setdefault(name, mean)
            rows.append([str(loaded), name, len(found), MEASURES[name], mean, change, share])
    title = f'Examples in {path}: the measure in nats, and the share of successes'
    columns = {'model': '', 'wish': str, 'examples': 'd', 'measure': str, 'nats': '.3f',
               'change': '+.3f', 'success': '.3f'}
    notes = [f'Success for {name}: {SUCCESS[name]}.' for name in means]
    return Table(title, columns, rows, notes)
