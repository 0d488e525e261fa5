"""The claim about the operations of a step: torch counts as many."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rucksack.fast import DistinctIds, distinct_ids
from rucksack.model import Config
from rucksack.paper.timing import flops_per_token
from rucksack.weights import make_model


@pytest.mark.parametrize('n_sense', [0, 4])
def test_flops_per_token_are_those_that_torch_counts(n_sense):
    """In a training step, forward and backward, with 64 distinct ids among 128 tokens."""
    config = Config(32, 500, n_layer=2, n_head=2, n_embd=64, n_sense=n_sense)
    model = DistinctIds(make_model(config))
    idx = (torch.arange(128) % 64).view(4, 32)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx, *distinct_ids(idx)).backward()
    assert counter.get_total_flops() == 128 * flops_per_token(model.model, 64 / 128)
