"""Canonical examples (arXiv 2402.06155): whether predictions fulfil the examples' wishes."""

from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from rucksack.edits.examples import Example, read_examples
from rucksack.edits.neighbours import neighbours_of, read_background, write_about
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score
from rucksack.table import Table, shortened
from rucksack.words import token_texts


def outcomes(models: list[LoadedModel], examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Predict what follows the prompts of n examples, by each model: (models, n) each.

    Returns ln p(A) or, with B, ln p(A)/p(B), and the likeliest next ids.
    """
    pairs = [(one.prompt, one.a) for one in examples]
    pairs += [(one.prompt, one.b) for one in examples if one.b]
    n = len(examples)
    has_b = [bool(one.b) for one in examples]
    last = [len(one.prompt) - 1 for one in examples]
    values = []
    likeliest = []
    for loaded in models:
        scores = score(loaded, pairs, 'examples')
        of_a = scores.logp[:n]
        of_a[has_b] -= scores.logp[n:]
        values.append(of_a)
        likeliest.append(scores.likeliest[range(n), last])
    return torch.stack(values), torch.stack(likeliest)


# -----------------------------------------------------------------------------
# The three measures of an edit.


def measures(edited: LoadedModel, examples: list[Example]) -> Table:
    """Show examples and neighbours before and after an edit, by measure (see neighbours.py)."""
    models = [replace(edited, edit=None), edited]
    rows = []
    notes = ["p is p(A), or p(A)/p(B); in neighbours, it is that of A's first token."]
    groups = {(one.measure, one.kind) for one in examples}
    for measure, kind in sorted(groups):
        some = [
            one for one in examples
            if (one.measure, one.kind) == (measure, kind)]
        if measure == 'specificity':
            rows += specificity(models, kind, some)
            continue
        values, ids = outcomes(models, some)
        for one, its_values, its_ids in zip(some, values.T, ids.T):
            cells = row_of(edited, one, its_values, its_ids)
            rows.append([measure, *cells])
        before, after = [
            sum(map(Example.is_fulfilled, some, value))
            for value in values]
        notes.append(f'Fulfilled ({measure}): {before} of {len(some)} before, {after} after')
    columns = {
        'measure': '',
        'lines, or prompts': shortened,
        'subject': str,
        'p before': '.4g',
        'p after': '.4g',
        'likeliest next word': str}
    return Table('What the edit does, by the three measures of model editing', columns, rows, notes)


def row_of(loaded: LoadedModel, one: Example, values: Tensor, ids: Tensor) -> list:
    """Write a line, its subject, its odds, and how the next id changed, given both (2,)."""
    subject = loaded.encoding.decode(one.subject).strip()
    distinct = dict.fromkeys(ids.tolist())
    words = token_texts(loaded.encoding, distinct)
    change = ' -> '.join(map(repr, words))
    return [one.line, subject or None, *values.exp().tolist(), change]


def specificity(models: list[LoadedModel], kind: str, near: list[Example]) -> list[list]:
    """Make the rows for neighbours of one kind: their means, and the one whose p(A) moved most."""
    n = len(near)
    edited = models[1]
    values, ids = outcomes(models, near)  # (2, n) each
    p = values.exp()
    means = ['specificity', f'{n} prompts: {kind}', None, *p.mean(1).tolist()]
    texts = [
        (one.prompt[:1], one.prompt[1:] + one.a)
        for one in near]
    if not score(edited, texts, 'prompts').touched.any():
        return [[*means, 'cannot change: no moved sense']]
    n_changed = (ids[0] != ids[1]).sum()
    i = (p[1] - p[0]).abs().argmax()
    worst = row_of(edited, near[i], values[:, i], ids[:, i])
    return [
        [*means, f'{n_changed} of {n} changed'],
        ['the worst', *worst]]


# -----------------------------------------------------------------------------
# The table of eval.


def examples_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """Examples in --data: the mean loss in nats, and the share of successes, by wish.

    The loss is -ln p(A) for more, ln p(A) for less, ln p(B)/p(A) for order, and |ln p(A)/p(B)| for
    equal. Success for more: p(A) is at least 0.2. For less: p(A) is below 0.001. For order: A is at
    least 16 times as likely as B. For equal: one is at most 1.5 times as likely as the other.
    For an edited model, the three measures are printed first.
    """
    examples = read_examples(data, loaded)
    rows = []
    for wish in sorted({one.wish for one in examples}):
        some = [one for one in examples if one.wish == wish]
        values = outcomes([loaded], some)[0][0]  # (n,)
        rows.append({
            'wish': wish,
            'examples': len(some),
            'loss': fmean(map(Example.loss, some, values)),
            'success': fmean(map(Example.is_fulfilled, some, values))})
    if loaded.edit:
        own = loaded.model.other if loaded.lender else loaded.model
        unedited = replace(loaded, model=own, lender=None, edit=None)
        examples, near = neighbours_of(unedited, examples, read_background(None, loaded))
        print(measures(loaded, examples + near + write_about(unedited, examples)))
    return rows
