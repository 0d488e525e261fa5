"""Canonical examples (arXiv 2402.06155): whether predictions fulfil the examples' wishes."""

from pathlib import Path

import torch
from torch import Tensor

from rucksack.edits.examples import WISHES, Example, read_examples
from rucksack.errors import UserError
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score


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


def examples_rows(loaded: LoadedModel, data: str | None, wish: str | None) -> list[dict]:
    """Examples in --data: the mean loss in nats, and the share of successes, by wish.

    The loss is -ln p(A) for more, ln p(A) for less, ln p(B)/p(A) for order, and |ln p(A)/p(B)| for
    equal. Success for more: p(A) is at least 0.2. For less: p(A) is below 0.001. For order: A is at
    least 16 times as likely as B. For equal: one is at most 1.5 times as likely as the other.
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
    return rows
