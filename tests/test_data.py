"""Claims about data: bins and what describes them, the batches of a step."""

from pathlib import Path

import numpy as np
import pytest
from helpers import SMALL, error_of, make_data

from rucksack import train
from rucksack.data import TokenDataset, read_meta, texts_of_step
from rucksack.tokenizer import words_tokenizer

TINY = Path('data/tiny')
WORDS = words_tokenizer([''])


# -----------------------------------------------------------------------------
# The batches of a step.


def test_targets_are_the_texts_one_token_later(tiny):
    """Of 800 tokens there are 99 texts of 8, each with the token after it."""
    ids = np.fromfile('data/tiny/train.bin', dtype='<u2').astype(int)
    texts = TokenDataset(TINY, 'train', read_meta(TINY), 8)
    idx, targets = texts(np.array([0, 98]))
    assert texts.n == 99
    assert idx.tolist() == [ids[:8].tolist(), ids[784:792].tolist()]
    assert targets.tolist() == [ids[1:9].tolist(), ids[785:793].tolist()]


def draws(seed: int, steps: int) -> np.ndarray:
    """The texts that so many steps of 6 draw from 10, one after another."""
    return np.concatenate([texts_of_step(seed, step, 6, 10) for step in range(steps)])


def test_every_epoch_has_each_text_once():
    """Ten steps are six epochs: each run of 10 draws is a permutation, and no two are the same."""
    epochs = draws(5, 10).reshape(6, 10)
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_another_seed_draws_in_another_order():
    """The order of the first epoch is that of the seed."""
    assert draws(5, 5).tolist() == draws(5, 5).tolist()
    assert draws(5, 5).tolist() != draws(6, 5).tolist()


# -----------------------------------------------------------------------------
# What describes a bin.


def test_a_nanogpt_folder_has_gpt2s_tokens(tiny):
    """It has no meta.json; its bins hold the ids of GPT-2 in 16 bits."""
    (TINY / 'meta.json').unlink()
    meta = read_meta(TINY)
    assert meta['tokenizer'] == {'name': 'gpt2'}
    assert meta['vocab_size'] == 50257
    assert meta['dtype'] == 'uint16'
    assert meta['tokens'] == {'train': 800, 'val': 200}


def test_a_meta_that_is_no_json_is_one_line(tiny, capsys):
    """Cut short, it is named, and no run begins."""
    (TINY / 'meta.json').write_text('{"tokenizer": ')
    assert 'data/tiny/meta.json' in error_of(train, capsys, *SMALL, '--max_iters=1')
    assert not Path('out').exists()


@pytest.mark.parametrize('name, content', [
    ('train', b''), ('val', bytes(1602)), ('val', bytes(1600))])
def test_a_bin_that_was_damaged_is_one_line(name, content, tiny, capsys):
    """Of another size or with other ids, it has another checksum than meta.json says."""
    make_data([1] * 800, [1] * 800)
    path = TINY / f'{name}.bin'
    path.write_bytes(content)
    error = error_of(train, capsys, *SMALL, '--max_iters=1')
    assert str(path) in error
    assert ('checksum' if content else 'empty') in error
    assert not Path('out').exists()


def test_characters_of_nanogpt_are_not_gpt2s(tiny, capsys):
    """A folder with nanoGPT's meta.pkl has ids of characters, which GPT-2 would misread."""
    (TINY / 'meta.json').unlink()
    (TINY / 'meta.pkl').touch()
    assert str(TINY) in error_of(train, capsys, *SMALL, '--max_iters=1')
    assert not Path('out').exists()


def test_half_an_id_without_a_meta_is_one_line(tiny, capsys):
    """A bin of nanoGPT's that was cut in the middle of an id is named, with its size."""
    make_data([1] * 800, [1] * 800)
    (TINY / 'meta.json').unlink()
    (TINY / 'val.bin').write_bytes(bytes(1599))
    error = error_of(train, capsys, *SMALL, '--max_iters=1')
    assert str(TINY / 'val.bin') in error
    assert ' 1599 bytes' in error
    assert not Path('out').exists()


@pytest.mark.parametrize('name', ['train', 'val'])
def test_an_id_beyond_the_vocabulary_is_one_line(name, tiny, capsys):
    """Though the checksum is right, the largest id is compared with the size of the vocabulary."""
    ids = {'train': [1] * 800, 'val': [1] * 800}
    ids[name][-1] = 257
    make_data(*ids.values())
    error = error_of(train, capsys, *SMALL, '--max_iters=1')
    assert str(TINY / f'{name}.bin') in error
    assert '257' in error
    assert not Path('out').exists()
