"""Claims about rucksack/likelihood.py: each metric against a case done by hand."""

import math
import tarfile
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from conftest import SHARED
from subjects import PAGES, PAIRS, PASSAGES, flags, toy_subject, write_benchmarks

from rucksack import likelihood
from rucksack.common import UserError
from rucksack.table import Subject


def by_hand(s: Subject, context: list[int], text: str | list[int]) -> tuple[float, bool]:
    """The log-probability of a continuation and whether it is the likeliest, one token at a time."""
    ids, total, greedy = s.encode(text) if isinstance(text, str) else text, 0.0, True
    row = (context + ids)[-s.model.config.block_size - 1:]
    for t in range(max(1, len(row) - len(ids)), len(row)):
        logits = s.model(torch.tensor([row[:t]]))[0, -1, :s.encoding.n_vocab]
        total += logits.log_softmax(-1)[row[t]].item()
        greedy &= logits.argmax().item() == row[t]
    return total, greedy


def test_scores_are_those_of_one_token_at_a_time():
    """Continuations of any length, batched with padding, score as token by token; padding rows are no ids."""
    s, rng = toy_subject(padding=90), np.random.default_rng(0)
    pairs = [tuple(rng.integers(0, s.encoding.n_vocab, n).tolist() for n in lengths)
             for lengths in ((1, 1), (3, 2), (1, 20), (10, 14), (2, 5), (30, 3), (5, 40))]
    likeliest = s.model.generate(torch.tensor([pairs[0][0]]), 3, temperature=0)[0, 1:].tolist()
    logp, greedy = likelihood.score(s, [*pairs, (pairs[0][0], likeliest)], '')
    want = [by_hand(s, *pair) for pair in (*pairs, (pairs[0][0], likeliest))]
    assert logp.tolist() == pytest.approx([total for total, _ in want], abs=1e-4)
    assert greedy.tolist() == [hit for _, hit in want] and greedy[-1]


@pytest.mark.parametrize('n', [1, 7, 8, 9, 16, 17, 23])
def test_windows_ask_every_token_once(n):
    """Each token is in one continuation, after the one before, or in the last with look_back all that fit."""
    ids, last = list(range(n)), (n - 1) // 8 * 8
    whole = [-1, *ids]
    contexts = [whole[i:i + 1] for i in range(0, last, 8)]
    for look_back in (False, True):
        found, continuations = zip(*likelihood.windows(ids, -1, 8, look_back))
        assert sum(continuations, []) == ids and max(map(len, continuations)) <= 8
        assert [*found] == [*contexts, whole[max(0, n - 8) if look_back else last:last + 1]]


def test_loss_is_that_of_the_model_in_blocks():
    """exp of the mean loss of model(idx, targets) over blocks, each after the one token before it."""
    s, ids, nats = toy_subject(), np.random.default_rng(1).integers(0, 256, 53).tolist(), 0.0
    for i in range(0, 53, 24):
        x, y = (torch.tensor([part[i:i + 24]]) for part in ([s.eot, *ids[:-1]], ids))
        nats += s.model(x, y).item() * y.numel()
    assert likelihood.loss_of(s, ids) == pytest.approx(math.exp(nats / 53), rel=1e-5)


def test_lambada_by_hand(tmp_path):
    """Perplexity is of last words, summed over their tokens; accuracy counts those all of argmax tokens."""
    s, ends = toy_subject(), {'He took the ball and threw the': ' ball', 'A': ' song', 'It was': ' sick'}
    logp, greedy = zip(*(by_hand(s, s.encode(context), word) for context, word in ends.items()))
    (_, *numbers), = likelihood.lambada_table([s], flags(write_benchmarks(tmp_path / 'bench'))).rows
    assert numbers == pytest.approx([math.exp(-sum(logp) / 3), 100 * sum(greedy) / 3], rel=1e-4)


def test_blimp_by_hand(tmp_path):
    """A pair is right where the good sentence is likelier; means are over paradigms, files or an archive."""
    s, folder = toy_subject(seed=1), write_benchmarks(tmp_path / 'bench')
    a, b, c = (100 * (by_hand(s, [s.eot], pair['sentence_good']) > by_hand(s, [s.eot], pair['sentence_bad']))
               for pair in PAIRS)
    with tarfile.open(tmp_path / 'archive.tar.xz', 'w:xz') as tar:
        tar.add(folder / 'blimp')
    for data in (folder, tmp_path / 'archive.tar.xz'):
        assert likelihood.blimp_table([s], flags(data)).rows == [
            ['agreement (1)', a], ['islands (1)', (b + c) / 2], ['mean of all (2)', a / 2 + (b + c) / 4]]


def test_wikitext_divides_by_the_words_of_the_original(tmp_path):
    """Pages are cut at " = Title = " and detokenized; their nats are over the words as they were before."""
    s = toy_subject(block_size=128)
    texts = [' = One =\n\n1,000 km, "so far".\n== Deeper ==\none (so-called). ', ' = Two =\nend.\n']
    nats, tokens = -sum(by_hand(s, [s.eot], t)[0] for t in texts), sum(len(s.encode(t)) for t in texts)
    (_, *numbers), = likelihood.wikitext_table([s], flags(write_benchmarks(tmp_path / 'bench'))).rows
    assert numbers == pytest.approx([math.exp(nats / (27 + 7)), math.exp(nats / tokens)], rel=1e-4)


@pytest.mark.parametrize('what', likelihood.SOURCES)
def test_rows_from_the_hub_are_those_of_files(what, tmp_path, monkeypatch):
    """The Hub's rows give the numbers of the files; without it a line says why, and what else to do."""
    s, table = toy_subject(), getattr(likelihood, f'{what.lower()}_table')
    rows = {'default': PASSAGES, 'wikitext-2-raw-v1': PAGES, 'one': PAIRS[:1], 'two': PAIRS[1:]}
    with pytest.raises(UserError, match='toy world'):
        table([s], flags())
    s.is_toy = False
    monkeypatch.setattr(datasets, 'get_dataset_config_names', lambda name: ['one', 'two'])
    monkeypatch.setattr(datasets, 'load_dataset', lambda name, config, split: rows[config])
    assert table([s], flags()).rows == table([s], flags(write_benchmarks(tmp_path / 'bench'))).rows
    monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **_: open('no network'))
    with pytest.raises(UserError, match=f'{what}.*{likelihood.SOURCES[what][0]}.*no network.*run .*--data'):
        table([s], flags())


@pytest.mark.skipif(not SHARED.is_dir(), reason='the real data files are not here')
def test_the_real_data_files_are_read():
    """LAMBADA has 5,153 passages, WikiText 62 pages, BLiMP 67 paradigms of 1,000."""
    s, args = toy_subject(), flags(SHARED, table='all')
    passages, pages, pairs = (likelihood.benchmark(what, s, args) for what in likelihood.SOURCES)
    counts = Counter(row[:2] for row in pairs)
    assert (len(passages), len(pages), len(counts), {*counts.values()}) == (5153, 62, 67, {1000})


def test_scores_in_bfloat16_are_near_those_in_float32():
    """A subject scores in bfloat16 if told, with the same weights: within 2%, and not the same."""
    s, pairs = toy_subject(), [([3], [5, 6, 7]), ([9], [1, 2])]
    half = Subject('toy', s.model, s.encoding, 'bfloat16')
    a, b = (likelihood.score(subject, pairs, '')[0] for subject in (s, half))
    assert not torch.equal(a, b) and b.tolist() == pytest.approx(a.tolist(), rel=0.02)
