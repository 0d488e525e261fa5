"""Time a Backpack against a Transformer of its shape, with random parameters (Table 7).

    python -m docs.dev.timing micro              a size of the paper: micro, mini or small
    python -m docs.dev.timing small --device cuda
"""

import argparse
import copy
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rucksack.cli import progress
from rucksack.device import can_compile, set_up_device, to_device
from rucksack.fast import Cached
from rucksack.model import GPT, Backpack, Config
from rucksack.table import Table
from rucksack.training import DistinctIds, distinct_ids

SIZES = {  # section 4.1, Table 9
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768),
}


def seconds_of(work) -> float:
    """Time one call, including all of its work on the device."""
    start = time.perf_counter()
    work()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def alternate(works: list, what: str) -> list[float]:
    """Time each function: the median, in ms, of alternating calls after two warm-up rounds.

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
    """Draw ids (batch, length) by Zipf's law, so that they repeat about as often as in text."""
    chances = 1 / torch.arange(1, n_vocab + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(chances, batch * length, replacement=True, generator=generator)
    return ids.view(batch, length)


def works_of(model: Backpack | GPT, idx: Tensor, device: str, dtype: str, compiled: bool) -> dict:
    """List what to time for a model that reads texts idx (B, T)."""
    wrap = torch.compile if compiled else lambda module: module
    predict = wrap(model)
    loss = wrap(DistinctIds(model))
    autocast = torch.autocast(device.split(':')[0], torch.bfloat16, enabled=dtype == 'bfloat16')
    inputs = to_device([idx, idx, *distinct_ids(idx)], device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    writer = copy.deepcopy(model).to(getattr(torch, dtype))
    half = idx.shape[1] // 2

    @torch.no_grad()
    def forward_pass() -> None:
        with autocast:
            predict(inputs[0])

    def training_step() -> None:
        with autocast:
            mean_loss = loss(*inputs)
        mean_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        'forward pass': forward_pass,
        'training step': training_step,
        f'{half} new tokens': partial(Cached(writer).generate, inputs[0][:1, :half], half)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('size', choices=SIZES)
    parser.add_argument('--device', default='auto')
    parser.add_argument('--dtype', default='auto', choices=('auto', 'float32', 'bfloat16'),
                        help='auto: bfloat16 where it is fast')
    args = parser.parse_args()
    device, dtype = set_up_device(args.device, args.dtype)
    compiled = can_compile(device)
    config = Config(vocab_size=50304, n_vocab=50257, **SIZES[args.size])  # rows as in train.py
    batch = 32 if device.startswith('cuda') else 8
    idx = text_like(config.n_vocab, batch, config.block_size)
    works = [works_of(model(config).to(device), idx, device, dtype, compiled)
             for model in (Backpack, GPT)]
    rows = []
    for what in works[0]:
        first, second = alternate([of_model[what] for of_model in works], what)
        rows.append([what, first, second, first / second])
    title = (f'Time (Table 7): median ms, in turn; {batch} x {config.block_size} tokens, '
             f'{config.n_layer} layers of width {config.n_embd}, {config.n_sense} senses, '
             f'{config.n_vocab:,} ids')
    columns = {'work': '', 'Backpack': ',.1f', 'Transformer': ',.1f', 'ratio': '.2f'}
    notes = [
        f'{device}, {dtype}, {"compiled" if compiled else "not compiled"}, '
        f'torch {torch.__version__}.',
        'A training step computes the senses of each distinct id once; a forward pass computes '
        'them for every token.']
    print(Table(title, columns, rows, notes))


if __name__ == '__main__':
    main()
