"""Canonical examples (arXiv 2402.06155): whether predictions fulfil the examples' wishes."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rucksack.edits.examples import WISHES, Example, read_examples
from rucksack.edits.neighbours import (
    Neighbour,
    find_neighbours,
    find_subjects,
    read_background,
    usual_logp,
)
from rucksack.errors import UserError
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import Pair, score
from rucksack.table import Table, shortened
from rucksack.words import token_texts

MOST_SHOWN = 24  # lines


def log_odds(loaded: LoadedModel, examples: list[Example]) -> Tensor:
    """Compute ln p(A) or, with B, ln p(A)/p(B) for each example: (examples,)."""
    pairs = [(one.prompt, one.a) for one in examples]
    pairs += [(one.prompt, one.b) for one in examples if one.b]
    logp = score(loaded, pairs, 'examples').logp  # (pairs,)
    values = logp[:len(examples)]
    has_b = [bool(one.b) for one in examples]
    values[has_b] -= logp[len(examples):]
    return values


def fulfilled(examples: list[Example], values: Tensor) -> Tensor:
    """Tell which examples are fulfilled (n,), given their values (n,) from log_odds."""
    return torch.tensor([one.loss(value) <= WISHES[one.wish].limit
                         for one, value in zip(examples, values)])


def examples_for(loaded: LoadedModel, path: str | None, wish: str | None) -> list[Example]:
    """Read the examples in a file; raises UserError if path is None."""
    if path is None:
        raise UserError('examples needs --data FILE, with one example per line or a .jsonl')
    return read_examples(Path(path), loaded.encoding, loaded.config.block_size, wish)


# -----------------------------------------------------------------------------
# The three measures of an edit.


def measures(edited: LoadedModel, lines: dict[str, list[Example]], near: list[Neighbour]) -> Table:
    """Show lines and neighbours before and after an edit, by measure (see neighbours.py).

    lines maps efficacy, and perhaps generalization, to examples.
    """
    models = [replace(edited, edit=None), edited]
    rows = []
    notes = []
    for measure, examples in lines.items():
        pairs = [(one.prompt, one.a[:1]) for one in examples]
        before, after = (log_odds(loaded, examples) for loaded in models)  # (examples,) each
        likeliest = [next_word(loaded, pairs)[1] for loaded in models]
        changes = [change(edited, old, new) for old, new in zip(*likeliest)]
        values = zip(examples, before.exp().tolist(), after.exp().tolist(), changes)
        for one, old, new, words in list(values)[:MOST_SHOWN]:
            what = 'p(A)/p(B)' if one.b else 'p(A)'
            rows.append([measure, with_braces(edited, one), what, old, new, words])
        was_right = fulfilled(examples, before)
        is_right = fulfilled(examples, after)
        notes.append(f'Fulfilled ({measure}) before: {was_right.sum()} of {len(examples)}; after: '
                     f'{is_right.sum()}. Repaired: {(is_right & ~was_right).sum()}; broken: '
                     f'{(was_right & ~is_right).sum()}')
        if not is_right.all():
            notes.append('Not fulfilled (lines may contradict each other or compete):')
            notes += [examples[i].line for i in (~is_right).nonzero()]
    for kind in sorted({one.kind for one in near}):
        rows += specificity(models, kind, [one for one in near if one.kind == kind])
    if near:
        notes.append("In neighbours, p(A) is the probability of A's first token.")
    columns = {'measure': '', 'lines, or prompts': shortened, 'what': str, 'before': '.4g',
               'after': '.4g', 'likeliest next word': str}
    return Table('What the edit does, by the three measures of model editing', columns, rows, notes)


def next_word(loaded: LoadedModel, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Compute p of the id in each pair (prompt, [id]), and the likeliest id: (pairs,) each."""
    scores = score(loaded, pairs, 'prompts')
    return scores.logp.exp(), scores.likeliest.amax(1)  # -1 where nothing is scored


def change(loaded: LoadedModel, old: Tensor, new: Tensor) -> str:
    """Write how the likeliest next id changed."""
    before, after = token_texts(loaded.encoding, [old.item(), new.item()])
    return f'{before!r} -> {after!r}' if old != new else repr(before)


def with_braces(loaded: LoadedModel, one: Example) -> str:
    """Write an example's line with its subject in braces."""
    subject = loaded.encoding.decode(one.subject or ()).strip()
    if not subject or f'{{{subject}}}' in one.line:
        return one.line
    return one.line.replace(subject, f'{{{subject}}}', 1)


def specificity(models: list[LoadedModel], kind: str, near: list[Neighbour]) -> list[list]:
    """Make the rows for neighbours of one kind: their means, and the one whose p(A) moved most."""
    edited = models[1]
    pairs = [one.pair for one in near]
    (before, old_ids), (after, new_ids) = (next_word(loaded, pairs) for loaded in models)
    n_changed = (old_ids != new_ids).sum()
    texts = [torch.tensor([prompt], device=edited.device) for prompt, _ in pairs]
    means = [f'{len(near)} prompts: {kind}', 'mean p(A)', before.mean().item(), after.mean().item()]
    if not any(moves(edited, idx) for idx in texts):
        return [['specificity', *means, 'cannot change: no moved sense']]
    i = (after - before).abs().argmax().item()
    worst = [edited.encoding.decode(near[i].prompt), 'p(A)', before[i].item(), after[i].item()]
    return [['specificity', *means, f'{n_changed} of {len(near)} changed'],
            ['the worst', *worst, change(edited, old_ids[i], new_ids[i])]]


def moves(edited: LoadedModel, idx: Tensor) -> bool:
    """Tell whether an edit moves a sense of a text (1, T)."""
    C = edited.model.senses(idx)
    return not torch.equal(edited.edit(idx, C.clone()), C)


def neighbours_of(loaded: LoadedModel, examples: list[Example], background: list[Pair]
                  ) -> tuple[list[Example], list[Neighbour]]:
    """Give examples their subjects, and find their neighbours."""
    usual = usual_logp(loaded, background)
    examples = find_subjects(loaded, examples, usual)
    return examples, find_neighbours(loaded, examples, usual)


# -----------------------------------------------------------------------------
# The table of eval.


def examples_rows(loaded: LoadedModel, data: str | None, wish: str | None) -> list[dict]:
    """Examples in --data: the mean loss in nats, and the share of successes, by wish.

    The loss is -ln p(A) for more, ln p(A) for less, ln p(B)/p(A) for order, and |ln p(A)/p(B)| for
    equal. Success for more: p(A) is at least 0.2. For less: p(A) is below 0.001. For order: A is at
    least 16 times as likely as B. For equal: one is at most 1.5 times as likely as the other.
    For an edited model, the three measures are printed first.
    """
    examples = examples_for(loaded, data, wish)
    values = log_odds(loaded, examples)  # (examples,)
    losses = torch.stack([one.loss(value) for one, value in zip(examples, values)])
    succeeds = fulfilled(examples, values).double()
    wishes = [one.wish for one in examples]
    rows = []
    for name in sorted(set(wishes)):
        is_of_wish = torch.tensor([wish == name for wish in wishes])
        rows.append({
            'wish': name,
            'examples': wishes.count(name),
            'loss': losses[is_of_wish].mean().item(),
            'success': succeeds[is_of_wish].mean().item()})
    if loaded.edit:
        unedited = replace(loaded, edit=None)
        examples, near = neighbours_of(unedited, examples, read_background(None, loaded))
        print(measures(loaded, {'efficacy': examples}, near))
    return rows
