"""Claims about rucksack/paper/timing.py: what is timed is what it is called."""

import copy

import pytest
import torch
from helpers import toy_subject
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from rucksack.model import GPT, Backpack, Config, DistinctIds, distinct_ids
from rucksack.paper import timing
from rucksack.paper.timing import SIZES
from rucksack.training.checkpoint import make_model
from rucksack.training.machine import Machine, flops_per_token
from rucksack.training.optimizers import make_optimizers

MACHINE = Machine('cpu', 'float32', 0, 1)


@pytest.fixture(params=[4, 0])
def timed(request):
    """A model, its texts (2, 32), and what is timed of it, uncompiled."""
    model = toy_subject(request.param, block_size=32).model
    idx = timing.text_like(model.config.n_vocab, 2, 32)
    return model, idx, timing.works_of(model, idx, MACHINE, compile=False)


def test_a_training_step_is_that_of_the_model(timed):
    """It moves the weights as a step of AdamW along the gradient of the loss does."""
    model, idx, works = timed
    plain = copy.deepcopy(model)
    optimizer, = make_optimizers(plain, 'adamw', 1e-5, 0.1, (0.9, 0.95))
    plain(idx, idx).backward()
    optimizer.step()
    works['training step']()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters()):
        assert_close(found, expected, rtol=0, atol=2e-6, msg=name)


def test_the_second_half_of_a_text_is_generated(timed):
    """The model draws 16 tokens after the first 16 of a text."""
    model, idx, works = timed
    torch.manual_seed(3)
    text = model.generate(idx[:1, :16], 16)
    torch.manual_seed(3)
    assert torch.equal(works['16 new tokens'](), text)


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
