"""Learn an edit from examples: which senses of which words to move, and by which vectors.

Method: Hewitt, Chen, Xie, Adams, Liang, Manning 2024, "Model Editing with Canonical Examples",
https://arxiv.org/abs/2402.06155

An example is a prompt and what should be likelier after it, or less likely. Each example chooses a
few senses of its words, and gradient steps find a vector to add to each of them. Nothing else of
the model changes. Above all, alpha does not, as it does not depend on the senses (Eq. 12). So the
Transformer reads each text once. If delta is added to sense l of the id v, o_i moves by w_i delta:

    o_i' = o_i + w_i delta,  w_i = sum of alpha_lij over the positions j where x_j = v    Eq. 2
    logits_i' = o_i' E^T                                                                 Eq. 9

With these two lines, a step computes the losses of some examples, and how far the predictions on
the background move: other text, on which nothing should change.

P counts the pairs (id, sense) that move, N the scored positions of all texts, n those of one text.
Other letters are as in model.py.
"""

import hashlib
import json
import math
from collections.abc import Callable
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
from rucksack.examples import Example
from rucksack.files import atomic
from rucksack.model import Backpack, weighted_sum
from rucksack.senses import Edit, add_to_senses

EXAMPLES_AT_ONCE = 5    # in a step, as published
POSITIONS_AT_ONCE = 64  # of the background, whose logits are (positions, V)
PENALTY = 3000          # in choosing senses, for the weight that other text gives them
ENOUGH = {  # the loss at which a wish is fulfilled, for each token of the longer continuation
    'more': 0.0, 'equal': 0.0, 'less': math.log(1e-4), 'order': -math.log(100)}
RATE = 5.12             # over d it is the learning rate: a step then moves logits alike at any d


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

    idx: Tensor      # (T,)
    targets: Tensor  # (n,), the ids that follow these positions
    o: Tensor        # (n, d), Eq. 2, before any sense moves
    ids: Tensor      # (m,), the distinct ids
    weights: Tensor  # (n, k, m), the sum of alpha over the positions of each id, for each sense


@torch.no_grad()
def trace(model: Backpack, context: list[int], continuation: list[int]) -> Trace:
    """Read a context and the n ids that should follow it, once."""
    n = len(continuation)
    text = torch.tensor(context + continuation, device=model.wte.weight.device)  # (T + 1,)
    idx = text[None, :-1]  # (1, T)
    alpha = model.alpha(idx)[:, :, -n:]  # (1, k, n, T)
    o = weighted_sum(alpha, model.senses(idx))  # (1, n, d)
    ids, places = idx[0].unique(return_inverse=True)  # (m,) and (T,)
    is_at = F.one_hot(places).to(alpha)  # (T, m)
    weights = alpha[0] @ is_at  # (k, n, m), summed over the positions of each id
    return Trace(idx[0], text[-n:], o[0], ids, weights.transpose(0, 1))


@dataclass(frozen=True)
class Positions:
    """N positions of some texts: what P moved senses change there, and what should follow."""

    targets: Tensor  # (N,)
    o: Tensor        # (N, d)
    weights: Tensor  # (N, P)

    def at(self, some: Tensor) -> 'Positions':
        """Choose the positions numbered some (n,)."""
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
    """Put the positions of all traces together, for the pairs (id, sense) to move, (P, 2)."""
    ids, numbers = pairs.T  # (P,) each
    weights = []
    for one in traces:
        is_id = one.ids[:, None] == ids  # (m, P)
        places = is_id.int().argmax(0)  # (P,), 0 for an id that does not occur
        weights.append(one.weights[:, numbers, places] * is_id.any(0))  # (n, P)
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
    """Compute log p(less_likely) - log p(likelier), of those there are, in nats: a scalar.

    For equals, it is the size of the difference. The loss ends where the example is fulfilled, as
    it would otherwise ask for ever larger odds.
    """
    nats = positions.nats(model, vectors)  # (n,), of likelier and then of less_likely
    n = len(example.likelier)
    loss = nats[:n].sum() - nats[n:].sum()
    if example.are_equals:
        loss = loss.abs()
    return loss.clamp(min=end_of(example))


def end_of(example: Example) -> float:
    """Return the loss at which an example is fulfilled, in nats."""
    n_tokens = max(len(example.likelier), len(example.less_likely))
    return n_tokens * ENOUGH[example.wish]


def divergence(model: Backpack, positions: Positions, vectors: Tensor) -> Tensor:
    """Average KL(p || q) over positions, p by the model and q by the edited model: a scalar."""
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
    """Choose n pairs (id, sense) for each example, of those in its texts: (P, 2).

    The score of a pair is what moving its sense does for the example, the length of the gradient of
    the loss with respect to its vector, less PENALTY times what it does elsewhere, the mean weight
    that a position of the background gives to the sense. Lengths are about 1, mean weights up to
    0.02: one occurrence in thousands of tokens can decide. (Published: the weight that the
    continuation gives to the sense, in place of the gradient.) A fulfilled example chooses none.
    """
    c = model.config
    elsewhere = torch.zeros(c.n_vocab, c.n_sense, device=model.wte.weight.device)  # (V, k)
    for one in background:
        elsewhere[one.ids] += one.weights.sum(0).T  # (m, k)
    elsewhere /= sum(len(one.targets) for one in background)
    chosen = []
    for example, of_example in zip(examples, traces):
        ids = torch.cat([one.ids for one in of_example]).unique()  # (m,)
        pairs = torch.cartesian_prod(ids, torch.arange(c.n_sense, device=ids.device))  # (m * k, 2)
        vectors = torch.zeros(len(pairs), c.n_embd, device=ids.device, requires_grad=True)
        loss = loss_of(model, example, positions_of(of_example, pairs), vectors)
        gradients, = torch.autograd.grad(loss, vectors)  # (m * k, d)
        lengths = gradients.norm(dim=1)  # (m * k,), 0 once the wish is fulfilled
        scores = lengths - PENALTY * elsewhere[ids].flatten()
        scores[lengths == 0] = -math.inf
        best = scores.topk(min(n, lengths.count_nonzero().item())).indices
        chosen.append(pairs[best])
    return torch.cat(chosen).unique(dim=0)


def batches(n: int, steps: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw the examples of each step out of n, each once in a pass: (EXAMPLES_AT_ONCE,) each."""
    size = min(n, EXAMPLES_AT_ONCE)
    passes = math.ceil(steps * size / n)
    order = torch.cat([torch.randperm(n, generator=generator) for _ in range(passes)])
    return order[:steps * size].split(size)


def fit(model: Backpack, examples: list[Example], cases: list[Positions], held: Positions,
        steps: int, lr: float, seed: int) -> Tensor:
    """Find vectors (P, d) that lower the losses of examples and keep other predictions.

    cases are the positions of each example, held those of the background. Adam's betas are as
    published, and the rate falls along a cosine.
    """
    P = held.weights.shape[1]
    vectors = torch.zeros(P, model.config.n_embd, device=held.o.device, requires_grad=True)
    optimizer = torch.optim.Adam([vectors], lr, betas=(0.9, 0.995))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    can_change = held.weights.any(1)  # (N,); elsewhere the divergence is 0, and no draw is spent
    held = held.at(can_change)
    share = can_change.float().mean()
    for batch in progress(batches(len(examples), steps, generator), 'steps'):
        losses = [loss_of(model, examples[i], cases[i], vectors) for i in batch]
        loss = torch.stack(losses).mean()
        if len(held.o):
            some = torch.randint(len(held.o), (POSITIONS_AT_ONCE,), generator=generator)
            loss = loss + share * divergence(model, held.at(some), vectors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return vectors.detach()


@dataclass(frozen=True)
class Learned:
    """A shift, and its price on text that is none of the examples."""

    shift: Shift
    steps: int
    lr: float       # peak learning rate
    factor: float   # by which the vectors were scaled back to the budget
    loss: float     # of that text, in nats per token, without the edit
    price: float    # what the edit adds to it
    n_tokens: int   # of that text
    n_touched: int  # those that have a moved sense


def learn(model: Backpack, examples: list[Example], background: list[list[int]], *,
          n_senses: int = 9, steps: int | None = None, lr: float | None = None,
          budget: float = 1e-3, seed: int = 0) -> Learned:
    """Learn an edit from examples, in steps (default: ten passes, at least 30) at the rate lr.

    Each example chooses n_senses pairs (id, sense) to move. background are texts of 2 to
    block_size + 1 ids. Every other one holds the model: its predictions should stay. The rest give
    the price. An edit that costs more than budget, a share of their loss, is scaled back.
    UserError if a vector is not finite, or if nothing of the edit keeps to the budget.
    """
    if steps is None:
        steps = max(30, math.ceil(10 * len(examples) / EXAMPLES_AT_ONCE))
    if lr is None:
        lr = RATE / model.config.n_embd
    traces = [trace_example(model, example) for example in progress(examples, 'examples')]
    texts = [trace(model, ids[:1], ids[1:]) for ids in progress(background, 'background')]
    held = texts[::2]
    others = texts[1::2]
    pairs = choose(model, examples, traces, held, n_senses)  # (P, 2)
    if not len(pairs):
        raise UserError('every example is fulfilled already; there is nothing to learn')
    cases = [positions_of(of_example, pairs) for of_example in traces]
    vectors = fit(model, examples, cases, positions_of(held, pairs), steps, lr, seed)
    if not vectors.isfinite().all():
        raise UserError(f'a vector is not finite after {steps} steps at the rate {lr:g}; '
                        'choose a lower rate')

    priced = positions_of(others, pairs)
    loss = mean_nats(model, priced, 0 * vectors)

    def price(factor: float) -> float:
        return mean_nats(model, priced, factor * vectors) - loss

    factor = largest_factor(lambda factor: price(factor) <= budget * loss)
    if factor == 0:
        raise UserError(f'even 1/64 of the edit costs more than {budget:g} of the loss on the '
                        'background; choose a larger budget, a lower rate or fewer steps')
    ids, numbers = pairs.T
    idx = torch.cat([one.idx for one in others])
    n_touched = torch.isin(idx, ids).sum().item()
    shift = Shift(ids, numbers, factor * vectors)
    return Learned(shift, steps, lr, factor, loss, price(factor), len(idx), n_touched)


def largest_factor(is_within: Callable[[float], bool]) -> float:
    """Find 1, or the largest multiple of 1/64 within the budget if the price grows with it."""
    if is_within(1.0):
        return 1.0
    factor = 0.0
    step = 0.5
    for _ in range(6):
        if is_within(factor + step):
            factor += step
        step /= 2
    return factor


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


def save_shift(path: Path, shift: Shift, model: Backpack, encoding: Encoding, about: dict) -> None:
    """Write a learned edit to a .safetensors file, with what it was learned from (about)."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in vars(shift).items()}
    metadata = {'model': fingerprint(model, encoding), 'about': json.dumps(about)}
    with atomic(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


def lines_of_shift(path: str | Path) -> list[str]:
    """List the lines that an edit was learned from; KeyError or the like for other files."""
    with safe_open(path, 'pt') as file:
        return json.loads(file.metadata()['about'])['examples']


def load_shift(path: str | Path, model: Backpack, encoding: Encoding) -> Shift:
    """Read a learned edit; UserError if it is for another model, or no such file."""
    device = model.wte.weight.device
    with user_errors(path, 'it must be a file that edit.py wrote'):
        with safe_open(path, 'pt', str(device)) as file:
            made_for = file.metadata()['model']
            shift = Shift(*map(file.get_tensor, ('ids', 'numbers', 'vectors')))
        d = model.config.n_embd
        if shift.vectors.shape != (len(shift.ids), d) or (shift.numbers < 0).any():
            raise ValueError(f'it has a vector that is not of width {d}, or a sense below 0')
        idx = shift.ids[None]  # (1, P)
        moved = shift.edit()(idx, model.senses(idx))
        if not moved.isfinite().all():
            raise ValueError('a vector is not finite')
    if made_for != fingerprint(model, encoding):
        raise UserError(f'{path} was learned for a model with other parameters or another '
                        'vocabulary; learn it again with edit.py')
    return shift
