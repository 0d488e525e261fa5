"""Read texts once, for edits that move senses: what a position predicts, moved or not.

If delta is added to sense l of a word, o_i moves by w_i delta, and alpha stays (Eq. 12):

    o_i' = o_i + w_i delta,  w_i = sum of alpha_lij over the positions j where the word ends   Eq. 2
    logits_i' = o_i' E^T                                                                       Eq. 9

P counts the pairs (sequence of ids, sense) that may move, S the sequences, N the scored positions
of all texts, n of one text. Other letters are as in model.py.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.edits.examples import Example
from rucksack.edits.shifts import padded
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
    example: Example | None = None  # whose texts these are

    def at(self, some: Tensor) -> 'Positions':
        """Choose some positions, given their indices (n,) or a mask (N,)."""
        return Positions(
            self.targets[some],
            self.o[some],
            self.weights[some],
            self.E)

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

    def loss(self, vectors: Tensor) -> Tensor:
        """Compute the loss of the example, in nats: a scalar."""
        logp = self.logp(vectors)  # (N,)
        n = len(self.example.a)
        value = logp[:n].sum() - logp[n:].sum()  # the second is 0 without B
        return self.example.loss(value)

    @torch.no_grad()
    def nats(self, vectors: Tensor) -> float:
        """Sum -log p(target), with the senses moved by vectors (P, d), in nats."""
        groups = torch.arange(len(self.o)).split(POSITIONS_AT_ONCE)
        return -sum(
            self.at(group).logp(vectors).sum().item()
            for group in groups)

    def moved(self) -> 'Positions':
        """Choose the positions where anything can change."""
        return self.at(self.weights.any(1))


@torch.no_grad()
def read(model: Backpack, texts: list[Pair], sequences: list[tuple[int, ...]]) -> Positions:
    """Read texts: the positions before each continuation, for all k senses of each sequence of ids.

    The P = sequences * k senses are in the order of make_shift.
    """
    E = model.wte.weight.detach()[:model.config.n_vocab]
    words = padded(sequences, E.device)  # (S, L)
    parts = []
    for context, continuation in texts:
        n = len(continuation)
        text = torch.tensor(context + continuation, device=E.device)  # (T + 1,)
        idx = text[None, :-1]  # (1, T)
        alpha = model.alpha(idx)[:, :, -n:]  # (1, k, n, T)
        o = weighted_sum(alpha, model.senses(idx))  # (1, n, d)
        is_end = sequence_ends(idx, words)[0].to(alpha)  # (T, S)
        by_sense = alpha[0] @ is_end  # (k, n, S)
        weights = by_sense.permute(1, 2, 0)  # (n, S, k)
        parts.append((text[-n:], o[0], weights.flatten(1)))
    targets, o, weights = map(torch.cat, zip(*parts))
    return Positions(targets, o, weights, E)


def inside(examples: list[Example]) -> list[Pair]:
    """Take the prompts of examples as pairs: the first token, and the rest."""
    return [(one.prompt[:1], one.prompt[1:])
            for one in examples
            if one.prompt[1:]]
