"""Canonical examples (arXiv 2402.06155): whether predictions fulfil the examples' wishes."""

from dataclasses import replace

import torch
from torch import Tensor

from rucksack.edits.examples import WISHES, Example, read_examples
from rucksack.edits.neighbours import Neighbour, neighbours_of, read_background
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import predict, score
from rucksack.table import Table, shortened
from rucksack.words import token_texts


def log_odds(loaded: LoadedModel, examples: list[Example]) -> Tensor:
    """Compute ln p(A) or, with B, ln p(A)/p(B) for each example: (examples,)."""
    pairs = [(one.prompt, one.a) for one in examples]
    pairs += [(one.prompt, one.b) for one in examples if one.b]
    logp = score(loaded, pairs, 'examples').logp  # (pairs,)
    n = len(examples)
    values = logp[:n]
    has_b = [bool(one.b) for one in examples]
    values[has_b] -= logp[n:]
    return values


def losses(examples: list[Example], values: Tensor) -> Tensor:
    """Compute the losses of examples (n,), in nats, given their values (n,) from log_odds."""
    return torch.stack([one.loss(value) for one, value in zip(examples, values)])


def fulfilled(examples: list[Example], values: Tensor) -> Tensor:
    """Tell which examples are fulfilled (n,), given their values (n,) from log_odds."""
    limits = [WISHES[one.wish].limit for one in examples]
    return losses(examples, values) <= torch.tensor(limits)


# -----------------------------------------------------------------------------
# The three measures of an edit.


def measures(edited: LoadedModel, lines: dict[str, list[Example]], near: list[Neighbour]) -> Table:
    """Show lines and neighbours before and after an edit, by measure (see neighbours.py).

    lines maps efficacy, and perhaps generalization, to examples.
    """
    models = [replace(edited, edit=None), edited]
    rows = []
    notes = ["p is p(A), or p(A)/p(B); in neighbours, it is that of A's first token."]
    for measure, examples in lines.items():
        values = [log_odds(loaded, examples) for loaded in models]
        odds = torch.stack(values, dim=1).exp()  # (n, 2)
        prompts = [Neighbour('', one.prompt, one) for one in examples]
        _, ids = next_words(models, prompts)  # (2, n)
        for i, one in enumerate(examples):
            subject = edited.encoding.decode(one.subject)
            rows.append([
                measure,
                one.line,
                subject.strip() or None,
                *odds[i].tolist(),
                change(edited, ids[:, i])])
        before = fulfilled(examples, values[0]).sum()
        after = fulfilled(examples, values[1]).sum()
        notes.append(f'Fulfilled ({measure}): {before} of {len(examples)} before, {after} after')
    for kind in sorted({one.kind for one in near}):
        some = [one for one in near if one.kind == kind]
        rows += specificity(models, kind, some)
    columns = {
        'measure': '',
        'lines, or prompts': shortened,
        'subject': str,
        'p before': '.4g',
        'p after': '.4g',
        'likeliest next word': str}
    return Table('What the edit does, by the three measures of model editing', columns, rows, notes)


def next_words(models: list[LoadedModel], near: list[Neighbour]) -> tuple[Tensor, Tensor]:
    """Predict after n prompts: p of A's first token, and the likeliest next id, (2, n) each."""
    pairs = [one.pair for one in near]
    scores = [score(loaded, pairs, 'prompts') for loaded in models]
    p = [one.logp.exp() for one in scores]
    likeliest = [one.likeliest.amax(1) for one in scores]  # -1 where nothing is scored
    return torch.stack(p), torch.stack(likeliest)


def change(loaded: LoadedModel, ids: Tensor) -> str:
    """Write how the likeliest next id changed, given both (2,)."""
    distinct = dict.fromkeys(ids.tolist())
    return ' -> '.join(map(repr, token_texts(loaded.encoding, distinct)))


@torch.no_grad()
def specificity(models: list[LoadedModel], kind: str, near: list[Neighbour]) -> list[list]:
    """Make the rows for neighbours of one kind: their means, and the one whose p(A) moved most."""
    edited = models[1]
    n = len(near)
    p, ids = next_words(models, near)  # (2, n) each
    means = [
        'specificity',
        f'{n} prompts: {kind}',
        None,
        *p.mean(1).tolist()]
    prompts = [torch.tensor([one.prompt], device=edited.device) for one in near]
    if not any(predict(edited, idx)[1].any() for idx in prompts):
        return [[*means, 'cannot change: no moved sense']]
    n_changed = (ids[0] != ids[1]).sum()
    i = (p[1] - p[0]).abs().argmax().item()
    worst = edited.encoding.decode(near[i].prompt)
    return [
        [*means, f'{n_changed} of {n} changed'],
        [
            'the worst',
            worst,
            None,
            *p[:, i].tolist(),
            change(edited, ids[:, i])]]


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
        values = log_odds(loaded, some)  # (n,)
        rows.append({
            'wish': wish,
            'examples': len(some),
            'loss': losses(some, values).mean().item(),
            'success': fulfilled(some, values).double().mean().item()})
    if loaded.edit:
        background = read_background(None, loaded)
        examples, near = neighbours_of(replace(loaded, edit=None), examples, background)
        print(measures(loaded, {'efficacy': examples}, near))
    return rows
