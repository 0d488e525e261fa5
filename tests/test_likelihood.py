"""Claims about rucksack/paper/likelihood.py: each metric matches a case worked out by hand."""

import json
import math
import re
import shutil
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import helpers
import numpy as np
import pytest
import torch
from helpers import PAGES, PAIRS, PASSAGES, make_data, toy_loaded, write_benchmarks

from rucksack.errors import UserError
from rucksack.loaded import LoadedModel
from rucksack.paper import likelihood
from rucksack.paper.canonical import examples_table
from rucksack.paper.likelihood import BLIMP, LAMBADA, WIKITEXT, Scores, measure_edit
from rucksack.senses import scale_senses

TABLES = [(LAMBADA, likelihood.lambada_table), (WIKITEXT, likelihood.wikitext_table),
          (BLIMP, likelihood.blimp_table)]
HUB = {'default': PASSAGES, 'wikitext-2-raw-v1': PAGES, 'one': PAIRS[:1], 'two': PAIRS[1:]}


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
    assert scores.greedy.tolist() == [hit for _, hit in wanted]
    assert scores.greedy[-1]
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
    scores = likelihood.score_texts(loaded, [ids], '', look_back)
    blocks = [block for _, block in likelihood.windows(ids, loaded.eot, 24, look_back)]
    assert sum(blocks, []) == ids
    assert likelihood.perplexity(scores.logp, n) == pytest.approx(math.exp(-logp / n), rel=1e-5)


@pytest.mark.parametrize('name, content', [
    ('a.txt', 'the nurse\n<|endoftext|>\nshe said'),
    ('a.jsonl', '{"text": "the nurse"}\n{"text": null}\n{"text": "she said"}')])
def test_a_text_file_has_the_ids_that_prepare_writes(name, content, tmp_path):
    """A file's documents end at <|endoftext|>, or are the rows of a .jsonl."""
    s = toy_loaded()
    (tmp_path / name).write_text(content)
    assert s.read(tmp_path / name) == [*s.encode('the nurse'), s.eot, *s.encode('she said')]


def test_bits_per_byte_are_nats_by_ln_2_by_bytes(tmp_path):
    """A two-byte letter counts as two bytes, and an end-of-text as no bytes."""
    (tmp_path / 'a.txt').write_text('The caf\u00e9<|endoftext|>She smiled.', encoding='utf-8')
    loaded = toy_loaded()
    ids = loaded.read(tmp_path / 'a.txt')
    nats = -likelihood.score_texts(loaded, [ids], '').logp.sum().item()
    row, = likelihood.loss_table([loaded], str(tmp_path / 'a.txt')).rows
    assert row[-2] == pytest.approx(nats / math.log(2) / (9 + 11))


def test_the_price_of_an_edit_in_loss_is_in_nats_per_token(folder):
    """The nats per token that an edit adds, and the tokens that it touches, match a loop's."""
    loaded = toy_loaded()
    ids = np.random.default_rng(2).integers(0, 9, 24 * 6 + 5)
    make_data(ids, ids, tokenizer=loaded.tokenizer, vocab_size=loaded.encoding.n_vocab)
    edited = replace(loaded, name='edited', edit=scale_senses([0, 4], [1], 0.0))  # id 0 also pads
    added = 0.0
    for context, block in likelihood.windows(ids.tolist(), loaded.eot, 24, look_back=False):
        idx = torch.tensor([[*context, *block[:-1]]])
        targets = torch.tensor([block])
        C = edited.edit(idx, loaded.model.senses(idx))
        difference = loaded.model(idx, targets, C=C) - loaded.model(idx, targets)
        added += difference.item() * len(block)
    n_touched = np.isin(ids[:-1], [0, 4]).sum()

    note, _ = likelihood.loss_table([loaded, edited], None).notes
    numbers = [float(number) for number in re.findall(r'[+-]?\d[\d.]*\d', note)]
    assert numbers == pytest.approx([added / len(ids), n_touched, len(ids)], abs=1e-5)


def test_senses_are_worth_what_the_loss_grows_without_them(tmp_path):
    """Each loss equals the loss with that sense turned off; shares of o add up to 100%."""
    file = tmp_path / 'text.txt'
    file.write_text('The nurse smiled. ' * 12)
    loaded = toy_loaded(padding=9)
    ids = loaded.encode('The nurse smiled. ' * 12)
    rows = likelihood.senses_table([loaded], str(file)).rows
    wanted = [perplexity_under(loaded, ids, None)]
    for l in range(4):
        wanted.append(perplexity_under(loaded, ids, scale_senses(None, [l], 0.0)))
    assert [row[0] for row in rows] == ['none', '0', '1', '2', '3']
    assert [row[1] for row in rows] == pytest.approx(wanted, rel=1e-5)
    assert rows[3][2] == pytest.approx(math.log(rows[3][1] / rows[0][1]))
    assert sum(row[3] for row in rows[1:]) == pytest.approx(100)


def perplexity_under(loaded: LoadedModel, ids: list[int], edit) -> float:
    """Compute the perplexity of a text under an edit."""
    logp = likelihood.score_texts(replace(loaded, edit=edit), [ids], '').logp
    return likelihood.perplexity(logp, len(ids))


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
    (_, *numbers), = likelihood.lambada_table([loaded], data).rows
    assert numbers == pytest.approx([math.exp(nats / 3), 100 * hits / 3], rel=1e-4)


@pytest.mark.parametrize('packed', [False, True])
def test_blimp_by_hand(packed, tmp_path):
    """A pair is right if the good sentence is likelier; means are taken over paradigms."""
    loaded = toy_loaded(seed=1)
    data = write_benchmarks(tmp_path / 'bench')
    if packed:
        folder = data / 'pairs'
        data = tmp_path / 'archive.tar.xz'
        with tarfile.open(data, 'w:xz') as tar:
            tar.add(folder)
            (tmp_path / '._one.jsonl').write_bytes(b'\xff')  # as macOS adds
            tar.add(tmp_path / '._one.jsonl', 'pairs/._one.jsonl')
    scores = []
    for pair in PAIRS:
        good, _ = by_hand(loaded, [loaded.eot], loaded.encode(pair['sentence_good']))
        bad, _ = by_hand(loaded, [loaded.eot], loaded.encode(pair['sentence_bad']))
        scores.append(100 * (good > bad))
    one = scores[0]
    two = (scores[1] + scores[2]) / 2
    assert likelihood.blimp_table([loaded], str(data)).rows == [
        ['agreement (1)', one], ['islands (1)', two], ['mean of all (2)', (one + two) / 2]]


def test_a_sentence_of_blimp_is_read_whole_or_not_at_all(tmp_path):
    """A model that reads fewer tokens than a sentence has is refused, not scored on its end."""
    data = str(write_benchmarks(tmp_path / 'bench'))
    sentences = [pair[key] for pair in PAIRS for key in ('sentence_good', 'sentence_bad')]
    n = max(len(toy_loaded().encode(sentence)) for sentence in sentences)
    likelihood.blimp_table([toy_loaded(block_size=n)], data)
    with pytest.raises(UserError, match=str(n)):
        likelihood.blimp_table([toy_loaded(block_size=n - 1)], data)


@pytest.mark.parametrize('benchmark, row', [
    (BLIMP, PAIRS[0] | {'sentence_good': ''}), (BLIMP, PAIRS[0] | {'sentence_bad': None}),
    (LAMBADA, {'text': ' '}), (LAMBADA, {'text': None})])
def test_a_row_of_a_benchmark_without_text_is_refused(benchmark, row, tmp_path):
    """An empty sentence is refused, because it would be likelier than any other."""
    Path(tmp_path, 'lambada_test.jsonl').write_text(json.dumps(row))
    with pytest.raises(UserError, match='row 1 has no text'):
        likelihood.rows_of(benchmark, toy_loaded(), str(tmp_path / 'lambada_test.jsonl'))


def test_an_archive_beside_its_files_is_not_read_twice(tmp_path):
    """A blimp.tar.xz next to its own .jsonl files adds no rows."""
    pairs = write_benchmarks(tmp_path / 'bench') / 'pairs'
    with tarfile.open(tmp_path / 'blimp.tar.xz', 'w:xz') as tar:
        tar.add(pairs)
    shutil.move(tmp_path / 'blimp.tar.xz', pairs)
    assert len(likelihood.rows_of(BLIMP, toy_loaded(), str(pairs))) == len(PAIRS)


@pytest.mark.parametrize('make, text', [
    (likelihood.loss_table, 'the nurse said'),
    (partial(examples_table, wish=None), '- the nurse -> said')])
def test_each_model_reads_the_text_with_its_own_vocabulary(make, text, tmp_path, monkeypatch):
    """Between two models of one vocabulary, a model of another changes no number."""
    one = toy_loaded()
    monkeypatch.setattr(helpers, 'WORDS', f'aardvark {helpers.WORDS}')
    other = toy_loaded()
    data = tmp_path / 'a.txt'
    data.write_text(text)
    alone = [make([loaded], str(data)).rows[0] for loaded in (one, other, one)]
    together = make([one, other, one], str(data)).rows
    assert [row[:5] for row in together] == [row[:5] for row in alone]  # then, changes from row 1


def test_a_perplexity_too_large_for_a_number_is_infinite():
    """A page without spaces is one word; its perplexity is infinite, its bits per byte are not."""
    logp = torch.tensor([-400.0, -400.0]).double()
    assert likelihood.perplexity(logp, 1) == math.inf
    assert likelihood.bits_per_byte(logp, 10) == pytest.approx(80 / math.log(2))


def test_lambada_in_other_languages_is_another_benchmark(tmp_path):
    """Translations beside lambada_test.jsonl, named as in the common harnesses, are not read."""
    folder = write_benchmarks(tmp_path / 'bench')
    shutil.copy(folder / 'lambada_test.jsonl', folder / 'lambada_test_de.jsonl')
    assert len(likelihood.rows_of(LAMBADA, toy_loaded(), str(folder))) == 3


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
    (_, *numbers), = likelihood.wikitext_table([loaded], data).rows
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
    assert likelihood.detokenized(raw) == clean


@pytest.mark.parametrize('benchmark, table', TABLES)
def test_the_hub_gives_the_numbers_of_the_files(benchmark, table, tmp_path, monkeypatch):
    """Without data, the rows of all configs on the Hub are scored."""
    def load_dataset(name, config, split):
        assert name == benchmark.hub_name
        assert split == benchmark.split
        return HUB[config]

    monkeypatch.setattr(datasets, 'get_dataset_config_names', lambda name: ['one', 'two'])
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    loaded = toy_loaded()
    loaded.is_toy = False
    data = str(write_benchmarks(tmp_path / 'bench'))
    assert table([loaded], None).rows == table([loaded], data).rows


def test_repaired_and_broken_are_counted_where_the_edit_acts():
    """Wrong to right counts as a repair, right to wrong as a break, any other change as neither."""
    targets = torch.tensor([[-1, 1, 2, 3, 4]])
    nothing = torch.zeros(1)
    before, after = (Scores(nothing, nothing, targets, torch.tensor([likeliest]), nothing)
                     for likeliest in ([-1, 1, 2, 9, 9], [-1, 1, 8, 3, 8]))
    found = measure_edit(before, after)
    assert [found[name] for name in ('changed', 'repaired', 'broken')] == [3, 1, 1]
