"""Claims about rucksack/timing.py: what is timed is what it is called."""

import shutil
import time
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import toy_subject
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from model import SIZES, Backpack, Config
from rucksack import timing
from rucksack.machine import Machine, flops_per_token

MACHINE = Machine('cpu', 'float32', 0, 1)


# -----------------------------------------------------------------------------
# How it is timed.


def test_functions_are_timed_in_turn():
    """After two calls of each, both are timed alternately, three times if there is no budget."""
    calls = []

    def fast():
        calls.append('fast')
        time.sleep(0.001)

    def slow():
        calls.append('slow')
        time.sleep(0.02)

    times_of_fast, times_of_slow = timing.alternate([fast, slow], '', budget=0.0)
    assert calls == ['fast', 'slow'] * 5
    assert len(times_of_fast) == 3
    assert len(times_of_slow) == 3
    assert min(times_of_fast) >= 0.001
    assert min(times_of_slow) >= 0.02
    assert sum(times_of_fast) < sum(times_of_slow)


def test_no_more_rounds_are_timed_than_the_budget_allows():
    """In 0.3 seconds there is time for at most 15 calls of 0.02."""
    times, = timing.alternate([lambda: time.sleep(0.02)], '', budget=0.3)
    assert len(times) <= 15


def test_at_most_100_rounds_are_timed():
    """A fast function leaves some of its budget."""
    times, = timing.alternate([int], '', budget=9.0)
    assert len(times) == 100


# -----------------------------------------------------------------------------
# What is timed.


@dataclass
class Timed:
    """Two models, texts (2, 32), and what is timed of them."""

    ours: Backpack
    other: Backpack
    idx: Tensor
    comparisons: list[timing.Comparison]


@pytest.fixture
def timed():
    """A Backpack and a Transformer, both uncompiled."""
    ours = toy_subject(4, block_size=32).model
    other = toy_subject(0, block_size=32).model
    idx = timing.text_like(ours.config.n_vocab, 2, 32)
    found = timing.comparisons(ours, other, idx, MACHINE, lambda function: function)
    return Timed(ours, other, idx, found)


@pytest.mark.parametrize('i', [0, 1])
def test_forward_passes_are_those_of_the_models(timed, i):
    """Senses of every token, and of distinct ids, give the logits of the model."""
    comparison = timed.comparisons[i]
    assert_close(comparison.first(), timed.ours(timed.idx), atol=1e-5, rtol=0.0)
    assert_close(comparison.second(), timed.other(timed.idx), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize('i, which, of_ours', [
    (2, 'first', True), (2, 'second', False), (3, 'first', False), (3, 'second', False)])
def test_training_steps_are_those_of_the_models(timed, i, which, of_ours):
    """A step has the loss of its model, and moves the weights of that model alone."""
    step = getattr(timed.comparisons[i], which)
    model, still = (timed.ours, timed.other) if of_ours else (timed.other, timed.ours)
    loss = F.cross_entropy(model(timed.idx).flatten(0, 1), timed.idx.flatten())
    before = model.wte.weight.clone()
    before_of_still = still.wte.weight.clone()
    assert_close(step(), loss)
    assert not torch.equal(model.wte.weight, before)
    assert torch.equal(still.wte.weight, before_of_still)


def test_a_transformer_is_timed_once_as_the_same_step(timed):
    """What is beside our training step is what is compared with the unoptimised version."""
    _, _, step, plain, _ = timed.comparisons
    assert plain.first is step.second


@pytest.mark.parametrize('which, of_ours', [('first', True), ('second', False)])
def test_the_second_half_of_a_text_is_generated(timed, which, of_ours):
    """Each model draws 16 tokens after the first 16 of a text, and the time is that of one."""
    comparison = timed.comparisons[4]
    model = timed.ours if of_ours else timed.other
    torch.manual_seed(3)
    text = model.generate(timed.idx[:1, :16], 16)
    torch.manual_seed(3)
    assert torch.equal(getattr(comparison, which)(), text)
    assert comparison.tokens == 16


def test_operations_are_of_the_senses_that_are_computed(timed):
    """Senses of distinct ids cost their share of what those of every token cost."""
    every, distinct, *_ = (comparison.flops_ratio for comparison in timed.comparisons)
    without = flops_per_token(timed.ours, 0.0) / flops_per_token(timed.other)
    share = len(timed.idx.unique()) / timed.idx.numel()
    assert distinct - without == pytest.approx(share * (every - without))


@pytest.mark.parametrize('compiler', ['/usr/bin/g++', None])
def test_the_table_says_whether_it_was_compiled(compiler, monkeypatch):
    """Without a C++ compiler, nothing is compiled, whatever was asked for."""
    compiled = []

    def compile(function):
        compiled.append(function)
        return function

    monkeypatch.setattr(shutil, 'which', lambda name: compiler)
    monkeypatch.setattr(torch, 'compile', compile)
    monkeypatch.setattr(torch, 'use_deterministic_algorithms', lambda mode: None)
    monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', True)
    monkeypatch.setattr(timing, 'alternate', lambda *args: [[1.0], [1.0]])
    config = toy_subject(4, block_size=32).model.config
    table = timing.timing_table(config, MACHINE)
    assert ('not compiled' in table.notes[0]) == (compiler is None)
    assert len(compiled) == (6 if compiler else 0)  # three forward passes, three training steps


def test_operations_are_of_the_texts_that_are_timed(monkeypatch):
    """A model that could read longer texts has the same operations: texts end at 512 tokens."""
    monkeypatch.setattr(timing, 'alternate', lambda *args: [[1.0], [1.0]])
    ratios = []
    for block_size in (512, 1024):
        config = toy_subject(4, block_size=block_size).model.config
        table = timing.timing_table(config, MACHINE, compile=False)
        ratios.append([row[4] for row in table.rows])
    assert ratios[0] == ratios[1]


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_what_is_timed_has_the_format_it_is_said_to_have(dtype, monkeypatch):
    """Logits and losses are float64 where the run was."""
    outputs = []

    def call_once(works, what):
        outputs.extend(work() for work in works)
        return [[1.0], [1.0]]

    monkeypatch.setattr(timing, 'alternate', call_once)
    config = toy_subject(4, block_size=32).model.config
    timing.timing_table(config, replace(MACHINE, dtype=dtype), compile=False)
    logits_and_losses = [output.dtype for output in outputs if output.is_floating_point()]
    assert len(logits_and_losses) == 8
    assert set(logits_and_losses) == {getattr(torch, dtype)}


@pytest.mark.parametrize('size, ours, other', [
    ('micro', 12.0, 10.2), ('mini', 28.1, 24.1), ('small', 47.1, 41.8)])
def test_operations_are_those_of_the_papers_sizes(size, ours, other):
    """10^18 for 100,000 steps of 2^19 tokens, a fifth of them distinct, as docs/speed.md has it."""
    found = []
    with torch.device('meta'):
        for n_sense in (16, 0):
            model = Backpack(Config(**SIZES[size], n_sense=n_sense))
            found.append(100_000 * 2 ** 19 * flops_per_token(model, 0.2) / 1e18)
    assert [round(operations, 1) for operations in found] == [ours, other]
