"""Read texts once, for edits that move senses: what a position predicts, moved or not.

If delta is added to sense l of a word, o_i moves by w_i delta, and alpha stays (Eq. 12):

    o_i' = o_i + w_i delta,  w_i = sum of alpha_lij over the positions j where the word ends   Eq. 2
    logits_i' = o_i' E^T                                                                       Eq. 9

P counts the pairs (word, sense) that move, N the scored positions of all texts, n of one text.
Other letters are as in model.py.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.edits.examples import Example
from rucksack.model import Backpack, weighted_sum
from rucksack.paper.likelihood import Pair
from rucksack.senses import sequence_ends

POSITIONS_AT_ONCE = 64  # their logits are (positions, V)


@dataclass(frozen=True)
class Positions:
    """N positions of some texts: what P moved senses change there, and what should follow."""

    targets: Tensor  # (N,), the ids that follow
    o: Tensor        # (N, d), Eq. 2, before any sense moves
    weights: Tensor  # (N, P), the sum of alpha over the positions of a word, for its sense
    E: Tensor        # (V, d), which does not learn

    def at(self, some: Tensor) -> 'Positions':
        """Choose some positions, given their indices (n,) or a mask (N,)."""
        return Positions(self.targets[some], self.o[some], self.weights[some], self.E)

    def along(self, basis: Tensor) -> 'Positions':
        """Move senses only along the columns of a basis (P, R): vectors are then (R, d)."""
        return replace(self, weights=self.weights @ basis)

    def logits(self, vectors: Tensor) -> Tensor:
        """Compute the logits (N, V) with the senses moved by vectors (P, d)."""
        o = self.o + self.weights @ vectors  # (N, d), Eq. 2
        return o @ self.E.T  # (N, V), Eq. 9

    def logp(self, vectors: Tensor) -> Tensor:
        """Compute log p(target) at each position (N,), with the senses moved by vectors (P, d)."""
        return -F.cross_entropy(self.logits(vectors), self.targets, reduction='none')

    def divergence(self, vectors: Tensor) -> Tensor:
        """Average KL(p || q), p from the model and q from the edited one: a scalar."""
        edited = self.logits(vectors).log_softmax(-1)  # (N, V)
        unedited = self.logits(torch.zeros_like(vectors)).log_softmax(-1)
        return F.kl_div(edited, unedited, log_target=True, reduction='batchmean')

    @torch.no_grad()
    def nats(self, vectors: Tensor) -> float:
        """Sum -log p(target), with the senses moved by vectors (P, d), in nats."""
        everything = torch.arange(len(self.o))
        groups = everything.split(POSITIONS_AT_ONCE)
        return -sum(self.at(group).logp(vectors).sum().item() for group in groups)

    def moved(self) -> 'Positions':
        """Choose the positions where anything can change."""
        return self.at(self.weights.any(1))


@torch.no_grad()
def read(model: Backpack, texts: list[Pair], pairs: Tensor) -> Positions:
    """Read texts: the positions before each continuation, for P pairs (sequence of ids, sense).

    pairs is (P, L + 1): up to L ids, with -1 before shorter sequences, and the number of a sense.
    """
    words, places = pairs[:, :-1].unique(dim=0, return_inverse=True)  # (words, L) and (P,)
    numbers = pairs[:, -1]
    parts = []
    for context, continuation in texts:
        n = len(continuation)
        text = torch.tensor(context + continuation, device=pairs.device)  # (T + 1,)
        idx = text[None, :-1]  # (1, T)
        alpha = model.alpha(idx)[:, :, -n:]  # (1, k, n, T)
        o = weighted_sum(alpha, model.senses(idx))  # (1, n, d)
        is_end = sequence_ends(idx, words)[0].to(alpha)  # (T, words)
        by_sense = alpha[0] @ is_end  # (k, n, words)
        parts.append((text[-n:], o[0], by_sense[numbers, :, places].T))
    targets, o, weights = zip(*parts)
    E = model.wte.weight.detach()[:model.config.n_vocab]
    return Positions(
        targets=torch.cat(targets),
        o=torch.cat(o),
        weights=torch.cat(weights),
        E=E)


def texts_of(examples: list[Example]) -> list[Pair]:
    """List the texts of examples: A of the first one, then its B if it has one, and so on."""
    return [(one.prompt, ids)
            for one in examples
            for ids in (one.a, one.b)
            if ids]


def inside(examples: list[Example]) -> list[Pair]:
    """Take the prompts of examples as pairs: the first token, and the rest."""
    return [(one.prompt[:1], one.prompt[1:])
            for one in examples
            if len(one.prompt) > 1]


def pairs_of(sequences: list[tuple[int, ...]], model: Backpack) -> Tensor:
    """List each sequence of ids with each sense, (P, L + 1); see read."""
    L = max(map(len, sequences), default=1)
    rows = [[-1] * (L - len(ids)) + [*ids, l]
            for ids, l in product(sequences, range(model.config.n_sense))]
    pairs = torch.tensor(rows, dtype=torch.long, device=model.wte.weight.device)
    return pairs.view(-1, L + 1)


def losses_of(examples: list[Example], positions: Positions, vectors: Tensor) -> Tensor:
    """Compute the losses of examples (n,), in nats, at the positions of their texts_of."""
    logp = positions.logp(vectors)  # (N,)
    losses = []
    start = 0
    for one in examples:
        middle = start + len(one.a)
        end = middle + len(one.b)
        value = logp[start:middle].sum() - logp[middle:end].sum()  # the second is 0 without B
        losses.append(one.loss(value))
        start = end
    return torch.stack(losses)
