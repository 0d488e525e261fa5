"""Claims about data: bins, their descriptions, and the batches of a step."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import SMALL, checkpoint, error_of, make_data

from rucksack import train
from rucksack.train import Settings, chunks_of_step

TINY = Path('data/tiny')


def test_every_epoch_has_each_chunk_once():
    """Ten steps of 6 chunks make six epochs of 10, and two seeds give twelve different orders."""
    orders = set()
    for seed in (5, 6):
        s = Settings(batch_size=3, gradient_accumulation_steps=2, seed=seed)
        draws = [chunks_of_step(step, s, 10).flatten() for step in range(10)]
        for epoch in np.concatenate(draws).reshape(6, 10):
            assert sorted(epoch) == list(range(10))
            orders.add(tuple(epoch))
    assert len(orders) == 12


def test_bins_of_other_programs_need_only_three_facts(tiny):
    """A meta.json of tokenizer, vocabulary size and counts is enough, as for nanoGPT's bins."""
    facts = {'tokenizer': {'name': 'gpt2'}, 'vocab_size': 50257,
             'tokens': {'train': 800, 'val': 200}}
    (TINY / 'meta.json').write_text(json.dumps(facts))
    train.main([*SMALL, '--max_iters=1', '--batch_size=1', '--eval_iters=1'])
    assert checkpoint()['model_config']['n_vocab'] == 50257


def test_a_vocab_size_that_is_not_the_tokenizers_is_refused(tiny, capsys):
    """The checkpoints of such a run could not be loaded again."""
    make_data([1] * 800, [1] * 200, vocab_size=258)
    assert 'data/tiny/meta.json' in error_of(train, capsys, *SMALL, '--max_iters=1')


@pytest.mark.parametrize('name', ['train', 'val'])
@pytest.mark.parametrize('change', [lambda ids: bytes(len(ids)), lambda ids: ids[:-2]])
def test_a_bin_that_meta_json_does_not_describe_is_refused(change, name, tiny, capsys):
    """The error names a bin whose first ids or length do not match meta.json."""
    path = TINY / f'{name}.bin'
    path.write_bytes(change(path.read_bytes()))
    assert str(path) in error_of(train, capsys, *SMALL, '--max_iters=1')
    assert not Path('out').exists()


@pytest.mark.parametrize('name', ['train', 'val'])
def test_an_id_beyond_the_vocabulary_is_one_line(name, tiny, capsys):
    """Even if the checksum matches, the ids of each batch are checked against the vocabulary."""
    ids = {'train': [1] * 800, 'val': [1] * 800}
    ids[name][:] = [257] * 800
    make_data(*ids.values())
    error = error_of(train, capsys, *SMALL, '--max_iters=1')
    assert str(TINY / f'{name}.bin') in error
    assert '257' in error
