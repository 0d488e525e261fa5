"""Claims about the operations of a step: they are those of docs/speed.md, and torch's own count."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rucksack.model import GPT, Backpack, Config, DistinctIds, distinct_ids
from rucksack.paper.timing import SIZES
from rucksack.training.checkpoint import make_model
from rucksack.training.machine import flops_per_token


@pytest.mark.parametrize('size, ours, other', [
    ('micro', 12.0, 10.2), ('mini', 28.1, 24.1), ('small', 47.1, 41.8)])
def test_flops_per_token_of_the_papers_sizes(size, ours, other):
    """10^18 for 100,000 steps of 2^19 tokens, a fifth of them distinct, as docs/speed.md has it."""
    config = Config(**SIZES[size], n_sense=16)
    with torch.device('meta'):
        models = [Backpack(config), GPT(config)]
    found = [100_000 * 2 ** 19 * flops_per_token(model, 0.2) / 1e18 for model in models]
    assert [round(operations, 1) for operations in found] == [ours, other]


@pytest.mark.parametrize('n_sense', [0, 4])
def test_flops_per_token_are_those_that_torch_counts(n_sense):
    """In a training step, forward and backward, with 64 distinct ids among 128 tokens."""
    config = Config(32, 500, n_layer=2, n_head=2, n_embd=64, n_sense=n_sense)
    model = DistinctIds(make_model(config))
    idx = (torch.arange(128) % 64).view(4, 32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx, *distinct_ids(idx)).backward()
    assert counter.get_total_flops() == 128 * flops_per_token(model.model, 64 / 128)
