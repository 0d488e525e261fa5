"""Claims about rucksack/timing.py: what is timed is what it is called."""

import time
from functools import partial

import torch
from subjects import toy_subject
from torch.nn import functional as F

from rucksack import timing


def test_functions_are_timed_in_turn():
    """After two calls of each, both are timed alternately, as often as the budget allows, 3 to 100 times."""
    calls, pauses = [], {'fast': 0.001, 'slow': 0.02}
    both = [partial(lambda name: calls.append(name) or time.sleep(pauses[name]), name) for name in pauses]
    fast, slow = timing.alternate(both, 'cpu', '', 0.0)
    assert calls == ['fast', 'slow'] * 5 and len(fast) == len(slow) == 3 and sum(fast) < sum(slow)
    assert len(timing.alternate(both, 'cpu', '', 0.3)[0]) <= 15
    assert len(timing.alternate([int], 'cpu', '', 9.0)[0]) == 100


def test_what_is_timed_is_what_it_is_called():
    """Forward passes, losses, plain loss, table and the first half of a text are those of the two models."""
    models = [toy_subject(k, block_size=32).model for k in (4, 0)]
    idx = timing.text_like(models[0].config.n_vocab, 2, 32)
    forward, (with_table, _), steps, (same, plain), (generate, _), _ = (
        works for _, works, _ in timing.pairs_to_time(models, idx, 'cpu')[0])
    assert [work.args[:2] for work in forward] == [(model, idx) for model in models] and same is steps[1]
    torch.testing.assert_close(with_table.args[2](idx), models[0].senses(idx), atol=0.02, rtol=0.02)
    for work, model in zip((*steps, plain), (*models, models[1])):
        loss, want = work.args[0](*work.args[2:]), F.cross_entropy(model(idx).flatten(0, 1), idx.flatten())
        torch.testing.assert_close(loss, want)
    assert generate.args[0].tolist() == idx[:1, :16].tolist()
