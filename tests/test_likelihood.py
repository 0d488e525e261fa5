"""Claims about likelihood.py, loss.py and benchmarks.py in rucksack/paper/, checked by hand."""

import json
import math
import re
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from helpers import PAGES, PAIRS, PASSAGES, make_data, toy_loaded, write_benchmarks

from docs.dev.worth import worth_of_senses
from rucksack.errors import UserError
from rucksack.loaded import LoadedModel
from rucksack.paper import benchmarks, likelihood, loss
from rucksack.paper.likelihood import Scores, measure_edit, windows
from rucksack.paper.loss import loss_rows
from rucksack.senses import scale_senses


def by_hand(loaded: LoadedModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Score a continuation token by token: its log-probability, and whether it is the likeliest."""
    block_size = loaded.model.config.block_size
    ids = (context + continuation)[-block_size - 1:]
    first = max(1, len(ids) - len(continuation))
    total = 0.0
    is_likeliest = True
    for t in range(first, len(ids)):
        text = torch.tensor([ids[:t]])
        logits = loaded.model(text)[0, -1, :loaded.encoding.n_vocab]
        total += logits.log_softmax(-1)[ids[t]].item()
        if logits.argmax() != ids[t]:
            is_likeliest = False
    return total, is_likeliest


@pytest.mark.parametrize('tokens_at_once', [1 << 14, 60])
def test_scores_are_those_of_one_token_at_a_time(tokens_at_once, monkeypatch):
    """Continuations of any length score the same in padded batches as token by token."""
    monkeypatch.setattr(likelihood, 'TOKENS_AT_ONCE', tokens_at_once)
    loaded = toy_loaded(padding=90)
    n_vocab = loaded.encoding.n_vocab
    rng = np.random.default_rng(0)
    pairs = []
    for n_context, n in [(1, 1), (3, 2), (1, 20), (10, 14), (2, 5), (30, 3), (5, 40)]:
        context = rng.integers(0, n_vocab, n_context).tolist()
        pairs.append((context, rng.integers(0, n_vocab, n).tolist()))
    context, _ = pairs[0]
    likeliest = loaded.model.generate(torch.tensor([context]), 3, temperature=0)[0, 1:]
    pairs.append((context, likeliest.tolist()))
    scores = likelihood.score(loaded, pairs, '')
    wanted = [by_hand(loaded, *pair) for pair in pairs]
    assert scores.logp.tolist() == pytest.approx([total for total, _ in wanted], abs=1e-4)
    is_greedy = (scores.likeliest == scores.targets).all(1)
    assert is_greedy.tolist() == [hit for _, hit in wanted]
    assert is_greedy[-1]
    assert not scores.touched.any()


@pytest.mark.parametrize('look_back', [False, True])
@pytest.mark.parametrize('n', [1, 24, 25, 53])
def test_look_back_gives_the_last_block_all_context_that_fits(n, look_back):
    """Every token is scored once; without look_back, a block's context is the token before it."""
    loaded = toy_loaded(block_size=24)
    ids = np.random.default_rng(1).integers(0, 256, n).tolist()
    text = [loaded.eot, *ids]
    logp = 0.0
    for start in range(1, n + 1, 24):
        context = text[:start] if look_back else text[start - 1:start]
        logp_of_block, _ = by_hand(loaded, context, text[start:start + 24])
        logp += logp_of_block
    pairs = windows(ids, loaded.eot, 24, look_back)
    scores = likelihood.score(loaded, pairs, '')
    blocks = [block for _, block in pairs]
    assert sum(blocks, []) == ids
    assert scores.perplexity() == pytest.approx(math.exp(-logp / n), rel=1e-5)


def test_bits_per_byte_are_nats_by_ln_2_by_bytes(tmp_path):
    """A two-byte letter counts as two bytes, and an end-of-text as no bytes."""
    (tmp_path / 'a.txt').write_text('The caf\u00e9<|endoftext|>She smiled.', encoding='utf-8')
    loaded = toy_loaded()
    ids = loss.read_ids(tmp_path / 'a.txt', loaded)
    nats = -likelihood.score(loaded, windows(ids, loaded.eot, 24), '').logp.sum().item()
    row, = loss_rows(loaded, str(tmp_path / 'a.txt'))
    assert row['bits per byte'] == pytest.approx(nats / math.log(2) / (9 + 11))


def test_the_price_of_an_edit_in_loss_is_in_nats_per_token(folder, capsys):
    """The nats per token that an edit adds, and the tokens that it touches, match a loop's."""
    loaded = toy_loaded()
    ids = np.random.default_rng(2).integers(0, 9, 24 * 6 + 5)
    make_data(ids, ids, tokenizer=loaded.tokenizer, vocab_size=loaded.encoding.n_vocab)
    edited = replace(loaded, name='edited', edit=scale_senses([0, 4], [1], 0.0))  # id 0 also pads
    added = 0.0
    for context, block in windows(ids.tolist(), loaded.eot, 24, look_back=False):
        idx = torch.tensor([[*context, *block[:-1]]])
        targets = torch.tensor([block])
        C = edited.edit(idx, loaded.model.senses(idx))
        difference = loaded.model(idx, targets, C=C) - loaded.model(idx, targets)
        added += difference.item() * len(block)
    n_touched = np.isin(ids[:-1], [0, 4]).sum()

    loss_rows(edited, None)
    note = capsys.readouterr().out
    numbers = [float(number) for number in re.findall(r'[+-]?\d[\d.]*\d', note)]
    assert numbers[:3] == pytest.approx([added / len(ids), n_touched, len(ids)], abs=1e-5)


def test_senses_are_worth_what_the_loss_grows_without_them(tmp_path):
    """Each loss equals the loss with that sense turned off; shares of o add up to 100%."""
    file = tmp_path / 'text.txt'
    file.write_text('The nurse smiled. ' * 12)
    loaded = toy_loaded(padding=9)
    ids = loaded.encode('The nurse smiled. ' * 12)
    rows = worth_of_senses(loaded, str(file))
    pairs = windows(ids, loaded.eot, loaded.config.block_size)
    edits = [*(scale_senses(None, [l], 0.0) for l in range(4)), None]
    wanted = [likelihood.score(replace(loaded, edit=edit), pairs, '').perplexity()
              for edit in edits]
    assert rows['sense off'].tolist() == [0, 1, 2, 3, 'none']
    assert rows['perplexity'].tolist() == pytest.approx(wanted, rel=1e-5)
    assert rows['nats per token'][2] == pytest.approx(math.log(wanted[2] / wanted[4]), rel=1e-3)
    assert rows['share of o %'].sum() == pytest.approx(100)


def test_lambada_by_hand(tmp_path):
    """Perplexity covers last words; a word is right if each of its tokens is the likeliest."""
    loaded = toy_loaded(seed=149)  # where " song" is the likeliest after "A"
    data = str(write_benchmarks(tmp_path / 'bench'))
    ends = {'He took the ball and threw the': ' ball', 'A': ' song', 'It was': ' sick'}
    nats = 0.0
    hits = 0
    for context, word in ends.items():
        logp, is_likeliest = by_hand(loaded, loaded.encode(context), loaded.encode(word))
        nats -= logp
        hits += is_likeliest
    row, = benchmarks.lambada_rows(loaded, data)
    assert row['perplexity'] == pytest.approx(math.exp(nats / 3), rel=1e-4)
    assert row['accuracy %'] == pytest.approx(100 * hits / 3)


def test_blimp_by_hand(tmp_path):
    """A pair is right if the good sentence is likelier; means are taken over paradigms."""
    loaded = toy_loaded(seed=1)
    data = write_benchmarks(tmp_path / 'bench')
    (data / 'a copy.jsonl').write_text(json.dumps(PAIRS[2]))  # counts once
    scores = []
    for pair in PAIRS:
        good, _ = by_hand(loaded, [loaded.eot], loaded.encode(pair['sentence_good']))
        bad, _ = by_hand(loaded, [loaded.eot], loaded.encode(pair['sentence_bad']))
        scores.append(100 * (good > bad))
    one = scores[0]
    two = (scores[1] + scores[2]) / 2
    row, = benchmarks.blimp_rows(loaded, str(data))
    assert row == {'paradigms': 2, '% right': (one + two) / 2}


@pytest.mark.parametrize('table, file, row', [
    ('lambada', 'lambada_test.jsonl', {'text': None}),
    ('lambada', 'lambada_test.jsonl', {'text': ' '}),
    ('blimp', 'pairs/one.jsonl', PAIRS[0] | {'sentence_bad': None})])
def test_a_row_without_text_is_refused(table, file, row, tmp_path):
    """A row that would change a mean is not left out: the error names it."""
    data = write_benchmarks(tmp_path / 'bench')
    (data / file).write_text(f'\n{json.dumps(row)}\n')
    rows_of = getattr(benchmarks, f'{table}_rows')
    with pytest.raises(UserError, match='bench.* row 1 '):
        rows_of(toy_loaded(), str(data))


ON_HUB = {  # name, config and split -> rows
    ('EleutherAI/lambada_openai', 'default', 'test'): PASSAGES,
    ('EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test'): PAGES,
    ('nyu-mll/blimp', 'one', 'train'): PAIRS[:1],
    ('nyu-mll/blimp', 'two', 'train'): PAIRS[1:]}


@pytest.mark.parametrize('table', ['lambada', 'wikitext', 'blimp'])
def test_the_hub_gives_the_numbers_of_the_files(table, tmp_path, monkeypatch):
    """Without --data, a benchmark comes from the Hub by its name, in all its configs."""
    monkeypatch.setattr(datasets, 'get_dataset_config_names', lambda name: ['one', 'two'])
    monkeypatch.setattr(
        datasets, 'load_dataset', lambda name, config, split: ON_HUB[name, config, split])
    loaded = toy_loaded(block_size=128)
    loaded.is_toy = False
    rows_of = getattr(benchmarks, f'{table}_rows')
    files = str(write_benchmarks(tmp_path / 'bench'))
    assert rows_of(loaded, None) == rows_of(loaded, files)


def test_a_sentence_of_blimp_is_read_whole_or_not_at_all(tmp_path):
    """A model that reads fewer tokens than a sentence has is refused, not scored on its end."""
    data = str(write_benchmarks(tmp_path / 'bench'))
    sentences = [pair[key] for pair in PAIRS for key in ('sentence_good', 'sentence_bad')]
    n = max(len(toy_loaded().encode(sentence)) for sentence in sentences)
    benchmarks.blimp_rows(toy_loaded(block_size=n), data)
    with pytest.raises(UserError, match=str(n)):
        benchmarks.blimp_rows(toy_loaded(block_size=n - 1), data)


def test_wikitext_counts_words_and_bytes_of_the_original(tmp_path):
    """WikiText is read detokenized, but words and bytes are counted in the original pages."""
    loaded = toy_loaded(block_size=128)
    data = str(write_benchmarks(tmp_path / 'bench'))
    pages = [' = One =\n\n1,000 km, "so far".\n== Deeper ==\none (so-called). ', ' = Two =\nend.\n']
    nats = 0.0
    n_tokens = 0
    for page in pages:
        ids = loaded.encode(page)
        logp, _ = by_hand(loaded, [loaded.eot], ids)
        nats -= logp
        n_tokens += len(ids)
    n_words = 27 + 7
    n_bytes = sum(len(page['page'].encode()) for page in PAGES)
    row, = benchmarks.wikitext_rows(loaded, data)
    numbers = [row[name] for name in ('perplexity per word', 'per token', 'bits per byte')]
    wanted = [math.exp(nats / n_words), math.exp(nats / n_tokens), nats / math.log(2) / n_bytes]
    assert numbers == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize('raw, clean', [
    ("dogs ' bone", "dogs' bone"), ('1 @,@ 000', '1,000'), ('a : b', 'a: b'), ('a ; b', 'a; b'),
    ('a . b', 'a. b'), ('a ! b', 'a! b'), ('a ? b', 'a? b'), ('a , b', 'a, b'), ('( a )', '(a)'),
    ('[ a ]', '[a]'), ('{ a }', '{a}'), ('" a "', '"a"'), ("' a '", "'a'"),
    (' = = = A = = = ', ' === A === '), (' = = = = A = = = = ', ' ==== A ==== '),
    (' = = A = = ', ' == A == '), ('5 \u00b0 C', '5\u00b0C'), ('a \n b', 'a\nb'),
    ('a N b', 'a 1 b'), ("it 's", "it's")])
def test_each_rule_of_the_harness(raw, clean):
    """WikiText's tokens are joined as EleutherAI's harness joins them."""
    assert benchmarks.detokenized(raw) == clean


def test_repaired_and_broken_are_counted_where_the_edit_acts():
    """Wrong to right counts as a repair, right to wrong as a break, any other change as neither."""
    targets = torch.tensor([[-1, 1, 2, 3, 4]])
    nothing = torch.zeros(targets.shape)
    before, after = (Scores(targets, nothing, torch.tensor([likeliest]), nothing)
                     for likeliest in ([-1, 1, 2, 9, 9], [-1, 1, 8, 3, 8]))
    found = measure_edit(before, after)
    assert [found[name] for name in ('changed', 'repaired', 'broken')] == [3, 1, 1]
