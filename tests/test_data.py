"""Claims about data: bins and what describes them, the batches of a step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, error_of, make_data

import train
from rucksack.data import TokenDataset, inputs_of, read_meta, texts_of_step
from rucksack.toy import toy_tokenizer


def test_targets_are_the_texts_one_token_later(tiny):
    """Text i holds tokens i * block_size on; a nanoGPT folder, without meta.json, holds GPT-2's in uint16."""
    Path('data/tiny/meta.json').unlink()
    meta = read_meta(Path('data/tiny'))
    assert (meta['tokenizer'], meta['vocab_size'], meta['dtype']) == ({'name': 'gpt2'}, 50257, 'uint16')
    ids = np.fromfile('data/tiny/train.bin', dtype='<u2').astype(int)
    texts = TokenDataset(Path('data/tiny'), 'train', meta, 8)
    idx, targets = texts(np.array([0, 98]))
    assert texts.n == 99 and idx.tolist() == [ids[:8].tolist(), ids[784:792].tolist()]
    assert targets.tolist() == [ids[1:9].tolist(), ids[785:793].tolist()]


def test_distinct_ids_at_their_places_are_the_batch():
    """Each id is there once, padded to a multiple of 64, and distinct[place] is idx."""
    for n in (1, 63, 64, 65, 5000):
        idx = torch.randint(n, (3, 500))
        same, targets, distinct, place = inputs_of(idx, idx + 1, 'cpu')
        assert distinct[place].equal(idx) and same.equal(idx) and targets.equal(idx + 1)
        used = place.max() + 1
        assert len(distinct) == -(-used // 64) * 64 and distinct[:used].equal(idx.unique())


def test_every_epoch_has_each_text_once_in_an_order_of_its_own():
    """Steps of 6 over 10 texts: each run of 10 draws is a permutation, and no two epochs or seeds agree."""
    epochs = np.concatenate([texts_of_step(5, step, 6, 10) for step in range(10)]).reshape(6, 10)
    assert (np.sort(epochs) == np.arange(10)).all() and len({tuple(epoch) for epoch in epochs}) == 6
    assert (epochs[0, :6] != texts_of_step(6, 0, 6, 10)).any()


TOY, ONCE = toy_tokenizer(['']), [*SMALL, '--max_iters=1']


@pytest.mark.parametrize('change', [
    {'vocab_size': -1}, {'vocab_size': '257'}, {'vocab_size': 10**30}, {'dtype': 'uint32'}, {'dtype': [1]},
    {'tokenizer': None}, {'tokenizer': {'name': '../../gpt2'}}, {'tokenizer': {**TOY, 'pattern': '(a+)+$'}},
    {'tokenizer': {**TOY, 'pieces': [['x']]}}, {'tokenizer': {**TOY, 'pieces': 3}}, {'tokens': [800, 200]},
    {'tokens': {'train': 8e2, 'val': 200}}, {'tokens': {'train': 800}}, {'sha256': {'train': 'x', 'val': 3}}])
def test_a_damaged_meta_is_one_line(change, tiny, capsys):
    """Wrong types, absurd sizes and unknown tokenizers are refused before a run begins."""
    make_data([1] * 800, [1] * 200, **change)
    assert 'data/tiny/meta.json is damaged; run python prepare.py tiny' in error_of(train, capsys, *ONCE)


def test_a_bin_that_does_not_fit_is_one_line(tiny, capsys):
    """Of another size than meta.json says, missing, or with an id beyond the vocabulary."""
    path, beyond = Path('data/tiny/train.bin'), bytes(1598) + b'\1\1'
    for content, what in ((b'', 'has 0 bytes'), (bytes(1599), 'has 1,599 bytes, not 800 tokens of 2'),
                          (beyond, 'holds the id 257, beyond a vocabulary of 257'), (None, 'is missing')):
        path.unlink() if content is None else path.write_bytes(content)
        assert f'train.bin {what}' in error_of(train, capsys, *ONCE) and not Path('out').exists()
