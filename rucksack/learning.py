"""Learn an edit from examples: which senses of which words to move, and by which vectors.

Method: Hewitt, Chen, Xie, Adams, Liang, Manning 2024, "Model Editing with Canonical Examples",
https://arxiv.org/abs/2402.06155

An example is a prompt and a text to make likelier, or less likely, after it. Each example chooses a
few senses of its words, and gradient steps find a vector to add to each of them. Nothing else in
the model changes: not even alpha, because it does not depend on the senses (Eq. 12). So the
Transformer reads each text only once. If delta is added to sense l of id v, o_i moves by w_i delta:

    o_i' = o_i + w_i delta,  w_i = sum of alpha_lij over the positions j where x_j = v    Eq. 2
    logits_i' = o_i' E^T                                                                 Eq. 9

With these two lines, a step computes the losses of some examples, and how far predictions move
where nothing should change: on a background of other text, on texts that the model itself writes
from the examples, and inside the prompts.

P counts the pairs (id, sense) that move, N the scored positions of all texts, n of one text.
Other letters are as in model.py.
"""

import hashlib
import json
import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from tiktoken import Encoding
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import progress
from rucksack.errors import UserError, user_errors
from rucksack.examples import Example, loss_limit
from rucksack.fast import Cached
from rucksack.files import atomic
from rucksack.model import Backpack, weighted_sum
from rucksack.senses import Edit, add_to_senses, occurrences

EXAMPLES_AT_ONCE = 5    # in a step, as published
POSITIONS_AT_ONCE = 64  # per group of held texts; their logits are (positions, V)
PENALTY = 3000          # for choosing a sense to which other text gives weight
WRITTEN = 32            # texts that the model writes
WRITTEN_LENGTH = 128    # tokens in each
RATE = 5.12             # RATE / d is the learning rate: a step moves logits equally at any d
FACTORS = [i / 64 for i in range(1, 65)]  # choices for scaling the vectors back

# Losses per token of the longer continuation, in nats. A loss at ENOUGH falls no further.
# Learning may end where p(A) is 1/2, the odds are 1.1 to 1, or the loss is at ENOUGH.
ENOUGH = {
    'more': 0.0,
    'equal': 0.0,
    'less': math.log(1e-4),
    'order': -math.log(100)}
ASKED = {**ENOUGH, 'more': math.log(2), 'equal': math.log(1.1)}

Pair = tuple[list[int], list[int]]  # ids of a context, and of what follows; neither is empty


@dataclass(frozen=True)
class Shift:
    """A learned edit as data: vectors (P, d) to add to the senses numbers (P,) of ids (P,)."""

    ids: Tensor
    numbers: Tensor
    vectors: Tensor

    def edit(self, factor: float = 1.0) -> Edit:
        """Make the edit that adds these vectors, times a factor; 0 changes nothing."""
        return add_to_senses(self.ids, self.numbers, factor * self.vectors)


# -----------------------------------------------------------------------------
# Traces: what the Transformer finds in a text.


@dataclass(frozen=True)
class Trace:
    """What a model finds in a text (T,) with m distinct ids, at the last n positions."""

    targets: Tensor  # (n,), the ids that follow these positions
    o: Tensor        # (n, d), Eq. 2, before any sense moves
    ids: Tensor      # (m,), the distinct ids
    weights: Tensor  # (n, k, m), the sum of alpha over the positions of each id, for each sense


@torch.no_grad()
def trace(model: Backpack, context: list[int], continuation: list[int]) -> Trace:
    """Read a context, and the n ids that should follow it, in one pass."""
    n = len(continuation)
    text = torch.tensor(context + continuation, device=model.wte.weight.device)  # (T + 1,)
    idx = text[None, :-1]  # (1, T)
    alpha = model.alpha(idx)[:, :, -n:]  # (1, k, n, T)
    o = weighted_sum(alpha, model.senses(idx))  # (1, n, d)
    ids, places = idx[0].unique(return_inverse=True)  # (m,) and (T,)
    is_at = F.one_hot(places).to(alpha)  # (T, m)
    weights = alpha[0] @ is_at  # (k, n, m), summed over the positions of each id
    return Trace(text[-n:], o[0], ids, weights.transpose(0, 1))


@dataclass(frozen=True)
class Positions:
    """N positions of some texts: what P moved senses change there, and what should follow."""

    targets: Tensor  # (N,)
    o: Tensor        # (N, d)
    weights: Tensor  # (N, P)

    def at(self, some: Tensor) -> 'Positions':
        """Choose some positions, given their indices (n,)."""
        return Positions(self.targets[some], self.o[some], self.weights[some])

    def logits(self, model: Backpack, vectors: Tensor) -> Tensor:
        """Compute the logits (N, V) with the senses moved by vectors (P, d)."""
        E = model.wte.weight.detach()[:model.config.n_vocab]  # (V, d), which does not learn
        o = self.o + self.weights @ vectors  # (N, d), Eq. 2
        return o @ E.T  # (N, V), Eq. 9

    def nats(self, model: Backpack, vectors: Tensor) -> Tensor:
        """Compute -log p(target) at each position (N,), with the senses moved by vectors (P, d)."""
        return F.cross_entropy(self.logits(model, vectors), self.targets, reduction='none')


def positions_of(traces: list[Trace], pairs: Tensor) -> Positions:
    """Combine the positions of all traces, for the pairs (id, sense) to move, (P, 2)."""
    ids, numbers = pairs.T  # (P,) each
    weights = []
    for one in traces:
        is_id = one.ids[:, None] == ids  # (m, P)
        rows = is_id.int().argmax(0)  # (P,), where each id is among the m
        found = one.weights[:, numbers, rows]  # (n, P)
        weights.append(found * is_id.any(0))  # 0 for an id that does not occur
    return Positions(
        targets=torch.cat([one.targets for one in traces]),
        o=torch.cat([one.o for one in traces]),
        weights=torch.cat(weights))


# -----------------------------------------------------------------------------
# Learning.


def trace_example(model: Backpack, example: Example) -> list[Trace]:
    """Read the prompt with each of its continuations."""
    continuations = [example.likelier, example.less_likely]
    return [trace(model, example.prompt, ids) for ids in continuations if ids]


def loss_of(model: Backpack, example: Example, positions: Positions, vectors: Tensor) -> Tensor:
    """Compute log p(less_likely) - log p(likelier), or the one that exists, in nats: a scalar.

    For equal, it is the absolute difference. The loss stops falling once the example is satisfied,
    because it would otherwise ask for ever larger odds.
    """
    nats = positions.nats(model, vectors)  # (n,), of likelier and then of less_likely
    n = len(example.likelier)
    loss = nats[:n].sum() - nats[n:].sum()
    if example.wish == 'equal':
        loss = loss.abs()
    return loss.clamp(min=example.n_tokens * ENOUGH[example.wish])


def asked(example: Example) -> float:
    """Return the loss, in nats, at which an example is fulfilled and learning from it may end."""
    loss = example.n_tokens * ASKED[example.wish] + 1e-4  # allows for rounding
    return min(loss, loss_limit(example.wish))


def divergence(model: Backpack, positions: Positions, vectors: Tensor) -> Tensor:
    """Average KL(p || q) over positions, p from the model and q from the edited one: a scalar."""
    edited = positions.logits(model, vectors).log_softmax(-1)  # (N, V)
    unedited = positions.logits(model, torch.zeros_like(vectors)).log_softmax(-1)
    return F.kl_div(edited, unedited, log_target=True, reduction='batchmean')


@torch.no_grad()
def mean_nats(model: Backpack, positions: Positions, vectors: Tensor) -> float:
    """Average -log p(target) over all positions, with the senses moved, in nats per token."""
    everything = torch.arange(len(positions.targets))
    nats = [positions.at(some).nats(model, vectors)
            for some in everything.split(POSITIONS_AT_ONCE)]
    return torch.cat(nats).mean().item()


def choose(model: Backpack, examples: list[Example], traces: list[list[Trace]],
           background: list[Trace], n: int) -> Tensor:
    """Choose n pairs (id, sense) for each example from its texts: (P, 2).

    A pair scores what moving its sense does for the example (the norm of the loss's gradient with
    respect to its vector) minus PENALTY times what it does elsewhere (the mean weight that
    background positions give to the sense). Norms are about 1, mean weights up to 0.02, so one
    occurrence in thousands of tokens can decide. (The paper scores the weight that the continuation
    gives to the sense, not the gradient.) An example whose loss cannot fall chooses none.
    """
    c = model.config
    elsewhere = model.wte.weight.new_zeros(c.n_vocab, c.n_sense)  # (V, k)
    for one in background:
        elsewhere[one.ids] += one.weights.sum(0).T  # (m, k)
    elsewhere /= sum(len(one.targets) for one in background)
    chosen = []
    for example, of_example in zip(examples, traces):
        ids = torch.cat([one.ids for one in of_example]).unique()  # (m,)
        pairs = torch.cartesian_prod(ids, torch.arange(c.n_sense, device=ids.device))  # (m * k, 2)
        vectors = elsewhere.new_zeros(len(pairs), c.n_embd, requires_grad=True)
        loss = loss_of(model, example, positions_of(of_example, pairs), vectors)
        gradients, = torch.autograd.grad(loss, vectors)  # (m * k, d)
        lengths = gradients.norm(dim=1)  # (m * k,), 0 once the wish is fulfilled
        scores = lengths - PENALTY * elsewhere[ids].flatten()
        scores[lengths == 0] = -math.inf
        best = scores.topk(min(n, lengths.count_nonzero().item())).indices
        chosen.append(pairs[best])
    return torch.cat(chosen).unique(dim=0)


def batches(n: int, steps: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw the examples of each step from n, each once per pass: (EXAMPLES_AT_ONCE,) each."""
    size = min(n, EXAMPLES_AT_ONCE)
    passes = math.ceil(steps * size / n)
    orders = [torch.randperm(n, generator=generator) for _ in range(passes)]
    return torch.cat(orders)[:steps * size].split(size)


def fit(model: Backpack, examples: list[Example], cases: list[Positions],
        held: list[Positions], steps: int, lr: float, seed: int,
        early: bool = False) -> Tensor:
    """Find vectors (P, d) that lower the losses of examples and preserve other predictions.

    cases are the positions of each example. held are groups of positions whose predictions should
    stay; all groups count equally. With early, learning ends once every example was satisfied the
    last time it was drawn. Adam's betas are as published, and the rate falls along a cosine.
    """
    P = held[0].weights.shape[1]
    vectors = held[0].o.new_zeros(P, model.config.n_embd, requires_grad=True)
    optimizer = torch.optim.Adam([vectors], lr, betas=(0.9, 0.995))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for one in held:
        can_change = one.weights.any(1)  # (N,); the divergence of other positions is always 0
        if can_change.any():
            share = can_change.float().mean()  # because we average over all positions
            groups.append((one.at(can_change), share))
    limits = torch.tensor([asked(one) for one in examples])
    latest = torch.full_like(limits, math.inf)  # the loss of each example when it was last drawn
    for batch in progress(batches(len(examples), steps, generator), 'steps'):
        losses = torch.stack(
            [loss_of(model, examples[i], cases[i], vectors) for i in batch])
        latest[batch] = losses.detach().float().cpu()
        if early and (latest <= limits).all():
            break
        loss = losses.mean()
        for one, share in groups:
            some = torch.randint(len(one.o), (POSITIONS_AT_ONCE,), generator=generator)
            loss = loss + share * divergence(model, one.at(some), vectors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return vectors.detach()


# -----------------------------------------------------------------------------
# Texts that the model writes.


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
        ids = [eot, eot, *one.prompt, *(one.likelier or one.less_likely)]
        starts += [ids[i:i + 3] for i in range(len(ids) - 2)]
    starts = random.Random(seed).choices(starts, k=WRITTEN)
    idx = torch.tensor(starts, device=model.wte.weight.device)  # (WRITTEN, 3)
    torch.manual_seed(seed)
    idx = Cached(model).generate(idx, n)  # (WRITTEN, 3 + n)
    prompts = [tuple(one.prompt) for one in examples]
    is_end = occurrences(idx, prompts)[:, 2:, 0, 0]  # (WRITTEN, 1 + n), from the end of a start
    n_held = (is_end.cumsum(1) == 0).sum(1)  # (WRITTEN,), up to the first end of a prompt
    return [(ids[:3], ids[3:3 + n])
            for ids, n in zip(idx.tolist(), n_held.tolist()) if n > 0]


# -----------------------------------------------------------------------------
# An edit from examples.


@dataclass(frozen=True)
class Learned:
    """A shift, and its price on the half of the background that learning did not use."""

    shift: Shift
    steps: int     # maximum
    lr: float      # peak learning rate
    within: float  # largest factor of the learned vectors that the budget allows
    factor: float  # the one used: shift.vectors are already multiplied by it
    loss: float    # nats per token without the edit
    price: float   # nats per token that the edit adds


def inside(examples: list[Example]) -> list[Pair]:
    """Take the prompts of examples as pairs: the first token, and the rest."""
    return [(one.prompt[:1], one.prompt[1:])
            for one in examples if len(one.prompt) > 1]


def learn(model: Backpack, examples: list[Example], background: list[list[int]], *,
          written: list[Pair] = (),
          keep: list[Example] = (),
          n_senses: int = 9,
          steps: int | None = None,
          lr: float | None = None,
          budget: float = 1e-3,
          seed: int = 0) -> Learned:
    """Learn an edit from examples in up to `steps` steps (default: ten passes, at least 30).

    Each example chooses n_senses pairs (id, sense) to move. background has texts of 2 to
    block_size + 1 ids, and written has texts from write_texts. Learning tries to preserve the
    predictions on every second text of background and of written, inside the prompts, and after
    the prompts of keep. The other texts give two prices. The vectors are scaled back until neither
    price exceeds budget, a share of the loss, and then to the smallest factor that fulfils the same
    examples.
    Raises UserError if a vector is not finite, or if even the smallest factor exceeds the budget.
    """
    if steps is None:
        steps = max(30, math.ceil(10 * len(examples) / EXAMPLES_AT_ONCE))
    if lr is None:
        lr = RATE / model.config.n_embd
    traces = [trace_example(model, example) for example in progress(examples, 'examples')]
    texts = [trace(model, ids[:1], ids[1:]) for ids in progress(background, 'background')]
    written_texts = [trace(model, *pair) for pair in written]
    prompts = [trace(model, *pair) for pair in inside(examples)]
    kept = [one for example in keep for one in trace_example(model, example)]
    pairs = choose(model, examples, traces, texts[::2], n_senses)  # (P, 2)
    cases = [positions_of(of_example, pairs) for of_example in traces]
    nothing = model.wte.weight.new_zeros(len(pairs), model.config.n_embd)
    if all(loss_of(model, one, case, nothing) <= asked(one) for one, case in zip(examples, cases)):
        raise UserError('every example is already fulfilled; there is nothing to learn')
    held = [positions_of(group, pairs)
            for group in (texts[::2], written_texts[::2], prompts, kept) if group]
    vectors = fit(model, examples, cases, held, steps, lr, seed, early=True)
    if not vectors.isfinite().all():
        raise UserError(f'a vector is not finite after {steps} steps with lr={lr:g}; '
                        'choose a lower lr')
    priced = [positions_of(group, pairs)
              for group in (texts[1::2], written_texts[1::2]) if group]
    within, factor = scale_back(model, examples, cases, priced, vectors, budget)
    shift = Shift(*pairs.T, factor * vectors)
    loss = mean_nats(model, priced[0], 0 * vectors)
    price = mean_nats(model, priced[0], shift.vectors) - loss
    return Learned(shift, steps, lr, within, factor, loss, price)


@torch.no_grad()
def scale_back(model: Backpack, examples: list[Example], cases: list[Positions],
               priced: list[Positions], vectors: Tensor, budget: float
               ) -> tuple[float, float]:
    """Find the largest factor within the budget, and the smallest that reaches the same limits.

    A loss has two limits: the one that learning asks for, and the one that counts as fulfilled. If
    the vectors reach no new limit, both factors are the same. They come from a bisection of
    FACTORS, which assumes that prices grow with the factor and losses fall. Raises UserError if
    every factor costs more than budget, a share of the loss.
    """
    unedited = [mean_nats(model, one, 0 * vectors) for one in priced]

    def costs_too_much(factor: float) -> bool:
        edited = [mean_nats(model, one, factor * vectors) for one in priced]
        return any(nats / loss - 1 > budget for nats, loss in zip(edited, unedited))

    n = bisect_left(FACTORS, True, key=costs_too_much)  # the number within the budget
    if n == 0:
        raise UserError(f'even {FACTORS[0]:.1%} of the edit costs more than {budget:g} of the loss '
                        'on other text; choose a larger budget, a lower lr or fewer steps')
    within = FACTORS[n - 1]
    limits = torch.tensor(
        [[asked(one), loss_limit(one.wish)] for one in examples])  # (examples, 2)

    def reached(factor: float) -> Tensor:
        losses = [loss_of(model, one, case, factor * vectors).item()
                  for one, case in zip(examples, cases)]
        return torch.tensor(losses)[:, None] <= limits  # (examples, 2)

    wanted = reached(within)

    def fulfils(factor: float) -> bool:
        return reached(factor)[wanted].all().item()

    if fulfils(0.0):
        return within, within
    return within, FACTORS[bisect_left(FACTORS, True, hi=n - 1, key=fulfils)]


# -----------------------------------------------------------------------------
# Files.


def fingerprint(model: Backpack, encoding: Encoding) -> str:
    """Return a checksum of the vocabulary and all parameters."""
    V = model.config.n_vocab
    digest = hashlib.sha256(encoding.decode_bytes(range(V)))
    for name, parameter in sorted(model.state_dict().items()):
        rows = parameter[:V] if name == 'wte.weight' else parameter  # the rest is padding
        digest.update(rows.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save_shift(path: Path, shift: Shift, model: Backpack, encoding: Encoding, about: dict
               ) -> None:
    """Write a learned edit to a .safetensors file, with what it was learned from (about)."""
    tensors = {name: tensor.cpu().contiguous()
               for name, tensor in vars(shift).items()}
    metadata = {
        'model': fingerprint(model, encoding),
        'about': json.dumps(about)}
    with atomic(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


def lines_of_shift(path: str | Path) -> list[str]:
    """List the lines that an edit was learned from; raises KeyError or similar if it has none."""
    with safe_open(path, 'pt') as file:
        return json.loads(file.metadata()['about'])['examples']


def load_shift(path: str | Path, model: Backpack, encoding: Encoding) -> Shift:
    """Read a learned edit; raises UserError if path has none, or has one for another model."""
    with user_errors(path, 'it must be a file that edit.py wrote'):
        with safe_open(path, 'pt', str(model.wte.weight.device)) as file:
            if file.metadata()['model'] != fingerprint(model, encoding):
                raise UserError('it was learned for a model with other parameters or another '
                                'vocabulary; learn it again with edit.py')
            shift = Shift(*map(file.get_tensor, ('ids', 'numbers', 'vectors')))
        shape = (len(shift.ids), model.config.n_embd)
        if shift.vectors.shape != shape or (shift.numbers < 0).any():
            raise ValueError('it lacks the vector of a sense, or has a negative sense number')
        idx = shift.ids[None]  # (1, P)
        moved = shift.edit()(idx, model.senses(idx))
        if not moved.isfinite().all():
            raise ValueError('a vector is not finite')
    return shift
