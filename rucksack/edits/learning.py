"""Learn an edit from examples: which senses of which words to move, and by which vectors.

Method: sense finetuning, from Hewitt, Chen, Xie, Adams, Liang, Manning 2024, "Model Editing with
Canonical Examples", https://arxiv.org/abs/2402.06155

An example wishes for a text after a prompt. Each example chooses a few senses of its words, and
gradient steps find a vector to add to each of them. Nothing else in the model changes: not even
alpha, because it does not depend on the senses (Eq. 12). So the Transformer reads each text only
once. If delta is added to sense l of id v, o_i moves by w_i delta:

    o_i' = o_i + w_i delta,  w_i = sum of alpha_lij over the positions j where x_j = v    Eq. 2
    logits_i' = o_i' E^T                                                                 Eq. 9

With these two lines, a step computes the losses of all examples, and how far predictions move where
nothing should change: on a background of other text, on texts that the model itself writes from the
examples, and inside the prompts.

P counts the pairs (id, sense) that move, N the scored positions of all texts, n of one text.
Other letters are as in model.py.
"""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import progress
from rucksack.edits.examples import Example
from rucksack.edits.shifts import Shift, load_shift, save_shift  # noqa: F401 (for docs/python.md)
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.model import Backpack, weighted_sum
from rucksack.senses import occurrences

POSITIONS_AT_ONCE = 64  # of a group of held texts; their logits are (positions, V)
EXAMPLES_AT_ONCE = 5    # in a step, as published
SENSES = 9              # to move, for each example
PENALTY = 3000          # for choosing a sense to which other text gives weight
WRITTEN = 32            # texts that the model writes
WRITTEN_LENGTH = 128    # tokens in each
RATE = 5.12             # RATE / d is the learning rate: a step moves logits equally at any d
FACTORS = [i / 64 for i in range(1, 65)]  # choices for scaling the vectors down

Pair = tuple[list[int], list[int]]  # ids of a context, and of what follows; neither is empty


# -----------------------------------------------------------------------------
# Reading texts.


@dataclass(frozen=True)
class Positions:
    """N positions of some texts: what P moved senses change there, and what should follow."""

    targets: Tensor  # (N,), the ids that follow
    o: Tensor        # (N, d), Eq. 2, before any sense moves
    weights: Tensor  # (N, P), the sum of alpha over the positions of an id, for its sense
    E: Tensor        # (V, d), which does not learn

    def at(self, some: Tensor) -> 'Positions':
        """Choose some positions, given their indices (n,) or a mask (N,)."""
        return Positions(self.targets[some], self.o[some], self.weights[some], self.E)

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
    def loss(self, vectors: Tensor) -> float:
        """Average -log p(target), with the senses moved by vectors (P, d), in nats per token."""
        everything = torch.arange(len(self.o))
        groups = everything.split(POSITIONS_AT_ONCE)
        logp = [self.at(group).logp(vectors) for group in groups]
        return -torch.cat(logp).mean().item()


@torch.no_grad()
def read(model: Backpack, texts: list[Pair], pairs: Tensor) -> Positions:
    """Read texts: the positions before each continuation, for the pairs (id, sense), (P, 2)."""
    ids, numbers = pairs.T  # (P,) each
    parts = []
    for context, continuation in texts:
        n = len(continuation)
        text = torch.tensor(context + continuation, device=ids.device)  # (T + 1,)
        idx = text[None, :-1]  # (1, T)
        alpha = model.alpha(idx)[:, :, -n:]  # (1, k, n, T)
        o = weighted_sum(alpha, model.senses(idx))  # (1, n, d)
        is_id = (idx.T == ids).to(alpha)  # (T, P)
        by_sense = alpha[0] @ is_id  # (k, n, P)
        weights = by_sense[numbers, :, torch.arange(len(ids))]  # (P, n)
        parts.append((text[-n:], o[0], weights.T))
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


# -----------------------------------------------------------------------------
# Learning.


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


def choose(model: Backpack, examples: list[Example], background: list[Pair], n: int) -> Tensor:
    """Choose n pairs (id, sense) for each example from its texts: (P, 2).

    A pair scores what moving its sense does for the example (the norm of the loss's gradient with
    respect to its vector) minus PENALTY times what it does elsewhere (the mean weight that
    background positions give to the sense). Norms are about 1, mean weights up to 0.02, so one
    occurrence in thousands of tokens can decide. (The paper scores the weight that the continuation
    gives to the sense, not the gradient.) An example that has reached its goal chooses none.
    """
    ids = set()
    for prompt, continuation in texts_of(examples):
        ids |= {*prompt, *continuation[:-1]}
    numbers = range(model.config.n_sense)
    pairs = list(product(sorted(ids), numbers))
    pairs = torch.tensor(pairs, device=model.wte.weight.device)  # (pairs, 2)
    elsewhere = read(model, background, pairs).weights.mean(0)  # (pairs,)
    vectors = elsewhere.new_zeros(len(pairs), model.config.n_embd, requires_grad=True)
    is_chosen = torch.zeros(len(pairs), dtype=torch.bool, device=pairs.device)
    for one in progress(examples, 'examples'):
        positions = read(model, texts_of([one]), pairs)
        loss = losses_of([one], positions, vectors).sum()
        if loss > one.goal:
            gradients, = torch.autograd.grad(loss, vectors)  # (pairs, d), 0 for words it lacks
            scores = gradients.norm(dim=1) - PENALTY * elsewhere
            scores[~positions.weights.any(0)] = -math.inf
            best = scores.topk(min(n, len(scores)))
            is_chosen[best.indices[best.values.isfinite()]] = True
    return pairs[is_chosen]


def fit(examples: list[Example], goals: Tensor,
        cases: list[Positions], held: list[Positions],
        passes: int, lr: float, seed: int = 0) -> Tensor:
    """Find vectors (P, d) that bring examples to their goals (n,) and preserve other predictions.

    cases are the positions of each example. held are groups of positions whose predictions should
    stay; all groups count equally. Learning ends once every example had reached its goal the last
    time it was drawn. Adam's betas are as published, and the rate falls along a cosine.
    """
    n = len(examples)
    steps = passes * math.ceil(n / EXAMPLES_AT_ONCE)
    shape = (held[0].weights.shape[1], held[0].o.shape[1])
    vectors = held[0].o.new_zeros(shape, requires_grad=True)
    optimizer = torch.optim.Adam([vectors], lr, betas=(0.9, 0.995))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    held = [group.at(group.weights.any(1)) for group in held]  # elsewhere nothing can change
    floors = goals.clamp(max=0)  # a loss below 0 falls no further than its goal
    latest = torch.full_like(goals, math.inf)  # the loss of each example when it was last drawn
    for _ in progress(range(passes), 'passes'):
        for batch in torch.randperm(n, generator=generator).split(EXAMPLES_AT_ONCE):
            losses = [losses_of([examples[i]], cases[i], vectors) for i in batch]
            losses = torch.cat(losses)
            latest[batch] = losses.detach()
            if (latest <= goals).all():
                return vectors.detach()
            loss = torch.maximum(losses, floors[batch]).mean()
            for group in held:
                if len(group.o):
                    drawn = torch.randint(len(group.o), (POSITIONS_AT_ONCE,), generator=generator)
                    loss = loss + group.at(drawn).divergence(vectors)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return vectors.detach()


# -----------------------------------------------------------------------------
# An edit from examples.


@dataclass(frozen=True)
class Learned:
    """A shift, and its price on the half of the background that learning did not use."""

    shift: Shift
    factor: float  # by which the learned vectors were scaled down
    price: float   # nats per token that the edit adds


def learn(model: Backpack, examples: list[Example], background: list[list[int]], *,
          written: list[Pair] = (),
          keep: list[Example] = (),
          budget: float = 1e-3) -> Learned:
    """Learn an edit from examples in up to 30 steps or ten passes, whichever takes longer.

    Each example chooses SENSES pairs (id, sense) to move. background has texts of 2 to
    block_size + 1 ids, and written has texts from write_texts. Learning tries to preserve the
    predictions on every second text of background and of written, inside the prompts, and after
    the prompts of keep. The other texts give two prices. The vectors are scaled down until neither
    exceeds budget, a share of the loss.
    Raises UserError if every example has reached its goal, or if no factor keeps to the budget.
    """
    steps_in_pass = math.ceil(len(examples) / EXAMPLES_AT_ONCE)
    passes = max(10, math.ceil(30 / steps_in_pass))
    texts = [(ids[:1], ids[1:]) for ids in background]
    pairs = choose(model, examples, texts[::2], SENSES)  # (P, 2)
    if not len(pairs):
        raise UserError('every example is already fulfilled; there is nothing to learn')
    cases = [read(model, texts_of([one]), pairs) for one in examples]
    goals = [one.goal for one in examples]
    goals = cases[0].o.new_tensor(goals)  # (examples,)
    held = [read(model, group, pairs)
            for group in (texts[::2], written[::2], inside(examples), texts_of(keep))
            if group]
    lr = RATE / model.config.n_embd
    vectors = fit(examples, goals, cases, held, passes, lr)
    priced = [read(model, group, pairs)
              for group in (texts[1::2], written[1::2])
              if group]
    before = [one.loss(0 * vectors) for one in priced]

    def costs_too_much(factor: float) -> bool:
        after = [one.loss(factor * vectors) for one in priced]
        return not all(new <= (1 + budget) * old for new, old in zip(after, before))

    n_within = bisect_left(FACTORS, True, key=costs_too_much)
    if n_within == 0:
        raise UserError(f'even {FACTORS[0]:.1%} of the edit costs more than {budget:g} of the loss '
                        'on other text; choose a larger budget')
    factor = FACTORS[n_within - 1]
    shift = Shift(*pairs.T, factor * vectors)
    price = priced[0].loss(shift.vectors) - before[0]
    return Learned(shift, factor, price)


@torch.no_grad()
def write_texts(model: Backpack, examples: list[Example], eot: int, seed: int = 0
                ) -> list[Pair]:
    """Have the model write texts that begin like examples: pairs (start, rest) of ids.

    A start is three consecutive tokens of an example, with two end-of-texts (eot) before it. The
    rest ends at any whole prompt, because the prediction there is meant to change.
    """
    n = min(WRITTEN_LENGTH, model.config.block_size // 2)
    starts = []
    for one in examples:
        ids = [eot, eot, *one.prompt, *one.a]
        starts += [ids[i:i + 3] for i in range(len(ids) - 2)]
    starts = random.Random(seed).choices(starts, k=WRITTEN)
    idx = torch.tensor(starts, device=model.wte.weight.device)  # (WRITTEN, 3)
    torch.manual_seed(seed)
    idx = Cached(model).generate(idx, n)  # (WRITTEN, 3 + n)
    prompts = [tuple(one.prompt) for one in examples]
    is_end = occurrences(idx, prompts)[:, 2:, 0, 0]  # (WRITTEN, 1 + n), from the end of a start
    n_held = (is_end.cumsum(1) == 0).sum(1)  # (WRITTEN,), up to the first end of a prompt
    texts = []
    for ids, n in zip(idx.tolist(), n_held.tolist()):
        if n > 0:
            start = ids[:3]
            texts.append((start, ids[3:3 + n]))
    return texts
