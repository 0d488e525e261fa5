"""Table 7: how fast a Backpack is, compared with a Transformer of the same shape."""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rucksack.cli import progress
from rucksack.fast import Cached, DistinctIds, distinct_ids
from rucksack.loaded import LoadedModel
from rucksack.model import GPT, Backpack, Config
from rucksack.table import Table
from rucksack.training.machine import Machine, configure_machine

Work = Callable[[], object]


SIZES = {  # the paper's model sizes (section 4.1, Table 9)
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768),
}


def seconds_of(work: Work) -> float:
    """Time one call, with all its work on the device."""
    start = time.perf_counter()
    work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def alternate(works: list[Work], what: str) -> list[float]:
    """Time each function: the median, in ms, of calls in turn after two warm-up rounds.

    Each is called 100 times, or as often as fits into 30 seconds, but at least 3 times.
    """
    for work in works:
        seconds_of(work)
    seconds_of_a_round = sum(map(seconds_of, works))
    n = min(100, max(3, int(30 / seconds_of_a_round)))
    rounds = []
    for _ in progress(range(n), what):
        rounds.append([1000 * seconds_of(work) for work in works])
    return np.median(rounds, axis=0).tolist()


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Draw ids (batch, length) by Zipf's law, so that they repeat about as they do in text."""
    chances = 1 / torch.arange(1, n_vocab + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(chances, batch * length, replacement=True, generator=generator)
    return ids.view(batch, length)


def works_of(model: Backpack | GPT, idx: Tensor, machine: Machine, compile: bool
             ) -> dict[str, Work]:
    """List what to time of a model that reads texts idx (B, T)."""
    predict = machine.wrap(model, compile)
    loss = machine.wrap(DistinctIds(model), compile)
    inputs = machine.to_device(idx, idx, *distinct_ids(idx))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    writer = copy.deepcopy(model).to(getattr(torch, machine.dtype))
    half = idx.shape[1] // 2

    @torch.no_grad()
    def forward_pass() -> None:
        with machine.autocast():
            predict(inputs[0])

    def training_step() -> None:
        with machine.autocast():
            mean_loss = loss(*inputs)
        mean_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        'forward pass': forward_pass,
        'training step': training_step,
        f'{half} new tokens': partial(Cached(writer).generate, inputs[0][:1, :half], half)}


def timing_table(models: list[LoadedModel], size: str | None, device: str, dtype: str | None
                 ) -> Table:
    """Make Table 7: the times of a Backpack and of a Transformer of its shape.

    The shape is a size of the paper or, without one, that of the first model. Then they are
    compiled if its training was.
    """
    compile = True
    if size:
        # Rows of the embedding matrix as in train.py, a multiple of 64.
        config = Config(vocab_size=50304, n_vocab=50257, **SIZES[size])
    else:
        config = models[0].config
        compile = models[0].training.compile
    machine = configure_machine(device, dtype or 'auto')
    length = min(512, config.block_size)
    config = replace(config, dropout=0.0, block_size=length)
    batch = 32 if machine.on_gpu else 4096 // length
    idx = text_like(config.n_vocab, batch, length)
    models = [Backpack(config).to(machine.device), GPT(config).to(machine.device)]
    works = [works_of(model, idx, machine, compile) for model in models]
    rows = []
    for what in works[0]:
        first, second = alternate([of_model[what] for of_model in works], what)
        rows.append([what, first, second, first / second])
    how = 'compiled' if compile and machine.can_compile() else 'not compiled'
    title = (f'Time (Table 7): median ms, in turn; {batch} x {length} tokens, '
             f'{config.n_layer} layers of width {config.n_embd}, {config.n_sense} senses, '
             f'{config.n_vocab:,} ids')
    columns = {'work': '', 'Backpack': ',.1f', 'Transformer': ',.1f', 'ratio': '.2f'}
    notes = [
        f'{machine.name}, {machine.dtype}, {how}, torch {torch.__version__}.',
        'A training step computes the senses of each distinct id once, a forward pass those of '
        'every token.']
    return Table(title, columns, rows, notes)
