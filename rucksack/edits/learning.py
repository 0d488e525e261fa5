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

P counts the pairs (sequence, sense) that may move, R the vectors to learn. Other letters are as in
model.py.
"""

import math
from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import progress
from rucksack.edits.examples import Example
from rucksack.edits.neighbours import cut
from rucksack.edits.positions import (
    POSITIONS_AT_ONCE,
    Positions,
    inside,
    read,
)
from rucksack.edits.shifts import Shift, make_shift
from rucksack.errors import UserError
from rucksack.model import Backpack
from rucksack.paper.likelihood import Pair

EXAMPLES_AT_ONCE = 24   # in a step
SENSES = 9              # to move, for an example without a subject
PENALTY = 3000          # for choosing a sense to which other text gives weight
RIDGE = 1e-3            # added to C: weights are between 0 and 1
RATE = 10.24            # RATE / d is the learning rate: a step moves logits equally at any d
PASSES = 60             # over the examples, at most
HOLD = 100              # weight of the divergence on held texts, for examples with subjects
URGENCY = 10            # first weight of their losses until they are fulfilled
MARGIN = 0.05           # nats beyond its limit at which a wish is no longer urgent
FACTORS = [i / 64 for i in range(1, 65)]  # choices for scaling the vectors down


# -----------------------------------------------------------------------------
# Which senses to move.


def choose(case: Positions, elsewhere: Tensor) -> Tensor:
    """Choose SENSES of the P senses for an example, given its positions: their indices.

    A sense scores what moving it does for the example (the norm of the loss's gradient with respect
    to its vector) minus PENALTY times what it does elsewhere (P,), the mean weight that background
    positions give to the sense. Norms are about 1, mean weights up to 0.02, so one occurrence in
    thousands of tokens can decide. (The paper scores the weight that the continuation gives to the
    sense, not the gradient.)
    """
    nothing = elsewhere.new_zeros(len(elsewhere), case.o.shape[1])  # (P, d)
    gradients = torch.func.grad(case.loss)(nothing)  # (P, d), 0 for words that it lacks
    scores = gradients.norm(dim=1) - PENALTY * elsewhere
    its_senses = case.weights.any(0).nonzero().flatten()
    best = scores[its_senses].topk(min(SENSES, len(its_senses)))
    return its_senses[best.indices]


def directions(keys: Tensor, held: list[Tensor]) -> list[Tensor]:
    """Find the u (k,) of the equation for each of some keys (n, k).

    held has the keys of groups of held positions, (n, k) each; 0 before a subject.
    """
    C = RIDGE * torch.eye(keys.shape[1]).to(keys)  # (k, k)
    for w in held:
        w = w[w.any(1)]  # after a subject
        C += w.T @ w / max(1, len(w))
    found = [torch.linalg.solve(C, w) for w in keys]
    return [u / (u @ w) for u, w in zip(found, keys)]


# -----------------------------------------------------------------------------
# Learning.


def fit(cases: list[Positions], held: list[Positions], hold: float, urgency: float, seed: int = 0
        ) -> Tensor:
    """Find vectors (R, d) that bring examples to their goals and preserve other predictions.

    cases are the positions of each example. held are groups of positions whose predictions should
    stay; the divergence of each group counts hold times. Until a wish is fulfilled, and MARGIN more
    (the last steps are too small to correct it), its loss counts urgency times more, and this grows
    with each pass. A loss falls no further once it has reached its goal. Learning ends when every
    example had reached its goal the last time it was drawn. The rate falls along a cosine. Adam's
    betas are lower than published, so that it soon forgets the urgency of a fulfilled wish.
    """
    n = len(cases)
    o = cases[0].o
    d = o.shape[1]
    R = cases[0].weights.shape[1]
    vectors = o.new_zeros(R, d, requires_grad=True)
    optimizer = torch.optim.Adam([vectors], RATE / d, betas=(0.5, 0.9))
    steps = PASSES * math.ceil(n / EXAMPLES_AT_ONCE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    held = [group.moved() for group in held if group.weights.any()]
    goals = o.new_tensor([case.example.goal for case in cases])
    limits = o.new_tensor([case.example.limit for case in cases]) - MARGIN
    latest = torch.full_like(goals, math.inf)  # the loss of each example when it was last drawn
    for n_pass in progress(range(PASSES), 'passes'):
        for batch in torch.randperm(n, generator=generator).split(EXAMPLES_AT_ONCE):
            losses = torch.stack([cases[i].loss(vectors) for i in batch])
            latest[batch] = losses.detach()
            if (latest <= goals).all():
                return vectors.detach()
            loss = torch.maximum(losses, goals[batch]).mean()
            growing = urgency * (1 + n_pass / 10)
            loss = loss + growing * torch.maximum(losses, limits[batch]).mean()
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


def find_vectors(model: Backpack, examples: list[Example], texts: list[list[Pair]],
                 prompts: list[Pair] = (), seed: int = 0) -> tuple[list[tuple[int, ...]], Tensor]:
    """Find sequences of ids and vectors (P, d) for their senses, not scaled by a price.

    Either all examples have a subject, or none has. Predictions are held in all groups of texts,
    the first of which is the background, and in prompts (see inside), which give no keys. An
    example that has reached its goal gives no direction.
    """
    k = model.config.n_sense
    has_subjects = bool(examples[0].subject)
    if has_subjects:
        sequences = sorted({one.subject for one in examples})
    else:
        ids = set().union(*[one.prompt + one.a[:-1] + one.b[:-1] for one in examples])
        sequences = [(i,) for i in sorted(ids)]
    cases = [replace(read(model, one.texts, sequences), example=one) for one in examples]
    held = [read(model, group, sequences) for group in texts if group]
    P = len(sequences) * k
    nothing = cases[0].o.new_zeros(P, model.config.n_embd)
    taught = [case for case in cases if case.loss(nothing) > case.example.goal]
    if not taught:
        return sequences, nothing
    if has_subjects:
        held_keys = [group.weights.reshape(-1, k) for group in held]
        columns = []
        for case in taught:
            first = sequences.index(case.example.subject) * k
            keys = case.weights[:k, first:first + k]  # more than k span no more directions
            columns += [F.pad(u, (first, P - first - k)) for u in directions(keys, held_keys)]
        basis = torch.stack(columns, dim=1)  # (P, R)
        weights = (HOLD, URGENCY)
    else:
        elsewhere = held[0].weights.mean(0)  # (P,)
        chosen = torch.cat([choose(case, elsewhere) for case in taught])
        basis = torch.eye(P).to(nothing)[:, chosen.unique()]  # (P, R)
        weights = (1, 0)
    if prompts:
        held.append(read(model, prompts, sequences))
    cases = [case.along(basis) for case in cases]
    held = [group.along(basis) for group in held]
    return sequences, basis @ fit(cases, held, *weights, seed)


def learn(model: Backpack, examples: list[Example], background: list[Pair], *,
          written: list[Pair] = (),
          near: list[Example] = (),
          budget: float = 1e-3) -> tuple[Shift, float]:
    """Learn an edit from examples, in up to PASSES passes over them.

    An example moves the senses of its subject or, if it has none, SENSES senses of any of its ids.
    background and written are pairs of ids (context, rest); write_texts makes the second, and
    neighbours_of makes near. Learning tries to preserve the predictions on every second text of
    background, written and near, and inside the prompts. The other texts of background and written
    give two prices, where no subject stands before. The vectors are scaled down, by the factor that
    is also returned, until neither price exceeds budget, a share of the loss.
    Raises UserError if every example has reached its goal, or if no factor keeps to the budget.
    """
    texts = [background[::2], written[::2], [one.texts[0] for one in near[::2]]]
    sequences = []
    vectors = []
    for has_subject in (True, False):
        some = [one for one in examples if bool(one.subject) == has_subject]
        if some:
            found, moves = find_vectors(model, some, texts, inside(examples))
            sequences += found
            vectors.append(moves)
    vectors = torch.cat(vectors)  # (P, d)
    if not vectors.any():
        raise UserError('every example is already fulfilled; there is nothing to learn')
    priced = [cut(group[1::2], examples)[0] for group in (background, written)]
    priced = [read(model, group, sequences) for group in priced if group]
    moved = [group.moved() for group in priced]
    nothing = torch.zeros_like(vectors)
    limits = [
        part.nats(nothing) + budget * group.nats(nothing)
        for part, group in zip(moved, priced)]

    def costs_too_much(factor: float) -> bool:
        scaled = factor * vectors
        is_cheap = [part.nats(scaled) <= limit for part, limit in zip(moved, limits)]
        return not all(is_cheap)

    n_within = bisect_left(FACTORS, True, key=costs_too_much)
    if n_within == 0:
        raise UserError(f'even {FACTORS[0]:.1%} of the edit costs more than {budget:g} of the loss '
                        'on other text; choose a larger budget')
    factor = FACTORS[n_within - 1]
    return make_shift(sequences, factor * vectors), factor
