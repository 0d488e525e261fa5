"""Table 7: time and memory."""

import argparse
import gc
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model import SIZES, Backpack, Config, SenseTable
from rucksack.checkpoint import shape_of
from rucksack.common import UserError, progress
from rucksack.data import inputs_of
from rucksack.table import Subject, Table

# -----------------------------------------------------------------------------
# Time.

PAPER_TIMING = {'micro': (93, 65), 'mini': (210, 150), 'small': (360, 260)}  # ms


def alternate(works: list[Callable[[], object]], device: str, budget: float, what: str) -> list[list[float]]:
    """Seconds that each function takes, called in turn after two calls to warm up: 100 times, or as often as
    fits into a budget of seconds, but at least 3 times.
    """
    def seconds(work: Callable[[], object]) -> float:
        """Of one call, all of the device's part included."""
        wait = {'cuda': torch.cuda.synchronize, 'mps': torch.mps.synchronize}.get(device.split(':')[0], int)
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    for work in works:
        work()
    n = min(100, max(3, int(budget / sum(map(seconds, works)))))
    return list(zip(*([seconds(work) for work in works] for _ in progress(range(n), what))))


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Ids (batch, length) drawn by Zipf's law, so that words repeat about as they do in text."""
    chances, fixed = 1 / torch.arange(1, n_vocab + 1), torch.Generator().manual_seed(0)
    return torch.multinomial(chances, batch * length, True, generator=fixed).view(batch, length)


def training_step(model: Callable, optimizer: torch.optim.Optimizer, amp, inputs: dict) -> None:
    """Forward (in the number format amp), backward and update."""
    with amp:
        _, loss = model(**inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def forward_pass(model: Callable, amp, inputs: dict) -> None:
    """Logits, in the number format amp."""
    with amp:
        model(**inputs)


def in_numbers_of(device: str):
    """The number format of train.py on a device: bfloat16 on CUDA, float32 elsewhere."""
    return torch.autocast('cuda', torch.bfloat16, enabled=device.startswith('cuda'))


def peak_memory(device: str) -> int:
    """The most bytes that this process has had so far, on a CUDA device or else in main memory."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device)
    status = Path('/proc/self/status')  # of this program alone, where getrusage counts its parent too
    if status.exists() and (found := re.search(r'VmHWM:\s*(\d+)', status.read_text())):
        return 1024 * int(found[1])
    import resource  # not on every system
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def step_time(config: Config, batch: int, length: int, device: str) -> float:
    """Median seconds of a training step of a new model."""
    model, idx = Backpack(config).to(device), text_like(config.n_vocab, batch, length)
    step = partial(training_step, torch.compile(model) if device.startswith('cuda') else model,
                   model.adamw(1e-5, 0.1, (0.9, 0.95)), in_numbers_of(device), inputs_of(idx, idx, device))
    return statistics.median(alternate([step], device, 5, 'steps')[0])


def step_time_and_memory(config: Config, batch: int, length: int, device: str) -> tuple[float, int]:
    """step_time, and the most bytes that this process gains meanwhile."""
    if device.startswith('cuda'):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        step_time(Config(8, 64, n_layer=1, n_head=1, n_embd=16, n_sense=1), 1, 8, device)
        before = peak_memory(device)  # after all is loaded that PyTorch loads with a first step
    return step_time(config, batch, length, device), peak_memory(device) - before


def cost_of_step(config: Config, batch: int, length: int, device: str) -> tuple[float, int]:
    """Median seconds and peak memory, bytes, of a training step of a new model: its weights, gradients,
    optimizer and all it computes. Without CUDA in a process of its own, whose memory is nothing else.
    """
    if device.startswith('cuda'):
        return step_time_and_memory(config, batch, length, device)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            return pool.submit(step_time_and_memory, config, batch, length, device).result()
    except BrokenProcessPool:
        raise UserError(f'a step of {batch} x {length} tokens was killed, for its memory as it seems; close '
                        'other programs, or measure on a larger machine')


def tell_without_cache(model: Backpack, idx: Tensor, places: range) -> None:
    """One new token at some places of a text (1, T), each time reading all that comes before."""
    for n in places:
        model.generate(idx[:, :n], 1, use_cache=False)


def pairs_to_time(backpack: Backpack, gpt: Backpack, batch: int, device: str) -> tuple[list, SenseTable]:
    """The rows of the timing table to be: a name, two functions, tokens that each makes (1: a whole pass),
    a budget in seconds; and the sense table that one of them uses, of the whole vocabulary or, on a CPU, of
    the words at hand.
    """
    on_gpu, amp, c = device.startswith('cuda'), in_numbers_of(device), backpack.config
    length = min(512, c.block_size)
    half, idx, size = length // 2, text_like(c.n_vocab, batch, length), f'{batch} x {length}'
    one, places = idx[:1].to(device), range(half, length, max(1, (length - half) // 16))
    train = inputs_of(idx, idx, device)
    read = {'idx': train['idx'], 'distinct': train['distinct']}
    table = SenseTable(backpack, None if on_gpu else read['idx'], torch.bfloat16 if on_gpu else None)
    fast = [torch.compile(model) if on_gpu else model for model in (backpack, gpt)]
    optimizers = [model.adamw(1e-5, 0.1, (0.9, 0.95)) for model in (backpack, gpt)]
    forward = [partial(forward_pass, model, amp, read) for model in fast]
    step = [partial(training_step, *pair, amp, train) for pair in zip(fast, optimizers)]
    plain = {'idx': train['idx'], 'targets': train['targets']}  # all logits at once, in float32
    tell = [partial(model.generate, one[:, :half], length - half) for model in (backpack, gpt)]
    return [
        (f'Backpack / Transformer, forward pass, {size}', forward, (1, 1), 20),
        ('with a sense table / Transformer, the same',
         [partial(forward_pass, fast[0], amp, {'idx': read['idx'], 'table': table}), forward[1]], (1, 1), 20),
        (f'Backpack / Transformer, training step, {size}', step, (1, 1), 30),
        ('Transformer / its plain form, the same',
         [step[1], partial(training_step, fast[1], optimizers[1], amp, plain)], (1, 1), 30),
        (f'Backpack / Transformer, a new token after {half} to {length - 1}', tell, (length - half,) * 2, 20),
        ('Backpack without its cache / with it, the same',
         [partial(tell_without_cache, backpack, one, places), tell[0]], (len(places), length - half), 60),
    ], table


def timing_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 7: forward pass, training step and generation, a Backpack beside a Transformer of its shape, and
    each beside itself without what makes it fast.
    """
    config = replace(subjects[0].model.config if subjects else Config(**SIZES[args.size]), dropout=0.0)
    device, on_gpu = args.device, args.device.startswith('cuda')
    models = [Backpack(replace(config, n_sense=k)).to(device) for k in (config.n_sense, 0)]
    length, batch, rows = min(512, config.block_size), 64, []
    if not on_gpu:  # a batch that takes about a second, so that all of it takes minutes
        one = {'idx': text_like(config.n_vocab, 1, length).to(device)}
        once = min(alternate([partial(forward_pass, models[0], nullcontext(), one)], device, 0, '')[0])
        batch = max(b for b in (1, 2, 4, 8, 16, 32) if b == 1 or b * once < 1)
    pairs, table = pairs_to_time(*models, batch, device)
    for what, works, units, budget in pairs:
        a, b = ([1000 * t / n for t in times]
                for times, n in zip(alternate(works, device, budget, what), units))
        ratio = statistics.median(a) / statistics.median(b)
        rows.append([what, statistics.mean(a), statistics.mean(b), ratio, len(a)])
    size = subjects[0].size if subjects else args.size
    if size:
        a, b = PAPER_TIMING[size]
        rows.append([f"the paper's {size.capitalize()}, forward pass, 32 x 512 on an A100", a, b, a / b, 100])
    name = torch.cuda.get_device_name(device) if on_gpu else f'{device}, {torch.get_num_threads()} threads'
    ours, its = (cost_of_step(model.config, batch, length, device)[1] / 1e9 for model in models)
    words, n = text_like(config.n_vocab, batch, length).unique().numel(), len(table.senses) - 1
    return Table(f'Time (Table 7): mean ms, in turn; {config.n_layer} layers of width {config.n_embd}, '
                 f'{config.n_sense} senses, {config.n_vocab:,} words',
                 {'': '', 'the first': ',.1f', 'the second': ',.1f', 'ratio of medians': '.2f', 'times': 'd'},
                 rows,
                 [f'{name}, {"bfloat16, compiled (generation: float32, as it is)" if on_gpu else "float32"}, '
                  f'torch {torch.__version__}; '
                  f'{words:,} distinct tokens of {batch * length:,} in a batch.',
                  f'Memory of a training step: Backpack {ours:.2f} GB, Transformer {its:.2f} GB, ratio '
                  f'{ours / its:.2f}; of the sense table, {n:,} words in '
                  f'{str(table.senses.dtype).removeprefix("torch.")}: {table.senses.nbytes / 1e6:,.1f} MB.'])


def cost_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """How a training step grows with the batch, the length of the texts, the senses and the size."""
    on_gpu, rows = args.device.startswith('cuda'), []
    base = {'size': args.size or ('small' if on_gpu else 'micro'), 'batch': 8 if on_gpu else 1, 'length': 512,
            'senses': 16}
    ways = [base | {name: value} for name, values in {
        'batch': [base['batch'] * n for n in (1, 2, 4, 8)], 'length': [1024, 2048, 4096],
        'senses': [1, 4, 64], 'size': [size for size in SIZES if size != base['size']]}.items()
        for value in values]
    for way in progress(ways, 'cost'):
        config = Config(**SIZES[way['size']], block_size=way['length'], n_sense=way['senses'])
        (ours, memory), (its, its_memory) = (cost_of_step(c, way['batch'], way['length'], args.device)
                                             for c in (config, replace(config, n_sense=0)))
        model = shape_of(config)
        words = text_like(config.n_vocab, way['batch'], way['length']).unique().numel()
        tokens = way['batch'] * way['length']
        flops = tokens * model.flops_per_token(words / tokens)
        rows.append([*way.values(), 1000 * ours, 1000 * its, ours / its, memory / 1e9, its_memory / 1e9,
                     flops / 1e9, flops / ours / 1e9])
    return Table('Cost of a training step as work grows (medians)', {
        'size': '', 'batch': 'd', 'length': ',d', 'senses': 'd', 'Backpack ms': ',.0f',
        'Transformer ms': ',.0f', 'ratio': '.2f', 'Backpack GB': '.2f', 'Transformer GB': '.2f',
        'Backpack GFLOP': ',.0f', 'GFLOP/s': ',.0f'}, rows,
        [f'{args.device}, torch {torch.__version__}; memory with weights, gradients and optimizer.'])
