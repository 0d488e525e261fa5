"""Table 7: how fast a Backpack is, compared with a Transformer of the same shape."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from rucksack.cli import progress
from rucksack.model import GPT, Backpack, Config, DistinctIds, distinct_ids
from rucksack.table import Table
from rucksack.training.machine import Machine, flops_per_token
from rucksack.training.optimizers import make_optimizers

Work = Callable[[], object]


SIZES = {  # the paper's model sizes (section 4.1, Table 9)
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768),
}


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


def alternate(works: list[Work], what: str, budget: float = 30) -> list[float]:
    """Time each function: the median, in ms, of calls in turn after two warm-up rounds.

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
    return [1000 * statistics.median(seconds) for seconds in times]


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Draw ids (batch, length) by Zipf's law, so that they repeat about as they do in text."""
    chances = 1 / torch.arange(1, n_vocab + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(chances, batch * length, replacement=True, generator=generator)
    return ids.view(batch, length)


@torch.no_grad()
def forward_pass(machine: Machine, model: Callable, idx: Tensor) -> Tensor:
    """Compute logits without gradients, in the machine's number format."""
    with machine.autocast():
        return model(idx)


def training_step(machine: Machine, model: Callable, optimizer: Optimizer, *inputs: Tensor
                  ) -> None:
    """Compute a loss in the machine's number format and its gradients, and update the weights."""
    with machine.autocast():
        loss = model(*inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def works_of(model: Backpack | GPT, idx: Tensor, machine: Machine, compile: bool
             ) -> dict[str, Work]:
    """List what to time of a model that reads texts idx (B, T)."""
    compiled = machine.compile if compile else lambda module: module
    inputs = machine.to_device(idx, idx, *distinct_ids(idx))
    optimizer, = make_optimizers(model, 'adamw', 1e-5, 0.1, (0.9, 0.95))
    writer = copy.deepcopy(model).to(getattr(torch, machine.dtype))
    half = idx.shape[1] // 2
    prompt = inputs[0][:1, :half]
    return {
        'forward pass': partial(forward_pass, machine, compiled(model), inputs[0]),
        'training step': partial(
            training_step, machine, compiled(DistinctIds(model)), optimizer, *inputs),
        f'{half} new tokens': partial(writer.generate, prompt, half)}


def timing_table(config: Config, machine: Machine, compile: bool = True) -> Table:
    """Make Table 7: the times of a Backpack and of a Transformer of its shape."""
    length = min(512, config.block_size)
    config = replace(config, dropout=0.0, block_size=length)
    batch = 32 if machine.on_gpu else max(1, 4096 // length)
    idx = text_like(config.n_vocab, batch, length)
    ours = Backpack(config).to(machine.device)
    other = GPT(config).to(machine.device)
    works = works_of(ours, idx, machine, compile)
    works_of_other = works_of(other, idx, machine, compile)
    distinct = len(idx.unique()) / idx.numel()
    operations = flops_per_token(other)
    by_operations = {
        'forward pass': flops_per_token(ours) / operations,
        'training step': flops_per_token(ours, distinct) / operations}
    rows = []
    for what, work in works.items():
        first, second = alternate([work, works_of_other[what]], what)
        rows.append([what, first, second, first / second, by_operations.get(what)])
    how = 'compiled' if compile and machine.can_compile() else 'not compiled'
    title = (f'Time (Table 7): median ms, in turn; {len(idx)} x {length} tokens, '
             f'{config.n_layer} layers of width {config.n_embd}, {config.n_sense} senses, '
             f'{config.n_vocab:,} ids')
    columns = {
        'work': '',
        'Backpack': ',.1f',
        'Transformer': ',.1f',
        'ratio': '.2f',
        'by operations': '.2f'}
    notes = [
        f'{machine.name}, {machine.dtype}, {how}, torch {torch.__version__}.',
        'A training step computes the senses of each distinct id once, a forward pass those of '
        'every token.',
        'By operations: the ratio of floating point operations.']
    return Table(title, columns, rows, notes)
