"""Lend edits: a model predicts as if it had a Backpack's edit, though it has no senses of its own.

    log p'(x) = log p_other(x) + beta (log p_edited(x) - log p_unedited(x)) - log Z

Source: "Model Editing with Canonical Examples" (arXiv 2402.06155), section 7, which improves GPT-J
with a small Backpack. Each log p is a logit minus a constant, and logits are linear in the senses
(Eq. 2 and 9). So the difference in parentheses is the logits of what the edit adds to the senses:

    logits' = logits_other + beta E^T sum_j sum_l alpha_lij (C'(x_j)_l - C(x_j)_l)

Both models must have the same vocabulary. Letters are as in model.py.
"""

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from rucksack import senses
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.loaded import LoadedModel
from rucksack.model import GPT, Backpack, weighted_sum
from rucksack.senses import Edit, at_last, compose
from rucksack.tokenizer import ids_that_differ


class Lent(nn.Module):
    """A model whose predictions follow edits of a lender's senses, times strength (beta).

    other maps ids (B, T) to logits (B, T, V or more), and has a config, as GPT and Backpack do;
    lender is a Backpack. lent(idx, C=edit(idx, lent.senses(idx))) returns logits, without columns
    for padding, and lent.generate(idx, n, edit=edit) continues texts. Its block_size is the smaller
    of the two. Raises ValueError if the vocabularies have different sizes.
    """

    generate = Backpack.generate

    def __init__(self, other: Callable, lender: Backpack | Cached, strength: float = 1.0):
        super().__init__()
        V = other.config.n_vocab
        if lender.config.n_vocab != V:
            raise ValueError(f'the other model has {V} ids, the lender {lender.config.n_vocab}; '
                             'lending needs the same vocabulary')
        self.other = other
        self.lender = lender
        self.strength = strength
        self.config = copy(other.config)
        self.config.vocab_size = V
        self.config.n_sense = lender.config.n_sense
        self.config.block_size = min(other.config.block_size, lender.config.block_size)

    def senses(self, idx: Tensor) -> Tensor:
        """Compute Eq. 10, the lender's senses C (.., k, d) of ids of any shape (..)."""
        return self.lender.senses(idx)

    def forward(self, idx: Tensor, *, C: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) under an edit that made the lender's senses C (B, T, k, d).

        Without C, these are the other model's logits.
        """
        V = self.config.n_vocab
        logits = self.other(idx)[..., :V]  # (B, T, V)
        if C is None:
            return logits
        added = C - self.lender.senses(idx)  # (B, T, k, d), 0 where the edit changes nothing
        moved = self.lender(idx, C=added)[..., :V]
        return logits + self.strength * moved  # the equation above


def cached(model: Backpack | GPT | Lent) -> Cached | Lent:
    """Return the version of a model that generates without reading a token twice."""
    if isinstance(model, Lent):
        return Lent(Cached(model.other), Cached(model.lender), model.strength)
    return Cached(model)


@torch.no_grad()
def probs_under(model: Backpack | GPT | Lent, idx: Tensor, edits: Collection[Edit | None],
                last: Tensor | None = None) -> Tensor:
    """Predict the token after the texts idx (B, T) under each edit, as senses.probs_under does.

    Returns probabilities (edits, B, V). For a Lent, both models read the texts once.
    """
    if not isinstance(model, Lent):
        return senses.probs_under(model, idx, edits, last)
    lender = model.lender
    by_position = lender.alpha(idx).transpose(1, 2)  # (B, T, k, T), [b, i, l, j]
    alpha = at_last(by_position, last)[:, :, None]  # (B, k, 1, T)
    C = lender.senses(idx)  # (B, T, k, d)
    outputs = []
    for edit in edits:
        added = compose([edit])(idx, C.clone()) - C  # (B, T, k, d); a copy, to be safe
        outputs.append(weighted_sum(alpha, added)[:, 0])  # (B, d)
    moved = lender.project(torch.stack(outputs))[..., :model.config.n_vocab]  # (edits, B, V)
    logits = at_last(model(idx), last)  # (B, V)
    return (logits + model.strength * moved).softmax(-1)


def lend(loaded: LoadedModel, lender: LoadedModel, strength: float | None = None) -> LoadedModel:
    """Let a loaded model follow edits of a lender's senses, times strength (default 1).

    Raises UserError if the lender has no senses, or if its vocabulary is different.
    """
    lender.needs_senses('--lender')
    if strength is None:
        strength = 1.0
    differ = ids_that_differ(lender.encoding, loaded.encoding)
    if differ:
        raise UserError(f'{loaded.name} and {lender.name} have different vocabularies '
                        f'({len(differ):,} ids differ); choose another --lender')
    name = f'{loaded.name} with senses of {lender.name}'
    if strength != 1:
        name += f' times {strength:g}'
    model = Lent(loaded.model, lender.model, strength)
    return replace(loaded, name=name, model=model, lender=lender.model)
