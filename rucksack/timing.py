"""Table 7: a Backpack's time beside that of a Transformer of its shape."""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model import SIZES, Backpack, Config, SenseTable
from rucksack.common import progress
from rucksack.data import DistinctIds, inputs_of
from rucksack.machine import Machine, find_machine, flops_per_token
from rucksack.table import Subject, Table


def alternate(works: list[Callable[[], object]], device: str, what: str, budget: float = 30) -> list[tuple]:
    """Seconds that each function takes, called in turn after two calls to warm up: 100 times, or as often as
    fits into a budget of seconds, but at least 3 times.
    """
    wait = {'cuda': torch.cuda.synchronize, 'mps': torch.mps.synchronize}.get(device.split(':')[0], int)

    def seconds(work: Callable[[], object]) -> float:
        """Of one call, all of the device's part included."""
        wait()
        start = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - start

    for work in works:
        work()
    n = min(100, max(3, int(budget / sum(map(seconds, works)))))
    return list(zip(*([seconds(work) for work in works] for _ in progress(range(n), what))))


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Ids (batch, length) drawn by Zipf's law, so that they repeat about as they do in text."""
    chances, fixed = 1 / torch.arange(1, n_vocab + 1), torch.Generator().manual_seed(0)
    return torch.multinomial(chances, batch * length, True, generator=fixed).view(batch, length)


@torch.no_grad()
def forward_pass(machine: Machine, function: Callable, *inputs: Tensor) -> None:
    """A function without gradients, in the number format of the machine."""
    with machine.autocast():
        function(*inputs)


def training_step(machine: Machine, loss: Callable, optimizer, *inputs: Tensor) -> None:
    """The loss of inputs in the number format of the machine, its gradients, and the update."""
    with machine.autocast():
        value = loss(*inputs)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def pairs_to_time(models: list[Backpack], idx: Tensor, machine: Machine, compiled: Callable) -> list[tuple]:
    """What to time of a Backpack and a Transformer on texts idx (B, T): a name, two functions, how many
    tokens each of them makes (1: a whole pass), and the ratio of their operations, where it says much.
    """
    (ours, other), length, half = models, idx.shape[1], idx.shape[1] // 2
    idx, targets, distinct, place = inputs = inputs_of(idx, idx, machine.device)
    flops = [flops_per_token(ours, n / idx.numel()) / flops_per_token(other)
             for n in (idx.numel(), idx.unique().numel(), 0)]
    table = SenseTable(ours, torch.bfloat16)
    optimizers = [m.optimizers('adamw', 1e-5, 0.1, (0.9, 0.95))[0] for m in models]
    every, some, none, plain = (partial(forward_pass, machine, compiled(f), *args) for f, *args in (
        (lambda idx: ours(idx, C=ours.sense_network(ours.wte(idx))), idx),
        (lambda idx, ids, place: ours(idx, C=ours.senses_at(ids, place)), idx, distinct, place),
        (lambda idx: ours(idx, C=table(idx)), idx), (lambda idx: other(idx), idx)))
    step = [partial(training_step, machine, compiled(DistinctIds(m)), optimizer, *inputs)
            for m, optimizer in zip(models, optimizers)]
    textbook = partial(training_step, machine, compiled(lambda idx, targets: F.cross_entropy(
        other(idx).flatten(0, 1), targets.flatten())), optimizers[1], idx, targets)
    kept = [copy.deepcopy(m).to(getattr(torch, machine.dtype)) for m in models]
    generate = [partial(m.generate, idx[:1, :half], length - half) for m in kept]
    return [
        ('forward pass, the senses of every token / Transformer', [every, plain], (1, 1), flops[0]),
        ('forward pass, of distinct ids / Transformer', [some, plain], (1, 1), flops[1]),
        ('forward pass, from a sense table / Transformer', [none, plain], (1, 1), flops[2]),
        ('training step / Transformer', step, (1, 1), flops[1]),
        ('training step of the Transformer / its plain form', [step[1], textbook], (1, 1), 1.0),
        (f'a new token after {half} or more / Transformer', generate, (length - half,) * 2, None)]


def timing_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 7: a Backpack beside a Transformer of its shape, and that beside its plain form."""
    config = replace(subjects[0].model.config if subjects else Config(**SIZES[args.size]), dropout=0.0)
    run = subjects[0].model.run if subjects else {}
    machine, rows = find_machine(args.device, args.dtype or run.get('dtype', 'auto')), []
    compiled = machine.compile if run.get('compile', True) else lambda function: function
    device, length = machine.device, min(512, config.block_size)
    models = [Backpack(replace(config, n_sense=k)).to(device) for k in (config.n_sense, 0)]
    idx = text_like(config.n_vocab, 32 if machine.on_gpu else max(1, 4096 // length), length)
    for what, works, tokens, flops in pairs_to_time(models, idx, machine, compiled):
        a, b = ([1000 * t / n for t in times] for times, n in zip(alternate(works, device, what), tokens))
        ratio = statistics.median(a) / statistics.median(b)
        rows.append([what, statistics.median(a), statistics.median(b), ratio, flops, len(a)])
    how = f'{machine.dtype} ({machine.why}), {"" if run.get("compile", True) else "not "}compiled'
    notes = [f'{machine.name}, {how}, torch {torch.__version__}; {idx.unique().numel():,} distinct ids.',
             "The paper's ratio has the senses of every token; by operations: of floating point operations."]
    return Table(f'Time (Table 7): median ms, in turn; {len(idx)} x {length} tokens, {config.n_layer} layers '
                 f'of width {config.n_embd}, {config.n_sense} senses, {config.n_vocab:,} ids',
                 {'': '', 'the first': ',.1f', 'the second': ',.1f', 'ratio': '.2f', 'by operations': '.2f',
                  'times': 'd'}, rows, notes)
