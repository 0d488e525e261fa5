"""Table 7: how fast a Backpack is, compared with a Transformer of the same shape."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Backpack, Config
from rucksack.common import progress
from rucksack.data import DistinctIds, inputs_of
from rucksack.machine import Machine, flops_per_token
from rucksack.optimizers import make_optimizers
from rucksack.table import Table

Work = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """Two functions to time in turn."""

    what: str
    first: Work
    second: Work
    flops_ratio: float | None  # FLOPs of the first over the second's; None if not comparable
    tokens: int = 1            # tokens that a call makes


def seconds_of(work: Work) -> float:
    """Time one call, with all its work on the device."""
    wait_for_device()
    start = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - start


def wait_for_device() -> None:
    """Wait until a GPU, if there is one, has finished."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def alternate(works: list[Work], what: str, budget: float = 30) -> list[list[float]]:
    """Time each function, in seconds, calling them in turn after two warm-up rounds.

    Each is called 100 times, or as often as fits into a budget of seconds, but at least 3 times.
    """
    for work in works:
        work()
    seconds_of_a_round = sum(seconds_of(work) for work in works)
    n = int(budget / seconds_of_a_round)
    times = [[] for _ in works]
    for _ in progress(range(min(100, max(3, n))), what):
        for work, times_of_work in zip(works, times):
            times_of_work.append(seconds_of(work))
    return times


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Draw ids (batch, length) by Zipf's law, so that they repeat about as they do in text."""
    chances = 1 / torch.arange(1, n_vocab + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(chances, batch * length, replacement=True, generator=generator)
    return ids.view(batch, length)


@torch.no_grad()
def forward_pass(machine: Machine, function: Callable, *inputs: Tensor) -> Tensor:
    """Call a function without gradients, in the machine's number format."""
    with machine.autocast():
        return function(*inputs)


def training_step(machine: Machine, loss: Callable, optimizer, *inputs: Tensor) -> Tensor:
    """Compute a loss in the machine's number format and its gradients, and update the weights."""
    with machine.autocast():
        value = loss(*inputs)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def comparisons(ours: Backpack, other: Backpack, idx: Tensor, machine: Machine,
                compiled: Callable) -> list[Comparison]:
    """List the comparisons to time for a Backpack and a Transformer, on texts idx (B, T)."""
    inputs = inputs_of(idx, idx, machine.device)
    idx, targets, distinct, place = inputs

    def with_all_senses(idx):
        return ours(idx, C=ours.sense_network(ours.wte(idx)))

    def with_distinct_senses(idx, distinct, place):
        return ours(idx, C=ours.senses_at(distinct, place))

    def plain_loss(idx, targets):
        return F.cross_entropy(other(idx).flatten(0, 1), targets.flatten())

    def pass_of(function, *inputs):
        return partial(forward_pass, machine, compiled(function), *inputs)

    def step_of(model, loss, *inputs):
        optimizer, = make_optimizers(model, 'adamw', 1e-5, 0.1, (0.9, 0.95))
        return partial(training_step, machine, compiled(loss), optimizer, *inputs)

    operations = flops_per_token(other)
    with_all = flops_per_token(ours) / operations
    with_distinct = flops_per_token(ours, idx.unique().numel() / idx.numel()) / operations
    forward = pass_of(lambda idx: other(idx), idx)
    step = step_of(other, DistinctIds(other), *inputs)
    return [
        Comparison('forward pass, the senses of every token / Transformer',
                   pass_of(with_all_senses, idx), forward, with_all),
        Comparison('forward pass, of distinct ids / Transformer',
                   pass_of(with_distinct_senses, idx, distinct, place), forward, with_distinct),
        Comparison('training step / Transformer',
                   step_of(ours, DistinctIds(ours), *inputs), step, with_distinct),
        Comparison('training step of the Transformer / unoptimised',
                   step, step_of(other, plain_loss, idx, targets), 1.0),
        new_token(ours, other, idx, machine)]


def new_token(ours: Backpack, other: Backpack, idx: Tensor, machine: Machine) -> Comparison:
    """Generate after the first half of a text, with weights in the machine's number format."""
    half = idx.shape[1] // 2
    n = idx.shape[1] - half
    writers = []
    for model in (ours, other):
        model = copy.deepcopy(model).to(getattr(torch, machine.dtype))
        writers.append(partial(model.generate, idx[:1, :half], n))
    what = f'a new token after {half} or more / Transformer'
    return Comparison(what, *writers, None, tokens=n)


def timing_table(config: Config, machine: Machine, compile: bool = True) -> Table:
    """Make Table 7: a Backpack and a Transformer of its shape, which is also timed unoptimised."""
    length = min(512, config.block_size)
    config = replace(config, dropout=0.0, block_size=length)
    compiled = machine.compile if compile else lambda function: function
    batch = 32 if machine.on_gpu else max(1, 4096 // length)
    ours = Backpack(config).to(machine.device, machine.weight_dtype)
    other = Backpack(replace(config, n_sense=0)).to(machine.device, machine.weight_dtype)
    idx = text_like(config.n_vocab, batch, length)
    rows = []
    for pair in comparisons(ours, other, idx, machine, compiled):
        times = alternate([pair.first, pair.second], pair.what)
        first, second = (1000 * statistics.median(seconds) / pair.tokens for seconds in times)
        rows.append([pair.what, first, second, first / second, pair.flops_ratio])
    how = 'compiled' if compile and machine.can_compile() else 'not compiled'
    title = (f'Time (Table 7): median ms, in turn; {len(idx)} x {length} tokens, '
             f'{config.n_layer} layers of width {config.n_embd}, {config.n_sense} senses, '
             f'{config.n_vocab:,} ids')
    columns = {
        '': '',
        'first': ',.1f',
        'second': ',.1f',
        'ratio': '.2f',
        'by operations': '.2f'}
    notes = [
        f'{machine.name}, {machine.dtype} ({machine.why}), {how}, torch {torch.__version__}.',
        'The paper times the senses of every token. By operations: the ratio of floating point '
        'operations.']
    return Table(title, columns, rows, notes)
