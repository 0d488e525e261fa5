"""Table 7: the time that a Backpack takes, beside a Transformer of its shape; and what the paper's models cost."""

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


def alternate(works: list[Callable[[], object]], device: str, budget: float, what: str) -> list[tuple]:
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
    """Logits of idx (B, T), in bfloat16 on CUDA, with senses from a table if one is given."""
    with torch.autocast('cuda', torch.bfloat16, enabled=idx.is_cuda):
        model(idx, C=table(idx) if table else None)


def training_step(loss: Callable, optimizer: torch.optim.Optimizer, idx: Tensor, *inputs: Tensor) -> None:
    """Loss of idx (B, T), in bfloat16 on CUDA, backward pass and update."""
    with torch.autocast('cuda', torch.bfloat16, enabled=idx.is_cuda):
        value = loss(idx, *inputs)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_loss(model: Callable, idx: Tensor, targets: Tensor) -> Tensor:
    """The loss from all logits at once, as nanoGPT computes it."""
    return F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate_without_cache(model: Backpack, text: Tensor, places: range) -> None:
    """One new token at some places of a text (1, T), each time reading all that comes before."""
    for n in places:
        model(text[:, :n])[:, -1].softmax(-1).multinomial(1)


def memory_of_step(config: Config, inputs: tuple[Tensor, ...]) -> float:
    """GB that a training step of a new model takes at most on CUDA: weights, gradients, optimizer and the rest."""
    device = inputs[0].device
    torch.cuda.reset_peak_memory_stats(device)
    before, model = torch.cuda.memory_allocated(device), Backpack(config).to(device)
    optimizer = model.adamw(1e-5, 0.1, (0.9, 0.95))
    for _ in range(2):
        training_step(torch.compile(DistinctIds(model)), optimizer, *inputs)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def pairs_to_time(models: list[Backpack], idx: Tensor, device: str) -> tuple[list[tuple], SenseTable]:
    """The rows of the timing table to be for a Backpack and a Transformer: a name, two functions, the tokens that
    each makes (1: a whole pass), a budget in seconds. And the sense table that one of them uses, of the whole
    vocabulary or, on a CPU, of the ids in idx (B, T).
    """
    on_gpu, (batch, length) = device.startswith('cuda'), idx.shape
    half, size, compiled = length // 2, f'{batch} x {length}', torch.compile if on_gpu else lambda module: module
    inputs, optimizers = inputs_of(idx, idx, device), [model.adamw(1e-5, 0.1, (0.9, 0.95)) for model in models]
    idx, text, places = inputs[0], inputs[0][:1], range(half, length, max(1, (length - half) // 16))
    table = SenseTable(models[0], None if on_gpu else idx, torch.bfloat16 if on_gpu else None)
    fast = [compiled(model) for model in models]
    forward = [partial(forward_pass, model, idx) for model in fast]
    with_table = partial(forward_pass, fast[0], idx, table)
    step = [partial(training_step, compiled(DistinctIds(model)), optimizer, *inputs)
            for model, optimizer in zip(models, optimizers)]
    plain = partial(training_step, partial(plain_loss, fast[1]), optimizers[1], *inputs[:2])
    generate = [partial(model.generate, text[:, :half], length - half) for model in models]
    without_cache = partial(generate_without_cache, models[0], text, places)
    return [
        (f'Backpack / Transformer, forward pass, {size}', forward, (1, 1), 20),
        ('with a sense table / Transformer, the same', [with_table, forward[1]], (1, 1), 20),
        (f'Backpack / Transformer, training step, {size}', step, (1, 1), 30),
        ('Transformer / its plain form, the same', [step[1], plain], (1, 1), 30),
        (f'Backpack / Transformer, a new token after {half} to {length - 1}', generate, (length - half,) * 2, 20),
        ('Backpack without its cache / with it, the same', [without_cache, generate[0]],
         (len(places), length - half), 60)], table


def timing_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 7: forward pass, training step and generation, a Backpack beside a Transformer of its shape, and
    each beside itself without what makes it fast.
    """
    config = replace(subjects[0].model.config if subjects else Config(**SIZES[args.size]), dropout=0.0)
    device, on_gpu, length = args.device, args.device.startswith('cuda'), min(512, config.block_size)
    configs, batch, rows = [config, replace(config, n_sense=0)], 64, []
    models = [Backpack(c).to(device) for c in configs]
    if not on_gpu:  # a batch that takes about a second, so that all of it takes minutes
        once = partial(forward_pass, models[0], text_like(config.n_vocab, 1, length).to(device))
        seconds = min(alternate([once], device, 0, '')[0])
        batch = max(b for b in (1, 2, 4, 8, 16, 32) if b == 1 or b * seconds < 1)
    idx = text_like(config.n_vocab, batch, length)
    pairs, table = pairs_to_time(models, idx, device)
    for what, works, tokens, budget in pairs:
        a, b = ([1000 * t / n for t in times] for times, n in zip(alternate(works, device, budget, what), tokens))
        ratio = statistics.median(a) / statistics.median(b)
        rows.append([what, statistics.mean(a), statistics.mean(b), ratio, len(a)])
    if size := subjects[0].size if subjects else args.size:
        a, b = PAPER_TIMING[size]
        rows.append([f"the paper's {size.capitalize()}, forward pass, 32 x 512 on an A100", a, b, a / b, 100])
    name = torch.cuda.get_device_name(device) if on_gpu else f'{device}, {torch.get_num_threads()} threads'
    notes = [f'{name}, {"bfloat16, compiled (generation: float32, eager)" if on_gpu else "float32"}, torch '
             f'{torch.__version__}; {idx.unique().numel():,} distinct ids among {idx.numel():,} tokens.',
             f'The sense table has {len(table.senses) - 1:,} ids in {str(table.senses.dtype)[6:]}: '
             f'{table.senses.nbytes / 1e6:,.1f} MB.']
    if on_gpu:
        ours, its = (memory_of_step(c, inputs_of(idx, idx, device)) for c in configs)
        notes.append(f'Memory of a training step: Backpack {ours:.2f} GB, Transformer {its:.2f} GB, ratio '
                     f'{ours / its:.2f}.')
    return Table(f'Time (Table 7): mean ms, in turn; {config.n_layer} layers of width {config.n_embd}, '
                 f'{config.n_sense} senses, {config.n_vocab:,} ids',
                 {'': '', 'the first': ',.1f', 'the second': ',.1f', 'ratio of medians': '.2f', 'times': 'd'},
                 rows, notes)


def cost_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Parameters of the paper's models, and operations to train them on a token, beside Transformers."""
    configs, rows = {name.capitalize(): Config(**size) for name, size in SIZES.items()}, []
    configs |= {f'Mini, Table 8, k = {k}': Config(**SIZES['mini'], n_sense=k, sense_hidden=640) for k in (1, 4, 16, 64)}
    for name, config in configs.items():
        with torch.device('meta'):
            models = Backpack(config), Backpack(replace(config, n_sense=0))
        millions = [n / 1e6 for model in models for n in (*model.n_params().values(), model.flops_per_token())]
        ...
