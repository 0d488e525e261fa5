"""Claims about rucksack/timing.py: what is timed is what it is called."""

import time
from functools import partial

import pytest
import torch
from subjects import toy_subject
from torch.nn import functional as F

from rucksack import timing
from rucksack.machine import Machine


def test_functions_are_timed_in_turn():
    """After two calls of each, both are timed alternately, as often as the budget allows, 3 to 100 times."""
    calls, pauses = [], {'fast': 0.001, 'slow': 0.02}
    both = [partial(lambda name: calls.append(name) or time.sleep(pauses[name]), name) for name in pauses]
    fast, slow = timing.alternate(both, 'cpu', '', 0.0)
    assert calls == ['fast', 'slow'] * 5 and len(fast) == len(slow) == 3 and sum(fast) < sum(slow)
    assert len(timing.alternate(both, 'cpu', '', 0.3)[0]) <= 15
    assert len(timing.alternate([int], 'cpu', '', 9.0)[0]) == 100


def test_what_is_timed_is_what_it_is_called():
    """Forward passes, losses and the first half of a text are those of the two models; by operations, senses
    of distinct ids cost their share of those of every token, and those of a table nothing."""
    models, machine = [toy_subject(k, block_size=32).model for k in (4, 0)], Machine('cpu', 'float32', 0, 1)
    idx = timing.text_like(models[0].config.n_vocab, 2, 32)
    pairs = timing.pairs_to_time(models, idx, machine, lambda function: function)
    (every, _), (distinct, _), (table, other), steps, (same, plain), (generate, _) = (p[1] for p in pairs)
    assert same is steps[1] and generate.args[0].tolist() == idx[:1, :16].tolist()
    for work, model, near in (every, 0, 0), (distinct, 0, 0), (table, 0, 0.05), (other, 1, 0):
        logits = work.args[1](*work.args[2:])
        torch.testing.assert_close(logits, models[model](idx), atol=near + 1e-5, rtol=near)
    for work, model in zip((*steps, plain), (*models, models[1])):
        loss, want = work.args[1](*work.args[3:]), F.cross_entropy(model(idx).flatten(0, 1), idx.flatten())
        torch.testing.assert_close(loss, want)
    a, b, c = (flops for *_, flops in pairs[:3])
    assert a > b > c > 1 and (b - c) / (a - c) == pytest.approx(len(idx.unique()) / 64)
