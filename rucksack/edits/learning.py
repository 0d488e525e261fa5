"""Learn an edit from examples: which senses of which words to move, and by which vectors.

Method: sense finetuning, from Hewitt, Chen, Xie, Adams, Liang, Manning 2024, "Model Editing with
Canonical Examples", https://arxiv.org/abs/2402.06155

An example wishes for a text after a prompt. Gradient steps find vectors to add to a few senses of
its words; no parameter of the model changes. positions.py says what a moved sense does.

An example moves only the senses of its subject, and only where the whole subject stands. Which of
these senses? Other relations of the subject should not move, but their words read the same senses,
with other weights. Call the weights w (k,) of the subject's k senses at position i the key of i.
ROME (https://arxiv.org/abs/2202.05262, Eq. 2) moves a layer for one key, and others least:

    delta_l = u_l v,  u = C^-1 w / (w . C^-1 w),  C = the mean of w w^T over texts to hold

Here v (d,) is what o gains at position i, which gradient steps find. At another position, o gains
(u . w) v. An example without a subject moves single senses instead, chosen by their gradients.

P counts the pairs (sequence, sense) that move, R the vectors to learn. Other letters are as in
model.py.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import progress
from rucksack.edits.examples import WISHES, Example
from rucksack.edits.neighbours import Neighbour, cut
from rucksack.edits.positions import (
    POSITIONS_AT_ONCE,
    Positions,
    inside,
    losses_of,
    pairs_of,
    read,
    texts_of,
)
from rucksack.edits.shifts import Shift, load_shift, save_shift  # noqa: F401 (for docs/python.md)
from rucksack.errors import UserError
from rucksack.model import Backpack
from rucksack.paper.likelihood import Pair

EXAMPLES_AT_ONCE = 24   # in a step
SENSES = 9              # to move, for an example without a subject
PENALTY = 3000          # for choosing a sense to which other text gives weight
RIDGE = 1e-3            # added to C: weights are between 0 and 1
RATE = 7.68             # RATE / d is the learning rate: a step moves logits equally at any d
PASSES = 40             # over the examples, at most
HOLD = 100              # weight of the divergence on held texts, for examples with subjects
URGENCY = 10            # weight of their losses until they are fulfilled
FACTORS = [i / 64 for i in range(1, 65)]  # choices for scaling the vectors down


# -----------------------------------------------------------------------------
# Which senses to move.


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
    pairs = pairs_of([(i,) for i in sorted(ids)], model)  # (pairs, 2)
    if not examples:
        return pairs
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


def directions(keys: list[tuple[int, Tensor]], held: list[Tensor], subjects: int) -> Tensor:
    """Find the columns u of the equation for keys (number of a subject, w): (subjects * k, R).

    A key's w is (k,). held has the keys of groups of held positions, (n, k) each.
    """
    first = keys[0][1]
    k = len(first)
    C = RIDGE * torch.eye(k).to(first)  # (k, k), one for all subjects
    for w in held:
        C += w.T @ w / len(w)
    basis = first.new_zeros(subjects, k, len(keys))
    for r, (number, w) in enumerate(keys):
        u = torch.linalg.solve(C, w)
        basis[number, :, r] = u / (u @ w)
    return basis.flatten(0, 1)


def directions_of(model: Backpack, examples: list[Example], texts: list[list[Pair]]
                  ) -> tuple[Tensor, Tensor]:
    """Find the pairs (sequence, sense) that examples with subjects move, (P, L + 1).

    Also returns the directions in which they move, (P, R): one for each position of an example that
    has not reached its goal. Groups of texts after a subject give C.
    """
    subjects = sorted({one.subject for one in examples})
    pairs = pairs_of(subjects, model)

    def keys_of(positions: Positions) -> Tensor:  # (N, subjects, k)
        return positions.weights.unflatten(1, (len(subjects), -1))

    keys = []
    for one in examples:
        case = read(model, texts_of([one]), pairs)
        nothing = case.o.new_zeros(len(pairs), model.config.n_embd)
        if losses_of([one], case, nothing) > one.goal:
            number = subjects.index(one.subject)
            w = keys_of(case)[:model.config.n_sense, number]  # more span no more directions
            keys += [(number, w_i) for w_i in w]
    if not keys:
        return pairs, pairs.new_zeros(len(pairs), 0)
    held = [keys_of(read(model, group, pairs)) for group in texts]
    return pairs, directions(keys, [w[w.any(-1)] for w in held], len(subjects))


# -----------------------------------------------------------------------------
# Learning.


def fit(examples: list[Example], goals: Tensor,
        cases: list[Positions], held: list[Positions],
        passes: int, lr: float, hold: float = 1,
        urgency: float = 0, seed: int = 0) -> Tensor:
    """Find vectors (P, d) that bring examples to their goals (n,) and preserve other predictions.

    cases are the positions of each example. held are groups of positions whose predictions should
    stay; the divergence of each group counts hold times. A loss counts urgency times more until its
    wish is fulfilled, and falls no further once it has reached its goal. Learning ends when every
    example had reached its goal the last time it was drawn. The rate falls along a cosine.
    Adam's betas are lower than published, so that it soon forgets the urgency of a fulfilled wish.
    """
    n = len(examples)
    steps = passes * math.ceil(n / EXAMPLES_AT_ONCE)
    shape = (cases[0].weights.shape[1], cases[0].o.shape[1])
    vectors = cases[0].o.new_zeros(shape, requires_grad=True)
    optimizer = torch.optim.Adam([vectors], lr, betas=(0.5, 0.9))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    held = [group.moved() for group in held if group.weights.any()]
    limits = goals.new_tensor([WISHES[one.wish].limit for one in examples])
    latest = torch.full_like(goals, math.inf)  # the loss of each example when it was last drawn
    for _ in progress(range(passes), 'passes'):
        for batch in torch.randperm(n, generator=generator).split(EXAMPLES_AT_ONCE):
            losses = [losses_of([examples[i]], cases[i], vectors) for i in batch]
            losses = torch.cat(losses)
            latest[batch] = losses.detach()
            if (latest <= goals).all():
                return vectors.detach()
            loss = torch.maximum(losses, goals[batch]).mean()
            loss = loss + urgency * torch.maximum(losses, limits[batch]).mean()
            for group in held:
                drawn = torch.randint(len(group.o), (POSITIONS_AT_ONCE,), generator=generator)
                loss = loss + hold * group.at(drawn).divergence(vectors)
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


def find_shift(model: Backpack, examples: list[Example], texts: list[list[Pair]],
               inside: list[list[Pair]] = (), seed: int = 0) -> Shift:
    """Find the shift that examples wish for, not scaled by a price.

    Either all examples have a subject, or none has. Predictions are held in all groups of texts,
    the first of which is the background, and of inside, which give no keys.
    """
    if examples[0].subject:
        texts = [cut(group, examples)[1] for group in texts]
        texts = [group for group in texts if group]
        pairs, basis = directions_of(model, examples, texts)
        weights = (HOLD, URGENCY)
    else:
        pairs = choose(model, examples, texts[0], SENSES)
        basis = torch.eye(len(pairs)).to(model.wte.weight)
        weights = (1, 0)
    d = model.config.n_embd
    if not basis.numel():
        return Shift(pairs[:0, :-1], pairs[:0, -1], model.wte.weight.new_zeros(0, d))
    cases = [read(model, texts_of([one]), pairs).along(basis) for one in examples]
    held = [read(model, group, pairs).along(basis) for group in (*texts, *inside) if group]
    goals = cases[0].o.new_tensor([one.goal for one in examples])
    vectors = fit(examples, goals, cases, held, PASSES, RATE / d, *weights, seed)
    return Shift(pairs[:, :-1], pairs[:, -1], basis @ vectors)


def learn(model: Backpack, examples: list[Example], background: list[Pair], *,
          written: list[Pair] = (),
          near: list[Neighbour] = (),
          keep: list[Example] = (),
          budget: float = 1e-3) -> Learned:
    """Learn an edit from examples, in up to PASSES passes over them.

    An example moves the senses of its subject or, if it has none, SENSES pairs (id, sense).
    background and written are pairs of ids (context, rest); write_texts makes the second, and
    find_neighbours makes near. Learning tries to preserve the predictions on every second text of
    background, written and near, inside the prompts, and after the prompts of keep. The other texts
    of background and written give two prices, where no subject stands before. The vectors are
    scaled down until neither price exceeds budget, a share of the loss.
    Raises UserError if every example has reached its goal, or if no factor keeps to the budget.
    """
    near_pairs = [one.pair for one in near[::2]]
    texts = [group for group in (background[::2], written[::2], near_pairs) if group]
    with_subject = [one for one in examples if one.subject]
    without = [one for one in examples if not one.subject]
    shifts = [find_shift(model, some, texts, [inside(examples), texts_of(keep)])
              for some in (with_subject, without) if some]
    L = max(shift.ids.shape[1] for shift in shifts)
    pairs = torch.cat([F.pad(torch.cat([shift.ids, shift.numbers[:, None]], dim=1),
                             (L - shift.ids.shape[1], 0), value=-1) for shift in shifts])
    vectors = torch.cat([shift.vectors for shift in shifts])
    if not len(pairs):
        raise UserError('every example is already fulfilled; there is nothing to learn')
    priced = [cut(group[1::2], examples)[0] for group in (background, written)]
    priced = [read(model, group, pairs) for group in priced if group]
    nothing = 0 * vectors
    moved = [one.moved() for one in priced]
    loss = [one.nats(nothing) / len(one.o) for one in priced]

    def prices(factor: float) -> list[float]:
        return [(part.nats(factor * vectors) - part.nats(nothing)) / len(whole.o)
                for part, whole in zip(moved, priced)]

    def costs_too_much(factor: float) -> bool:
        return not all(price <= budget * old for price, old in zip(prices(factor), loss))

    n_within = bisect_left(FACTORS, True, key=costs_too_much)
    if n_within == 0:
        raise UserError(f'even {FACTORS[0]:.1%} of the edit costs more than {budget:g} of the loss '
                        'on other text; choose a larger budget')
    factor = FACTORS[n_within - 1]
    shift = Shift(pairs[:, :-1], pairs[:, -1], factor * vectors)
    return Learned(shift, factor, prices(factor)[0])
