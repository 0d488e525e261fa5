"""Claims about rucksack/timing.py: what is timed is what it is called."""

import time
from functools import partial

import pytest
import torch
from subjects import flags, toy_subject
from torch.nn import functional as F

from rucksack import timing


def test_functions_are_timed_in_turn():
    """After two calls of each to warm up both are called alternately, as often as fits into the budget, 3 to
    100 times; the times come in the order of the functions."""
    calls, pauses = [], {'fast': 0.001, 'slow': 0.02}
    both = [partial(lambda name: calls.append(name) or time.sleep(pauses[name]), name) for name in pauses]
    fast, slow = timing.alternate(both, 'cpu', '', 0.0)
    assert calls == ['fast', 'slow'] * 5 and len(fast) == len(slow) == 3 and sum(fast) < sum(slow)
    assert len(timing.alternate(both, 'cpu', '', 0.3)[0]) <= 15
    assert len(timing.alternate([int], 'cpu', '', 9.0)[0]) == 100


def test_what_is_timed_is_what_it_is_called():
    """A forward pass is that of its model, with a sense table to its precision; a training step's loss is the
    model's, and so is that of its plain form; generation goes on from the first half of a text."""
    models = [toy_subject(k, block_size=32).model for k in (4, 0)]
    idx = timing.text_like(models[0].config.n_vocab, 2, 32)
    (_, forward, _), (_, with_table, _), (_, steps, _), (_, plain, _), (_, generate, tokens), _ = \
        timing.pairs_to_time(models, idx, 'cpu')[0]
    assert [work.args[:2] for work in forward] == [(model, idx) for model in models] and plain[0] is steps[1]
    loss = [partial(work.args[0], *work.args[2:])() for work in (*steps, plain[1])]
    want = [F.cross_entropy(models[i](idx).flatten(0, 1), idx.flatten()) for i in (0, 1, 1)]
    torch.testing.assert_close(loss, want)
    C = with_table[0].args[2](idx)
    torch.testing.assert_close(C, models[0].senses(idx), atol=0.02, rtol=0.02)
    assert generate[0].args[0].shape == (1, 16) and tokens == (16, 16)


def test_the_papers_models_have_the_papers_sizes():
    """Tables 8 and 9: parameters in millions of the contextualizer and in all; Small's Transformer has 124.0,
    and a token of its Backpack trains with 1.4 times the operations."""
    rows = timing.cost_table([], flags()).rows
    want = [[30.4, 41.7], [72.7, 103.9], [125.2, 170.1], *([72.7, n] for n in (74.3, 75.6, 80.5, 100.2))]
    assert [row[1:4:2] for row in rows] == [pytest.approx(sizes, abs=0.06) for sizes in want]
    assert [rows[2][4], rows[2][-1]] == pytest.approx([124.0, 1.40], abs=0.06)
