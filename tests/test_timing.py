"""Claims about rucksack/paper/timing.py: what is timed is what it is called."""

import copy
import shutil
import time
from dataclasses import replace

import pytest
import torch
from helpers import toy_subject
from torch.testing import assert_close

from rucksack.model import GPT, Backpack, Config
from rucksack.paper import timing
from rucksack.paper.timing import SIZES
from rucksack.training.machine import Machine, flops_per_token
from rucksack.training.optimizers import make_optimizers

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

    ms_of_fast, ms_of_slow = timing.alternate([fast, slow], '', budget=0.0)
    assert calls == ['fast', 'slow'] * 5
    assert 1 <= ms_of_fast < ms_of_slow
    assert ms_of_slow >= 20


@pytest.mark.parametrize('seconds, budget, most', [(0.02, 0.3, 15 + 2), (0.0, 9.0, 100 + 2)])
def test_no_more_rounds_are_timed_than_the_budget_allows(seconds, budget, most):
    """At most as many calls as fit into it, and at most 100, after two rounds of warm-up."""
    calls = []

    def work():
        calls.append(1)
        time.sleep(seconds)

    timing.alternate([work], '', budget)
    assert len(calls) <= most
    assert len(calls) > most / 2


# -----------------------------------------------------------------------------
# What is timed.


@pytest.fixture(params=[4, 0])
def timed(request):
    """A model, its texts (2, 32), and what is timed of it, uncompiled."""
    model = toy_subject(request.param, block_size=32).model
    idx = timing.text_like(model.config.n_vocab, 2, 32)
    return model, idx, timing.works_of(model, idx, MACHINE, compile=False)


def test_a_forward_pass_is_that_of_the_model(timed):
    """It gives the model's logits, without gradients."""
    model, idx, works = timed
    logits = works['forward pass']()
    assert_close(logits, model(idx))
    assert not logits.requires_grad


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
    monkeypatch.setattr(timing, 'alternate', lambda *args: [1.0, 1.0])
    config = toy_subject(4, block_size=32).model.config
    table = timing.timing_table(config, MACHINE)
    assert ('not compiled' in table.notes[0]) == (compiler is None)
    assert len(compiled) == (4 if compiler else 0)  # two forward passes, two training steps


def test_operations_are_of_the_texts_that_are_timed(monkeypatch):
    """A model that could read longer texts has the same operations: texts end at 512 tokens."""
    monkeypatch.setattr(timing, 'alternate', lambda *args: [1.0, 1.0])
    ratios = []
    for block_size in (512, 1024):
        config = toy_subject(4, block_size=block_size).model.config
        table = timing.timing_table(config, MACHINE, compile=False)
        ratios.append([row[4] for row in table.rows])
    assert ratios[0] == ratios[1]


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_what_is_timed_has_the_format_it_is_said_to_have(dtype, monkeypatch):
    """Logits are float64 where the run was."""
    outputs = []

    def call_once(works, what):
        if what == 'forward pass':
            outputs.extend(work() for work in works)
        return [1.0, 1.0]

    monkeypatch.setattr(timing, 'alternate', call_once)
    config = toy_subject(4, block_size=32).model.config
    timing.timing_table(config, replace(MACHINE, dtype=dtype), compile=False)
    assert [logits.dtype for logits in outputs] == 2 * [getattr(torch, dtype)]


@pytest.mark.parametrize('size, ours, other', [
    ('micro', 12.0, 10.2), ('mini', 28.1, 24.1), ('small', 47.1, 41.8)])
def test_operations_are_those_of_the_papers_sizes(size, ours, other):
    """10^18 for 100,000 steps of 2^19 tokens, a fifth of them distinct, as docs/speed.md has it."""
    config = Config(**SIZES[size], n_sense=16)
    with torch.device('meta'):
        models = [Backpack(config), GPT(config)]
    found = [100_000 * 2 ** 19 * flops_per_token(model, 0.2) / 1e18 for model in models]
    assert [round(operations, 1) for operations in found] == [ours, other]
