"""Table 7: a Backpack's time beside that of a Transformer of its shape."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model import SIZES, Backpack, Config, DistinctIds, SenseTable
from rucksack.common import progress
from rucksack.data import inputs_of
from rucksack.table import Subject, Table

PAPER_TIMING = {'micro': (93, 65), 'mini': (210, 150), 'small': (360, 260)}  # ms


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
def forward_pass(model: Callable, idx: Tensor, table: SenseTable | None = None) -> None:
    """Logits of idx (B, T), with senses from a table if there is one; in bfloat16 on CUDA."""
    with torch.autocast('cuda', torch.bfloat16, enabled=idx.is_cuda):
        model(idx, C=table(idx) if table else None)


def training_step(loss: Callable, optimizer: torch.optim.Optimizer, idx: Tensor, *inputs: Tensor) -> None:
    """The loss of idx (B, T), in bfloat16 on CUDA, its gradients, and the update."""
    with torch.autocast('cuda', torch.bfloat16, enabled=idx.is_cuda):
        value = loss(idx, *inputs)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def pairs_to_time(models: list[Backpack], idx: Tensor, device: str) -> tuple[list[tuple], SenseTable]:
    """What to time of a Backpack and a Transformer on texts idx (B, T): a name, two functions, and how many
    tokens each of them makes (1: a whole pass). And the sense table that one function uses.
    """
    on_gpu, (batch, length) = device.startswith('cuda'), idx.shape
    compiled, half = torch.compile if on_gpu else lambda module: module, length // 2
    ends, inputs = range(half, length, 16), inputs_of(idx, idx, device)
    idx, targets, *_ = inputs
    table = SenseTable(models[0], torch.bfloat16)
    fast, optimizers = [compiled(m) for m in models], [m.adamw(1e-5, 0.1, (0.9, 0.95)) for m in models]
    forward = [partial(forward_pass, model, idx) for model in fast]
    with_table = partial(forward_pass, fast[0], idx, table)
    step = [partial(training_step, compiled(DistinctIds(m)), o, *inputs) for m, o in zip(models, optimizers)]
    plain = partial(training_step, lambda idx, targets: F.cross_entropy(
        fast[1](idx).flatten(0, 1), targets.flatten()), optimizers[1], idx, targets)
    generate = [partial(model.generate, idx[:1, :half], length - half) for model in models]
    slow = torch.no_grad()(lambda: [models[0](idx[:1, :n])[:, -1].softmax(-1).multinomial(1) for n in ends])
    return [
        (f'Backpack / Transformer, forward pass, {batch} x {length}', forward, (1, 1)),
        ('with a sense table / Transformer, the same', [with_table, forward[1]], (1, 1)),
        (f'Backpack / Transformer, training step, {batch} x {length}', step, (1, 1)),
        ('Transformer / its plain form, the same', [step[1], plain], (1, 1)),
        (f'Backpack / Transformer, a new token after {half} or more', generate, (length - half,) * 2),
        ('Backpack without its cache / with it, the same', [slow, generate[0]], (len(ends), length - half)),
    ], table


def timing_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 7: a Backpack beside a Transformer of its shape, and both beside their plain forms."""
    config = replace(subjects[0].model.config if subjects else Config(**SIZES[args.size]), dropout=0.0)
    device, on_gpu, rows = args.device, args.device.startswith('cuda'), []
    models = [Backpack(replace(config, n_sense=k)).to(device) for k in (config.n_sense, 0)]
    idx = text_like(config.n_vocab, 64 if on_gpu else 2, min(512, config.block_size))
    pairs, table = pairs_to_time(models, idx, device)
    for what, works, tokens in pairs:
        a, b = ([1000 * t / n for t in times] for times, n in zip(alternate(works, device, what), tokens))
        ratio = statistics.median(a) / statistics.median(b)
        rows.append([what, statistics.mean(a), statistics.mean(b), ratio, len(a)])
    if size := subjects[0].size if subjects else args.size:
        a, b = PAPER_TIMING[size]
        rows.append([f"the paper's {size.capitalize()}, forward pass, 32 x 512 on an A100", a, b, a / b, 100])
    name = torch.cuda.get_device_name(device) if on_gpu else f'{device}, {torch.get_num_threads()} threads'
    notes = [f'{name}, {"bfloat16, compiled (generation: float32, eager)" if on_gpu else "float32"}, torch '
             f'{torch.__version__}; {idx.unique().numel():,} distinct ids among {idx.numel():,} tokens.',
             f'The sense table takes {table.rows.nbytes / 1e6:,.1f} MB, in bfloat16.']
    for kind, model, step in zip(('Backpack', 'Transformer'), models, pairs[2][1]) if on_gpu else ():
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - 3 * sum(p.nbytes for p in model.parameters())
        step()  # 3: each weight has two moments
        gb = (torch.cuda.max_memory_allocated(device) - others) / 1e9
        notes.append(f'Memory of a training step, {kind}: {gb:.2f} GB.')
    return Table(f'Time (Table 7): mean ms, in turn; {config.n_layer} layers of width {config.n_embd}, '
                 f'{config.n_sense} senses, {config.n_vocab:,} ids',
                 {'': '', 'the first': ',.1f', 'the second': ',.1f', 'ratio of medians': '.2f', 'times': 'd'},
                 rows, notes)
