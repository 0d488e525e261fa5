"""Claims about the tables: each metric against a case done by hand, each command end to end."""

import json
import math
import os
import re
import shutil
import tarfile
import time
from argparse import Namespace
from ast import literal_eval as eval_literal
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as tables
import prepare
import train
from model import Backpack, Config
from rucksack import common as common_py
from rucksack import data as data_py
from rucksack import likelihood as likely
from rucksack import plot as plot_py
from rucksack import table as table_
from rucksack import timing as timing_py
from rucksack import topics as topics_py
from rucksack import toy as toy_py
from rucksack import words as words_
from rucksack.grammar import word_id
from senses import affinities, affinity, scale_senses

SHARED = Path(__file__).parent.parent.parent / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the real data files are not here')


def gpt2_known() -> bool:
    """Whether GPT-2's vocabulary can be had."""
    try:
        data_py.load_tokenizer(data_py.GPT2)
        return True
    except common_py.UserError:
        return False


needs_gpt2 = pytest.mark.skipif(not gpt2_known(), reason="GPT-2's vocabulary cannot be had")


def save(folder: Path, model: Backpack, tokenizer: dict, dataset: str | None = None) -> str:
    """A checkpoint with what eval.py reads of one."""
    folder.mkdir(parents=True)
    torch.save({'model': model.state_dict(), 'model_config': asdict(model.config), 'tokenizer': tokenizer,
                'settings': {'dataset': dataset}}, folder / 'ckpt.pt')
    return str(folder)


def small(k: int, seed: int = 0, **shape) -> Backpack:
    """A random model with clear preferences."""
    torch.manual_seed(seed)
    shape = dict(block_size=24, vocab_size=50257, n_layer=1, n_head=2, n_embd=16) | shape
    model = Backpack(Config(n_sense=k, **shape))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model.eval()


WORDS = ('the nurse said that she he they was sick music guitar song said . trick table chair').split()


def toy_subject(k: int = 4, padding: int = 0, **shape) -> table_.Subject:
    """A random model of a vocabulary made of WORDS, with rows of padding."""
    tokenizer = toy_py.toy_tokenizer([' '.join(WORDS), ' ' + ' '.join(WORDS)])
    n = data_py.load_tokenizer(tokenizer).n_vocab
    model = small(k, vocab_size=n + padding, n_vocab=n, **shape)
    model.tokenizer = tokenizer
    return table_.Subject('toy', model, data_py.load_tokenizer(tokenizer))


say, error_of = partial(conftest.say, tables), partial(conftest.error_of, tables)


# -----------------------------------------------------------------------------
# Metrics, by hand.


def test_scores_are_those_of_one_text_at_a_time():
    """Summed log-probabilities of continuations of any length, batched with padding, equal a loop over single
    texts and tokens; greedy says whether each token was the argmax. Rows of padding are no words."""
    s = toy_subject(padding=90)
    rng, pairs = np.random.default_rng(0), []
    for n, m in ((1, 1), (3, 2), (1, 20), (10, 14), (2, 5), (30, 3), (5, 1)):
        ids = rng.integers(0, s.encoding.n_vocab, n + m).tolist()
        pairs.append((ids[:n], ids[n:]))
    with torch.no_grad():  # one continuation that is greedy all along
        context = pairs[0][0]
        pairs.append((context, s.model.generate(torch.tensor([context]), 3, temperature=0)[0, 1:].tolist()))
    logp, greedy = likely.score(s, pairs, '')
    for i, (context, asked) in enumerate(pairs):
        row, total, hit = (context + asked)[-25:], 0.0, True
        logits = s.model(torch.tensor([row[:-1]]))[0][0]
        for t in range(len(row) - len(asked), len(row)):
            words = logits[t - 1, :s.encoding.n_vocab]
            total += words.log_softmax(-1)[row[t]].item()
            hit &= words.argmax().item() == row[t]
        assert logp[i].item() == pytest.approx(total, abs=1e-4) and greedy[i] == hit
    assert greedy[-1]


@pytest.mark.parametrize('n', [1, 7, 8, 9, 16, 17, 23])
@pytest.mark.parametrize('look_back', [False, True])
def test_windows_ask_every_token_once(n, look_back):
    """The continuations of the windows, joined, are the text; each context is what comes before, one token of
    it, or in the last window with look_back as many as fit beside."""
    ids = list(range(100, 100 + n))
    pairs = likely.windows(ids, 5, 8, look_back)
    assert [i for _, asked in pairs for i in asked] == ids
    whole, at = [5, *ids], 1
    for i, (context, asked) in enumerate(pairs):
        last = look_back and i == len(pairs) - 1 and i > 0
        assert context == whole[:at][-(9 - len(asked)):] if last else context == [whole[at - 1]]
        assert len(context) + len(asked) - 1 <= 8
        at += len(asked)


def test_window_perplexity_is_that_of_one_long_window_where_the_text_fits():
    """A text of block_size tokens: exp of the mean loss of one forward pass from end-of-text on; a longer
    one: the mean over all of its blocks, each after one token."""
    s = toy_subject()
    T, eot = s.model.config.block_size, s.encoding.eot_token
    ids = np.random.default_rng(1).integers(0, s.encoding.n_vocab, 2 * T + 5).tolist()
    one = s.model(torch.tensor([[eot, *ids[:T - 1]]]), torch.tensor([ids[:T]]))[1].item()
    assert likely.loss_of(s, ids[:T]) == pytest.approx(math.exp(one), rel=1e-5)
    nats = []
    for start in range(0, len(ids), T):
        x = ([eot] + ids)[start:start + T]
        y = ids[start:start + T]
        logits = s.model(torch.tensor([x[:len(y)]]))[0][0]
        nats += F.cross_entropy(logits, torch.tensor(y), reduction='none').tolist()
    assert len(nats) == len(ids)
    assert likely.loss_of(s, ids) == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_spearman_with_ties_is_the_known_value():
    """Ranks of equal numbers are averaged: for (1, 2, 2, 4, 5) and (3, 1, 2, 5, 5), by hand, the ranks are
    (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5), and their correlation is 6 / 9.5."""
    x, y = torch.tensor([1.0, 2, 2, 4, 5]), torch.tensor([3.0, 1, 2, 5, 5])
    assert words_.ranks(x).tolist() == [1, 2.5, 2.5, 4, 5] and words_.ranks(y).tolist() == [3, 1, 2, 4.5, 4.5]
    assert words_.spearman(x, y) == pytest.approx(6 / 9.5)
    assert words_.spearman(x, -x) == pytest.approx(-1) and math.isnan(words_.spearman(x, torch.ones(5)))


def test_likeness_is_the_cosine_of_each_sense():
    """Eq. 13, 14 and the embeddings by hand; of a word of two tokens the mean of both or the first."""
    s = toy_subject()
    pairs = [('nurse', 'she', 1.0), ('nurse', 'xy', 2.0)]  # xy: ' x' is no token, so bytes
    for first in (False, True):
        found = words_.likeness(s, pairs, first)
        for p, (a, b, _) in enumerate(pairs):
            vectors = []
            for word in (a, b):
                ids = s.encoding.encode_ordinary(' ' + word)[:1 if first else None]
                C = s.model.senses(torch.tensor(ids))  # (tokens, k, d)
                vectors.append((C.mean(0), s.model.wte.weight[ids].mean(0)))
            (own, embedding), (other, its) = vectors
            cosines = [F.cosine_similarity(own[l], other[l], dim=0).item() for l in range(4)]
            assert [found[f'sense {l}'][p].item() for l in range(4)] == pytest.approx(cosines, abs=1e-5)
            assert found['minimum'][p].item() == pytest.approx(min(cosines), abs=1e-5)
            alike = F.cosine_similarity(embedding, its, dim=0).item()
            assert found[f'embeddings, {s}'][p].item() == pytest.approx(alike, abs=1e-5)


def test_bias_ratio_of_a_made_distribution():
    """p(she), p(he) of (0.6, 0.2) and (0.1, 0.5) give the ratios 3 and 5, mean 4."""
    logits = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4]]).log() + torch.tensor([[3.0], [-2]])
    assert words_.bias_ratio(logits, 0, 1).item() == pytest.approx(4)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """The logits for every fraction, computed from two passes, equal a pass with that factor as an edit."""
    s = toy_subject()
    noun = [word_id(s.encoding, 'nurse')]
    idx, last = words_.prompts_of(s, 'nurse', ['the {} said that', 'the {} was', 'that {}'])
    found = words_.without_sense(s.model, idx, last, noun, 2)
    for i, fraction in enumerate(words_.FRACTIONS):
        logits = s.model(idx, edit=scale_senses(noun, [2], 1 - fraction))[0]
        want = torch.stack([logits[row, place] for row, place in enumerate(last.tolist())])
        torch.testing.assert_close(found[i], want, atol=1e-5, rtol=1e-4)


def test_projection_takes_the_direction_from_the_noun_alone():
    """The Transformer's logits for every fraction equal those with a changed row of the input embedding; with
    the whole taken, the noun's embedding is orthogonal to E_he - E_she."""
    s = toy_subject(k=0)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    v = (s.model.wte.weight[he] - s.model.wte.weight[she]).detach()
    idx, last = words_.prompts_of(s, 'nurse', ['the {} said that', 'the {} was'])
    found = words_.without_direction(s.model, idx, last, [noun], v)
    for i, fraction in enumerate(words_.FRACTIONS):
        E = s.model.wte.weight.detach().clone()
        E[noun] -= fraction * (E[noun] @ v) / (v @ v) * v
        if fraction == 1:
            assert abs(E[noun] @ v) < 1e-5
        h = s.model.contextualizer(F.embedding(idx, E))
        want = s.model.project(torch.stack([h[row, place] for row, place in enumerate(last.tolist())]))
        torch.testing.assert_close(found[i], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('k', [4, 0])
def test_the_best_fraction_is_never_worse_than_none_or_all_where_it_was_chosen(k, monkeypatch):
    """With the evaluation prompts replaced by the estimation prompts, the third row is at most the first and
    the second, for each of several random models."""
    monkeypatch.setattr(words_, 'PROMPTS', words_.ESTIMATION)
    monkeypatch.setattr(words_, 'NOUNS', ['nurse', 'table', 'music', 'chair'])
    s = toy_subject(k, block_size=64)
    for seed in range(3):
        torch.manual_seed(seed)
        for p in s.model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        none, whole, best = (row[1] for row in words_.gender_rows(s, None))
        assert 1 <= best <= min(none, whole) + 1e-6


def test_the_sense_is_the_one_that_most_separates_she_from_he(monkeypatch):
    """Over the tokens of all nouns, |C_l . (E_she - E_he)| is largest in the mean for the sense that the
    table names; --sense takes another."""
    monkeypatch.setattr(words_, 'NOUNS', ['nurse', 'table', 'zz'])
    s = toy_subject(block_size=64)
    E, encoding = s.model.wte.weight, s.encoding
    she, he = (word_id(encoding, word) for word in ('she', 'he'))
    tokens = [token for noun in words_.NOUNS for token in encoding.encode_ordinary(' ' + noun)]
    assert len(tokens) > 3  # zz is several
    gaps = [[abs(C[l] @ E[she] - C[l] @ E[he]).item() for l in range(4)]
            for C in s.model.senses(torch.tensor(tokens))]
    best = max(range(4), key=lambda l: sum(gap[l] for gap in gaps))
    assert words_.gender_rows(s, None)[1][0] == f'Backpack toy, without sense {best}'
    assert words_.gender_rows(s, 1)[1][0] == 'Backpack toy, without sense 1'


def test_reduction_counts_from_the_excess_over_one(monkeypatch):
    """From ratios 4.34, 2.88 and 2.16 the paper computes reductions of 44% and 65%."""
    ratios = iter([torch.tensor(0), torch.tensor([4.34, 2.88, 2.16]).double()])
    monkeypatch.setattr(words_, 'NOUNS', ['nurse'])
    monkeypatch.setattr(words_, 'bias_ratio', lambda *_: next(ratios))
    rows = words_.gender_rows(toy_subject(block_size=64), 1)
    assert [row[2] for row in rows] == [None, pytest.approx(43.7, abs=0.05), pytest.approx(65.3, abs=0.05)]


def test_affinities_are_the_affinity_of_each_bag():
    """Several bags scored at once give each its own scores."""
    s = toy_subject()
    bags = [[3, 7], [5], [260, 9, 11]]
    each = torch.stack([affinity(s.model, bag) for bag in bags])
    torch.testing.assert_close(affinities(s.model, bags), each)


def test_the_topic_of_a_text_is_that_of_most_of_its_words():
    """Two of music against one of food is music; one each, or none, is no topic."""
    topics = {'music': ['song', 'jazz'], 'food': ['soup'], 'other': ['yarn']}
    assert topics_py.judge('a song with soup and jazz'.split(), topics) == 'music'
    assert topics_py.judge('soup song'.split(), topics) is None and topics_py.judge(['rain'], topics) is None


def test_texts_are_read_up_to_their_end():
    """Shares are over the words before end-of-text; log-probabilities are those of the tokens, its end
    included."""
    s = toy_subject()
    eot = s.encoding.eot_token
    text = s.encoding.encode_ordinary(' music guitar song the')
    idx = torch.tensor([[eot, *text, eot, *text[:2]], [eot, *text[2:], *text[2:], *text[2:], 7][:8]])
    idx = idx[:, :7]
    topics = {'music': ['music', 'guitar'], 'sports': ['song']}
    found = topics_py.read_texts(s, idx, 'music', topics)
    assert (found['texts'], found['right'], found['words'], found['tokens']) == (2, 1, 10, 11)
    assert (found['of_topic'], found['of_bag']) == (2, 1)
    pairs = [([eot], [*text, eot]), ([eot], idx[1, 1:].tolist())]
    assert found['logp'] == pytest.approx(likely.score(s, pairs, '')[0].sum().item(), abs=1e-4)


def test_a_transformer_that_reads_token_by_token_is_the_same_transformer():
    """Logits from kept keys and values equal those of a pass over the whole text, to 1e-5."""
    s = toy_subject(k=0, n_layer=3)
    idx = torch.randint(s.encoding.n_vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    past = torch.zeros(3, 2, 2, 2, 0, 8)
    with torch.no_grad():
        whole = s.model(idx)[0]
        for t in range(9):
            logits, past = topics_py.read_on(s.model, idx[:, t], past)
            torch.testing.assert_close(logits, whole[:, t], atol=1e-5, rtol=1e-5)


def test_pplm_without_a_step_is_plain_sampling_and_steps_raise_the_bag():
    """At step 0 the draws are those of generate with the same seed; steering raises the probability of the
    bag in every text, a larger step more, and changes the draws."""
    s = toy_subject(k=0, n_layer=2)
    eot, bag = s.encoding.eot_token, [word_id(s.encoding, word) for word in ('music', 'guitar')]
    torch.manual_seed(3)
    start = torch.full((5, 1), eot)
    plain = topics_py.pplm(s.model, start, bag, 0.0, 12)
    torch.manual_seed(3)
    assert torch.equal(plain, s.model.generate(start, 12))
    past = torch.randn(2, 2, 5, 2, 6, 8)
    token, mass = plain[:, 3], []
    before = topics_py.read_on(s.model, token, past)[0].softmax(-1).detach()
    for step in (0.0, 0.05, 0.2):
        moved = topics_py.steer(s.model, token, past, torch.tensor(bag), before, step)
        mass.append(topics_py.read_on(s.model, token, moved)[0].softmax(-1)[:, bag].sum(-1).detach())
    torch.testing.assert_close(mass[0], before[:, bag].sum(-1))
    assert (mass[1] > mass[0]).all() and (mass[2] > mass[1]).all()
    torch.manual_seed(3)
    assert not torch.equal(plain, topics_py.pplm(s.model, start, bag, 10.0, 12))


def test_pages_and_words_of_wikitext():
    """Articles begin at " = Title = " and not at deeper headings; a page keeps its words; the detokenizer
    undoes WikiText's spacing."""
    text = (' \n = One = \n \n It is 1 @,@ 000 km , " so far " . \n = = Deeper = = \n more \n'
            ' = Two = \n end \n')
    pages = likely.pages_of(text)
    assert len(pages) == 2 and pages[0].startswith(' = One = ') and ' = = Deeper = = ' in pages[0]
    assert len(re.split(r'\s+', pages[0])) == 23 and len(re.split(r'\s+', pages[1])) == 6
    assert likely.detokenize(pages[0]) == ' = One =\n\nIt is 1,000 km, "so far".\n== Deeper ==\nmore '
    assert likely.detokenize(" two cats ' hats ; a ( so @-@ called ) dog ") \
        == " two cats' hats; a (so-called) dog "
    assert likely.detokenize(" the word , x . , y ") == " the word, x., y "


def test_functions_are_timed_in_turn():
    """After two calls of each to warm up both are called alternately, as often as fits into the budget, 3 to
    100 times; the times come in the order of the functions."""
    calls = []

    def work(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    both = [partial(work, 'fast', 0.001), partial(work, 'slow', 0.02)]
    fast, slow = timing_py.alternate(both, 'cpu', 0.0, '')
    assert calls == ['fast', 'slow'] * 5 and len(fast) == len(slow) == 3
    assert max(fast) < 0.02 <= min(slow)
    assert 3 < len(timing_py.alternate(both, 'cpu', 0.3, '')[0]) <= 15
    assert len(timing_py.alternate([int], 'cpu', 9.0, '')[0]) == 100


def test_the_timing_table_has_means_in_ms_and_the_ratio_of_medians(monkeypatch):
    """Of 1, 2, 9 s for the first and 1, 1, 4 s for the second: 4,000 and 2,000 ms, ratio 2; of generation, a
    32nd of it a token, or a 16th where one at each of 16 places is made. Memory is that of one step each."""
    times = [(1.0, 2.0, 9.0), (1.0, 1.0, 4.0)]
    monkeypatch.setattr(timing_py, 'alternate', lambda works, *_: times[:len(works)])
    monkeypatch.setattr(timing_py, 'cost_of_step', lambda config, *_: (1.0, 2e9 if config.n_sense else 1e9))
    table = timing_py.timing_table([toy_subject(block_size=64)], Namespace(device='cpu', size=None))
    assert [row[1:] for row in table.rows] == [
        *[[4000, 2000, 2, 3]] * 4, [4000 / 32, 2000 / 32, 2, 3], [4000 / 16, 2000 / 32, 4, 3]]
    assert 'Backpack 2.00 GB, Transformer 1.00 GB, ratio 2.00' in table.notes[1]


def test_what_is_timed_is_what_it_is_called():
    """The pairs that the timing table runs: both losses of a step, and forward passes with the table and
    without, agree; generation is timed over the second half of a text."""
    backpack, gpt = toy_subject(block_size=32).model, toy_subject(k=0, block_size=32).model
    pairs, table = timing_py.pairs_to_time(backpack, gpt, 2, 'cpu')
    given = {name: [work.args[-1] for work in works] for name, works, *_ in pairs}
    (ours, its), (ready, _), (step, _), (fast, plain), *_ = given.values()
    torch.testing.assert_close(backpack(**ready)[0], backpack(**ours)[0])
    assert ours['idx'] is its['idx'] is ready['idx'] and ours['idx'].shape == (2, 32)
    torch.testing.assert_close(gpt(**fast)[1], gpt(**plain)[1])
    assert step['loss_only'] and fast['loss_only'] and plain.keys() == {'idx', 'targets'}
    text, places = pairs[-1][1][0].args[1:]
    assert text.shape == (1, 32) and list(places) == list(range(16, 32)) and pairs[-1][2] == (16, 16)


def test_a_step_costs_more_memory_in_a_larger_model():
    """In a process of its own each: of the same shape, a model with four times the width takes more than
    twice the memory, and at least weights, gradients and two moments."""
    small, large = (Config(block_size=64, vocab_size=20000, n_layer=1, n_head=2, n_embd=d, n_sense=2)
                    for d in (64, 256))
    (_, a), (seconds, b) = (timing_py.cost_of_step(c, 2, 64, 'cpu') for c in (small, large))
    assert b > 2 * a and b > 16 * Backpack(large).n_params()['total'] and seconds > 0


def test_the_cost_table_grows_one_thing_at_a_time(monkeypatch):
    """Rows differ from the first in one of batch, length, senses and size; the operations are those of
    flops_per_token but for words that repeat."""
    monkeypatch.setattr(timing_py, 'cost_of_step', lambda config, *_: (2.0 if config.n_sense else 1.0, 10**9))
    table = timing_py.cost_table([], Namespace(device='cpu', size=None))
    assert table.rows[0][:7] == ['micro', 1, 512, 16, 2000, 1000, 2]
    assert all(sum(a != b for a, b in zip(row[:4], table.rows[0][:4])) == 1 for row in table.rows[1:])
    with torch.device('meta'):
        model = Backpack(Config(**tables.SIZES['micro']))
    words = timing_py.text_like(50257, 1, 512).unique().numel()
    matrices = (2 * 384 + 17 * 384) * 4 * 384  # of the sense network: d -> 4d -> d -> 4d -> k*d
    flops = 512 * model.flops_per_token() - 6 * matrices * (512 - words)
    assert table.rows[0][-2] == pytest.approx(flops / 1e9) and table.rows[0][-1] == table.rows[0][-2] / 2
    assert {row[0] for row in table.rows} == set(tables.SIZES) and max(row[2] for row in table.rows) == 4096


def test_a_training_step_trains_and_a_forward_pass_does_not():
    """After one step on a text its loss is lower; a forward pass leaves every weight as it was."""
    s, amp = toy_subject(), timing_py.in_numbers_of('cpu')
    idx = timing_py.text_like(s.encoding.n_vocab, 2, 20)
    before = s.model(idx, idx)[1].item()
    timing_py.forward_pass(s.model, amp, {'idx': idx})
    assert s.model(idx, idx)[1].item() == before
    timing_py.training_step(s.model, s.model.adamw(1e-3, 0.1, (0.9, 0.95)), amp, {'idx': idx, 'targets': idx})
    assert s.model(idx, idx)[1].item() < before


@pytest.mark.parametrize('size', ['micro', 'mini', 'small'])
def test_a_model_of_the_papers_shape_is_shown_beside_the_papers_numbers(size):
    """Backpack and Transformer of Table 9 with 512 tokens are recognised, others are not; Table 2's rows are
    theirs."""
    def subject(**change) -> table_.Subject:
        with torch.device('meta'):
            model = Backpack(Config(**tables.SIZES[size] | change))
        model.tokenizer = data_py.GPT2
        return table_.Subject('x', model, None)

    pair = [subject(), subject(n_sense=0)]
    assert [s.size for s in pair] == [size] * 2
    for change in ({'n_layer': 7}, {'block_size': 1024}, {'n_sense': 4}, {'sense_hidden': 128},
                   {'vocab_size': 811}):
        assert subject(**change).size is None
    blimp = {'micro': (75.6, 77.8), 'mini': (76.2, 80.4), 'small': (76.3, 81.9)}[size]
    name = size.capitalize()
    assert likely.paper_rows([*pair, subject(n_layer=7)], 4) == [
        [f"the paper's Backpack-{name}", blimp[0]], [f"the paper's Transformer-{name}", blimp[1]]]


# -----------------------------------------------------------------------------
# The text tables, on files made here, with GPT-2's vocabulary.


@pytest.fixture
def quick(monkeypatch):
    """Every function is timed three times only."""
    plain = timing_py.alternate
    monkeypatch.setattr(timing_py, 'alternate', lambda works, device, _, what: plain(works, device, 0, what))


@pytest.fixture(scope='module')
def random_pair(tmp_path_factory):
    """A folder with a random Backpack and Transformer of 50,257 words and d = 16, and data for all."""
    if not gpt2_known():
        pytest.skip("GPT-2's vocabulary cannot be had")
    folder = tmp_path_factory.mktemp('eval')
    for name, k in (('run', 4), ('run_gpt', 0)):
        save(folder / 'out' / name, small(k, seed=k), data_py.GPT2, 'words')
    encoding = data_py.load_tokenizer(data_py.GPT2)
    (folder / 'data' / 'words').mkdir(parents=True)
    np.array(encoding.encode_ordinary('Some words that are held out. ' * 9), 'uint16').tofile(
        folder / 'data' / 'words' / 'val.bin')
    bench = folder / 'bench'
    (bench / 'blimp').mkdir(parents=True)
    lambada = [{'text': 'He took the ball and threw the ball'}, {'text': 'She sang her favourite song'},
               {'text': 'It was antidisestablishmentarianism'}]
    (bench / 'lambada_test.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in lambada))
    (bench / 'wiki.test.raw').write_text(' \n = Cats = \n \n A cat , of course , sleeps . \n ' * 3)
    for name, term, rows in (('first', 'agreement', [('The cats sleep.', 'The cats sleeps.')]),
                             ('second', 'islands', [('Who left?', 'Left who?'), ('I ran.', 'Me ran.')])):
        (bench / 'blimp' / f'{name}.jsonl').write_text(''.join(json.dumps({
            'UID': name, 'linguistics_term': term, 'sentence_good': good, 'sentence_bad': bad}) + '\n'
            for good, bad in rows))
    (bench / 'SimLex-999.txt').write_text(
        'word1\tword2\tPOS\tSimLex999\r\nold\tnew\tA\t1.58\r\nbig\tlarge\tA\t9.5\r\ncat\tfeline\tN\t8\r\n')
    (bench / 'RG65.csv').write_text('cord;smile;0.02  \nrooster;voyage;0.04 \ncar;automobile;3.9\n')
    (bench / 'WS353.csv').write_text('Word 1,Word 2,Human (mean)\nlove,sex,6.77\ntiger,cat,7.35\na,b,2\n')
    (bench / 'SimVerb-3500.txt').write_text('take\tremove\tV\t6.81\tSYN\nwalk\ttrail\tV\t4.81\tCO\n')
    return folder


def rows_of(folder: Path, capsys, name: str, *argv: str) -> dict[str, list]:
    """The rows that a table writes as JSON, by their first cell."""
    say(capsys, name, *argv, '--json', 'numbers.json')
    content = json.loads(Path('numbers.json').read_text())['tables'][name]
    return {row[0]: row[1:] for row in content['rows']}


def test_lambada_by_hand(random_pair, capsys, monkeypatch):
    """Three passages: perplexity is exp of minus the mean over passages of the last word's summed
    log-probability, accuracy the share in which all of its tokens are the argmax."""
    monkeypatch.chdir(random_pair)
    rows = rows_of(random_pair, capsys, 'lambada', '--from', 'out/run', '--data', 'bench')
    encoding = data_py.load_tokenizer(data_py.GPT2)
    for name, k in (('Backpack out/run', 4), ('Transformer out/run_gpt', 0)):
        model, sums, hits = small(k, seed=k), [], []
        for context, word in (('He took the ball and threw the', ' ball'),
                              ('She sang her favourite', ' song'),
                              ('It was', ' antidisestablishmentarianism')):
            ids, asked = encoding.encode_ordinary(context), encoding.encode_ordinary(word)
            logits = model(torch.tensor([ids + asked]))[0][0, len(ids) - 1:-1].log_softmax(-1)
            sums.append(sum(logits[i, token].item() for i, token in enumerate(asked)))
            hits.append(logits.argmax(-1).tolist() == asked)
        assert rows[name] == [pytest.approx(math.exp(-sum(sums) / 3), rel=1e-4), 100 * sum(hits) / 3]


def test_blimp_by_hand(random_pair, capsys, monkeypatch):
    """Three pairs in two paradigms: a pair counts where the summed log-probability of the good sentence, from
    end-of-text on, is above that of the bad; the mean is over paradigms, not pairs. An archive of the same
    files gives the same."""
    monkeypatch.chdir(random_pair)
    rows = rows_of(random_pair, capsys, 'blimp', '--from', 'out/run', '--data', 'bench')
    encoding = data_py.load_tokenizer(data_py.GPT2)

    def logp(model, text):
        ids = [encoding.eot_token, *encoding.encode_ordinary(text)]
        logits = model(torch.tensor([ids]))[0][0].log_softmax(-1)
        return sum(logits[i, token].item() for i, token in enumerate(ids[1:]))

    for place, k in enumerate((4, 0)):
        model = small(k, seed=k)
        first = logp(model, 'The cats sleep.') > logp(model, 'The cats sleeps.')
        second = [logp(model, good) > logp(model, bad)
                  for good, bad in (('Who left?', 'Left who?'), ('I ran.', 'Me ran.'))]
        assert rows['agreement (1)'][place] == 100 * first
        assert rows['islands (1)'][place] == 100 * sum(second) / 2
        assert rows['mean of all (2)'][place] == pytest.approx(50 * (first + sum(second) / 2))
    with tarfile.open('blimp.tar.xz', 'w:xz') as tar:
        tar.add('bench/blimp', 'blimp')
    assert rows_of(random_pair, capsys, 'blimp', '--from', 'out/run', '--data', 'blimp.tar.xz') == rows


def test_wikitext_divides_by_the_words_of_the_original(random_pair, capsys, monkeypatch):
    """exp of the nats of all tokens of the detokenized pages over the words of the raw pages."""
    monkeypatch.chdir(random_pair)
    rows = rows_of(random_pair, capsys, 'wikitext', '--from', 'out/run', '--data', 'bench/wiki.test.raw')
    encoding, model = data_py.load_tokenizer(data_py.GPT2), small(4, seed=4)
    nats = words = tokens = 0
    for page in likely.pages_of(Path('bench/wiki.test.raw').read_text()):
        words += len(re.split(r'\s+', page))
        ids = encoding.encode_ordinary(likely.detokenize(page))
        assert len(ids) < 24  # one window
        x = torch.tensor([[encoding.eot_token, *ids[:-1]]])
        nats, tokens = nats + model(x, torch.tensor([ids]))[1].item() * len(ids), tokens + len(ids)
    want = [math.exp(nats / words), math.exp(nats / tokens)]
    assert rows['Backpack out/run'] == pytest.approx(want, rel=1e-4)


def test_every_table_runs_on_random_models(random_pair, quick, capsys, monkeypatch):
    """eval.py all goes through all tables with a Backpack and a Transformer of 50,257 words, from one folder
    of data, and writes the same numbers as JSON; the ablation is skipped, with a line, for want of runs, and
    the cost left out."""
    monkeypatch.chdir(random_pair)
    monkeypatch.setattr(words_, 'NOUNS', ['nurse', 'hairdresser'])
    for name in ('TOPICS', 'KEYWORDS'):  # two topics are enough
        both = {label: getattr(topics_py, name)[label] for label in ('music', 'family')}
        monkeypatch.setattr(topics_py, name, both)
    text = say(capsys, 'all', '--from', 'out/run', '--data', 'bench', '--texts', '1', '--length', '4',
               '--step-sizes', '0.05', '--json', 'all.json')
    found = json.loads(Path('all.json').read_text())['tables']
    assert [*found, 'ablation', *tables.NOT_IN_ALL] == list(tables.TABLES)
    assert re.search(r'\nablation: skipped, .*--n_sense', text) and 'Transformer out/run_gpt' in text
    assert all(row[1] is not None for name in found for row in found[name]['rows'])
    assert f'{found["lambada"]["rows"][0][1]:.1f}' in text and 'the best' in text
    assert not list(Path().glob('.*partial*'))


@needs_shared
@needs_gpt2
def test_the_real_data_files_are_read():
    """LAMBADA has 5,153 passages, WikiText 62 pages, BLiMP 67 paradigms of 1,000, and the sets of word pairs
    999, 3,500, 65 and 353."""
    s = table_.Subject('none', Namespace(config=Config(n_sense=0), tokenizer=data_py.GPT2, wte=small(0).wte),
                       data_py.load_tokenizer(data_py.GPT2))
    args = Namespace(data=str(SHARED), table='all')
    pairs = words_.similarity_data(s, args)
    assert {name: len(p) for name, p in pairs.items()} == {
        'SL999': 999, 'SV3500': 3500, 'RG65': 65, 'WS353': 353}
    archive = likely.benchmark(s, args, 'BLiMP', likely.is_blimp)
    counts = Counter(row['UID'] for row in likely.blimp_rows(archive))
    assert len(counts) == 67 and set(counts.values()) == {1000}
    assert sum(likely.is_blimp(path) for path in (SHARED / 'blimp' / 'sample').iterdir()) == 5
    assert len(likely.pages_of(table_.read_text(SHARED / 'wikitext' / 'wikitext-2-raw.test.txt'))) == 62
    assert sum(1 for _ in prepare.rows_of_files([str(SHARED / 'lambada' / 'lambada_test.jsonl')])) == 5153


# -----------------------------------------------------------------------------
# The toy world.


def test_the_tables_of_the_toy_world(toy, quick, capsys, monkeypatch):
    """On the trained toy model: the bias falls by more than 40% without the sense that is found, and p(they)
    rises; the senses order the world's pairs of words as it does, with a correlation above 0.7; text of a
    topic is rarer without control than at strength 2; English benchmarks are skipped with a line."""
    monkeypatch.chdir(toy)
    text = say(capsys, 'all', '--from', 'out/toy', '--texts', '40', '--length', '40', '--json', 'toy.json')
    found = {name: {row[0]: row[1:] for row in t['rows']}
             for name, t in json.loads(Path('toy.json').read_text())['tables'].items()}
    assert list(found) == ['loss', 'similarity', 'gender', 'topic', 'timing']
    for name in ('lambada', 'wikitext', 'blimp'):
        assert f'\n{name}: skipped, ' in text
    assert found['loss']['Backpack out/toy'][0] < 2.8
    (before, _, they), (after, reduction, they_after), _ = found['gender'].values()
    assert reduction > 40 and reduction == pytest.approx(100 * (before - after) / (before - 1))
    assert they_after > they
    for column in (0, 1):
        assert max(row[column] for name, row in found['similarity'].items() if name.startswith('sense')) > 0.7
    topic = found['topic']
    assert topic['Backpack out/toy, strength 2'][2] > topic['Backpack out/toy, strength 0'][2]


def test_runs_with_other_numbers_of_senses_are_collected(toy, capsys, monkeypatch, tmp_path):
    """The ablation takes the runs of the same shape in out/, sorted by senses, and no Transformer; named runs
    are taken as they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').symlink_to(toy / 'data')
    tokenizer = json.loads((toy / 'data' / 'toy' / 'meta.json').read_text())['tokenizer']
    for name, k, shape in (('a', 4, {}), ('b', 2, {}), ('gpt', 0, {}), ('wide', 2, {'n_embd': 32})):
        save(tmp_path / 'out' / name, small(k, vocab_size=811, **shape), tokenizer, 'toy')
    monkeypatch.setattr(likely, 'loss_of', lambda s, ids: float(s.model.config.n_sense))
    found = rows_of(tmp_path, capsys, 'ablation', '--from', 'out/a')
    assert list(found) == ['out/b', 'out/a'] and [row[0] for row in found.values()] == [2, 4]
    n = sum(p.numel() for p in small(4, vocab_size=811).parameters())
    assert found['out/a'][1] == pytest.approx(n / 1e6)
    assert list(rows_of(tmp_path, capsys, 'ablation', 'out/wide', 'out/a')) == ['out/wide', 'out/a']
    save(tmp_path / 'out' / 'other', small(2, vocab_size=811), tokenizer, 'other')
    shutil.copytree(toy / 'data' / 'toy', tmp_path / 'other')
    assert 'different data' in error_of(capsys, 'ablation', 'out/a', 'out/other')
    found = rows_of(tmp_path, capsys, 'ablation', 'out/other', 'out/a', '--data', 'toy')
    assert list(found) == ['out/other', 'out/a']


def test_a_table_of_runs_says_how_much_each_has_seen(tiny, capsys):
    """The ablation's tokens are steps x tokens of a step, of the state that is read."""
    for k in (2, 4):
        train.main([*conftest.SMALL, f'--n_sense={k}', f'--max_iters={k}', f'--out_dir=out/{k}',
                    '--gradient_accumulation_steps=3'])
    found = rows_of(tiny, capsys, 'ablation', 'out/2', 'out/4')
    assert [row[3] for row in found.values()] == [k * 4 * 3 * 8 / 1e6 for k in (2, 4)]


def test_the_best_is_compared_with_the_best(tiny, capsys):
    """The baseline of a file is the file of that name in the folder beside, of a folder the folder beside."""
    for model, out in (('backpack', 'out/run'), ('gpt', 'out/run_gpt')):
        train.main([*conftest.SMALL, f'--model={model}', '--max_iters=4', f'--out_dir={out}'])
    for file in ('', '/best.pt'):
        found = rows_of(tiny, capsys, 'loss', '--from', f'out/run{file}')
        assert list(found) == [f'Backpack out/run{file}', f'Transformer out/run_gpt{file}']


# -----------------------------------------------------------------------------
# Pictures.


def lines_of(path: str) -> dict[str, list[tuple[float, float]]]:
    """The named lines of a picture: name -> points in pixels."""
    root = ElementTree.parse(path).getroot()
    svg = '{http://www.w3.org/2000/svg}'
    paths = [p for p in root.iter(f'{svg}path') if p.get('opacity') is None]
    drawn = [[tuple(map(float, point.split())) for point in p.get('d')[1:].split('L')]
             for p in paths if 'h' not in p.get('d')]
    names = [t.text for t in root.iter(f'{svg}text') if t.get('x') == '622']
    return dict(zip(names, drawn, strict=True))


def test_losses_are_drawn_where_the_log_has_them(tiny, capsys):
    """Each run's line goes through (tokens, validation loss) of its log, on a logarithmic axis; a
    Transformer's is dashed; a name is text, whatever it holds."""
    train.main([*conftest.SMALL, '--max_iters=6', '--eval_interval=2', '--out_dir=out/<b>&"'])
    train.main([*conftest.SMALL, '--max_iters=8', '--eval_interval=2', '--model=gpt', '--out_dir=out/gpt',
                '--gradient_accumulation_steps=2'])
    text = say(capsys, 'plot', 'out/<b>&"', 'out/gpt', '--out', 'loss.svg')
    lines = lines_of('loss.svg')
    assert list(lines) == ['Backpack out/<b>&"', 'Transformer out/gpt']
    assert Path('loss.svg').read_text().count('stroke-dasharray') == 3  # its two lines, and in the legend
    points = {}
    for name, tokens in zip(lines, (32, 64)):
        folder = name.split()[1]
        points[name] = [(int(row['step']) * tokens, math.log(float(row['val_loss'])))
                        for row in conftest.log(folder) if row['val_loss']]
        assert f'{math.exp(points[name][-1][1]):.3f}' in text
    pixels, values = (np.array([point for name in lines for point in of[name]]) for of in (lines, points))
    assert len(pixels) == 4 + 5
    assert (pixels[:, 0].min(), pixels[:, 0].max()) == (70, 570)
    assert 50 <= pixels[:, 1].min() and pixels[:, 1].max() <= 400
    for axis in (0, 1):  # pixels are a linear function of tokens and of the logarithm of the loss
        fit = np.polynomial.Polynomial.fit(values[:, axis], pixels[:, axis], 1)
        assert np.abs(fit(values[:, axis]) - pixels[:, axis]).max() < 0.1
        assert (fit.convert().coef[1] > 0) == (axis == 0)  # y grows downwards
    assert not re.search('href|src|url|http(?!://www.w3.org/2000/svg")', Path('loss.svg').read_text())


def test_a_sweep_is_drawn_as_figure_3(toy, capsys, monkeypatch):
    """The lines of the next words go through their probabilities under scale_senses at 21 weights."""
    monkeypatch.chdir(toy)
    say(capsys, 'plot', '--sweep', 'nurse:0,1', '--out', 'sweep.svg', '--from', 'out/toy', '--start',
        'The nurse said that')
    s, lines = table_.load('out/toy', 'cpu'), lines_of('sweep.svg')
    idx = torch.tensor([s.encoding.encode_ordinary('The nurse said that')])
    nurse = word_id(s.encoding, 'nurse')
    with torch.no_grad():
        probs = torch.stack([s.model(idx, edit=scale_senses([nurse], [0, 1], i / 20))[0][0, -1].softmax(-1)
                             for i in range(21)])  # (21, V)
    words = {name: s.encoding.encode_ordinary(eval_literal(name))[0] for name in lines}
    assert set(words.values()) == set((probs.amax(0) >= 0.01).nonzero()[:, 0].tolist())
    y = np.array([py for name in lines for _, py in lines[name]])
    p = np.array([probs[i, words[name]].item() for name in lines for i in range(21)])
    fit = np.polynomial.Polynomial.fit(p, y, 1)
    assert np.abs(fit(p) - y).max() < 0.1
    assert all([px for px, _ in points][::10] == [70, 320, 570] for points in lines.values())


@pytest.mark.parametrize('low, high', [
    (0, 1), (0.2, 0.9), (1e-7, 3e-7), (0, 4_096_000), (3.1, 11), (-2, 7e9)])
def test_axes_have_a_few_round_numbers(low, high):
    """Between 2 and 7 numbers from low to high, each one, two or five times a power of ten apart."""
    steps = plot_py.round_steps(low, high)
    assert 2 <= len(steps) <= 7 and low <= steps[0] + 1e-12 and steps[-1] <= high * (1 + 1e-9)
    apart = steps[1] - steps[0]
    assert round(apart / 10 ** math.floor(math.log10(apart) + 1e-9), 6) in (1, 2, 5)


@pytest.mark.parametrize('rows, settings', [
    ('', {}), ('1,3.0,,', {}), ('x,,3.0,', {}), ('1,,nan,', {}), ('1,,1e308,', {}), ('1,,5e-324,', {}),
    ('1e308,,3.0,', {}), ('-1,,3.0,', {}), ('1,,3.0,', {'batch_size': 1e308}), ('1,,3.0,', {'model': 7}),
    ('1,,3.0,', {'batch_size': 'x'}), ('1,,3.0,', {'batch_size': -1}),
    ('1,,3.0,', {'block_size': torch.ones(2)})])
def test_a_log_that_cannot_be_drawn_is_one_line(tiny, capsys, rows, settings):
    """A log without a loss that could be one, and settings that are none, give no picture."""
    Path('run').mkdir()
    torch.save({'settings': settings}, 'run/ckpt.pt')
    Path('run/log.csv').write_text(f'step,loss,val_loss,mfu\n{rows}\n')
    assert 'run is no run' in error_of(capsys, 'plot', 'run', '--out', 'x.svg')
    assert not Path('x.svg').exists()


@pytest.mark.parametrize('losses', [[3.0], [3.0, 3.0], [3.0, 3.0 * (1 + 1e-15)], [9e5, 4e-3], [2e-6, 3e-6]])
def test_any_losses_are_drawn(tiny, capsys, losses):
    """One loss, equal ones and those decades apart lie inside a picture, beside round numbers that do not run
    into each other; a run's name may hold what no file of text can, and twenty names have room."""
    name = os.fsdecode(b'r\xff\x01')
    Path(name).mkdir()
    torch.save({'settings': {}}, f'{name}/ckpt.pt')
    rows = ''.join(f'{i},,{loss},\n' for i, loss in enumerate(losses))
    Path(f'{name}/log.csv').write_text(f'step,loss,val_loss,mfu\n{rows}')
    say(capsys, 'plot', name, '--out', 'x.svg')
    ((label, points),) = lines_of('x.svg').items()
    assert label == 'Backpack r  ' and len(points) == len(losses)
    assert all(70 <= x <= 570 and 50 <= y <= 400 for x, y in points)
    numbers = [float(y) for y in re.findall(r'<text x="62" y="(.*?)"', Path('x.svg').read_text())]
    assert numbers and all(a - b >= 12 for a, b in zip(numbers, numbers[1:]))
    say(capsys, 'plot', *[name] * 20, '--out', 'x.svg')
    text = Path('x.svg').read_text()
    last = max(int(y) for y in re.findall(r'<text x="622" y="(\d+)"', text))
    assert text.count('x="622"') == 20 and last < int(re.search(r'viewBox="0 0 820 (\d+)"', text)[1])


def test_a_sweep_of_unlikely_words_is_drawn(random_pair, capsys, monkeypatch):
    """Where no next word reaches 1% the likeliest are drawn."""
    monkeypatch.chdir(random_pair)
    text = say(capsys, 'plot', '--sweep', 'the:0', '--from', 'out/run', '--out', 'sweep.svg')
    assert 'not a word of the prompt' not in text
    text = say(capsys, 'plot', '--sweep', 'table:0', '--from', 'out/run', '--out', 'sweep.svg')
    assert 'sense 0 of table (not a word of the prompt)' in text
    assert len(lines_of('sweep.svg')) >= 1


# -----------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize('argv, words', [
    ('gendre', 'invalid choice'), ('loss --texts 3', '--texts: only with topic'),
    ('topic --texts 0', 'from 1 to'), ('topic --step-sizes -1', 'from 0 to 1000'),
    ('loss --json no/such/x.json', 'no folder'), ('loss --json .', 'is no file'),
    ('loss --json /dev/full', 'is no file'), ('wikitext --data one.jsonl', 'no articles'),
    ('loss --data bench/lambada_test.jsonl', 'no folder with val.bin'),
    ('loss --data half', 'has 3 bytes, not 1 tokens of 2'),
    ('loss --sense 0', 'only with gender'), ('topic --seed 99999999999999', '--seed'),
    ('loss --data data/none/val.bin', 'data/none/val.bin is no .bin'), ('loss --data odd', 'damaged'),
    ('gender --sense 99', 'senses 0 to 3'),
    ('loss out/run', 'runs: only with ablation and plot'), ('timing --size small --from x', '--size'),
    ('loss --from out/nothing', 'out/nothing'), ('loss --data nothing', 'prepare.py nothing'),
    ('lambada --data empty', 'lambada_test.jsonl'), ('wikitext --data empty', 'wikitext-2-raw-v1.zip'),
    ('blimp --data empty', 'git clone'), ('similarity --data empty', 'SimLex-999.txt'),
    ('similarity', 'SimLex-999.txt'), ('lambada --data bad.jsonl', 'bad.jsonl, line 2'),
    ('lambada --data one.jsonl', 'two words'), ('blimp --data bad.jsonl', 'bad.jsonl, line 1'),
    ('similarity --data bad/RG65.csv', 'RG65.csv, line 2'), ('blimp --data blimp.tar', 'holds no BLiMP'),
    ('similarity --from out/run_gpt', 'no senses'), ('gender --from out/run_gpt', 'no senses'),
    ('topic --from out/run_gpt', 'no senses'), ('ablation out/run out/run_gpt', 'no senses'),
    ('loss --baseline out/run', 'takes a Transformer'), ('gender --from nopronouns', "'she' is no"),
    ('loss --baseline nopronouns_gpt', 'different vocabularies'),
    ('loss --data data/other', 'another vocabulary'), ('loss --device gpu', 'cannot be used'),
    ('ablation', '--n_sense'), ('plot', 'either runs or'), ('plot out/run', '--out FILE.svg'),
    ('plot out/run --out x.svg', 'no run with ckpt.pt and log.csv'), ('plot out/run --out x.png', 'in .svg'),
    ('plot out/none --out x.svg', 'out/none is no run'), ('plot out/run --out no/x.svg', 'no folder'),
    ('plot --sweep nurse:9 --out x.svg', 'no sense 9'), ('loss --out x.svg', '--out: only with plot'),
    ('plot out/run --sweep nurse:1 --out x.svg', 'either runs or'),
    ('plot --sweep the:1 --out x.svg --from out/run_gpt', 'no senses'),
    ('plot --sweep the:1 --out x.svg --baseline out/run_gpt', 'no --baseline'),
    ('plot --sweep the:1 --out x.svg --json x.svg', 'one file')])
def test_bad_input_is_one_line_and_exit_code_2(random_pair, capsys, monkeypatch, argv, words):
    """What was given, what is allowed, what to run; the file and the line where one is malformed."""
    monkeypatch.chdir(random_pair)
    argv = argv.split()
    if not Path('empty').exists():
        for name in ('empty', 'bad', 'data/other'):
            Path(name).mkdir()
        Path('bad.jsonl').write_text('{"text": "fine words"}\n{"text": 3}\n')
        Path('one.jsonl').write_text('{"text": "word"}\n')
        Path('blimp.tar').write_text('no tar')
        Path('bad/RG65.csv').write_text('cord;smile;0.02\nrooster;voyage;many\n')
        tokenizer = toy_py.toy_tokenizer(['just some words'])
        for name, k in (('nopronouns', 4), ('nopronouns_gpt', 0)):
            n = data_py.load_tokenizer(tokenizer).n_vocab
            save(Path(name), small(k, vocab_size=n), tokenizer)
        np.zeros(9, 'uint16').tofile('data/other/val.bin')
        for name in ('odd', 'half'):
            (Path('data') / name).mkdir()
        Path('data/half/val.bin').write_bytes(b'odd')
        np.zeros(9, 'uint16').tofile('data/odd/val.bin')
        Path('data/odd/meta.json').write_text(json.dumps(
            {'tokenizer': data_py.GPT2, 'dtype': 'float32', 'vocab_size': 50257}))
        Path('data/other/meta.json').write_text(json.dumps({
            'tokenizer': tokenizer, 'dtype': 'uint16', 'vocab_size': data_py.vocabulary_of(tokenizer),
            'tokens': {'train': 0, 'val': 9}, 'sha256': {'train': '0' * 64, 'val': '0' * 64}}))
    source = [] if {'--from', 'plot'} & {*argv} else ['--from', 'out/run']
    assert words in error_of(capsys, *argv, *(source if '--size' not in argv else []))


def test_all_tables_go_on_where_one_file_is_malformed(random_pair, capsys, monkeypatch):
    """all prints the tables it can, says which one it skips, and leaves with exit code 2 where a file is
    wrong rather than missing."""
    monkeypatch.chdir(random_pair)
    Path('mixed').mkdir()
    Path('mixed/lambada_test.jsonl').write_text('{"text": 3}\n')
    Path('mixed/wiki.test.raw').write_text(Path('bench/wiki.test.raw').read_text())
    monkeypatch.setattr(tables, 'TABLES', {name: tables.TABLES[name] for name in ('lambada', 'wikitext')})
    with pytest.raises(SystemExit) as stop:
        tables.main(['all', '--from', 'out/run', '--data', 'mixed'])
    shown, error = capsys.readouterr()
    assert stop.value.code == 2 and 'lambada_test.jsonl, line 1' in error and error.count('\n') == 1
    assert 'lambada: skipped, ' in shown and 'WikiText (Table 2)' in shown


def test_lines_may_end_as_on_windows(random_pair, capsys, monkeypatch):
    """WikiText and word pairs with CRLF and a byte order mark give the same numbers."""
    monkeypatch.chdir(random_pair)
    Path('windows').mkdir()
    for name in ('wiki.test.raw', 'RG65.csv'):
        text = Path('bench', name).read_bytes().replace(b'\n', b'\r\n')
        Path('windows', name).write_bytes(b'\xef\xbb\xbf' + text)
    for name, file in (('wikitext', 'wiki.test.raw'), ('similarity', 'RG65.csv')):
        numbers = [rows_of(random_pair, capsys, name, '--from', 'out/run', '--data', f'{folder}/{file}')
                   for folder in ('bench', 'windows')]
        assert numbers[0] == numbers[1]


def test_a_hub_that_cannot_be_reached_is_one_line(random_pair, capsys, monkeypatch):
    """Without --data a benchmark is asked of the Hub; the error says which dataset, and what else to do."""
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError('no network')

    monkeypatch.chdir(random_pair)
    monkeypatch.setattr(datasets, 'load_dataset', unreachable)
    monkeypatch.setattr(datasets, 'get_dataset_config_names', unreachable)
    for name, repo in (('lambada', 'EleutherAI/lambada_openai'), ('blimp', 'nyu-mll/blimp'),
                       ('wikitext', 'EleutherAI/wikitext_document_level')):
        text = error_of(capsys, name, '--from', 'out/run')
        assert repo in text and 'no network' in text and '--data' in text


def test_rows_from_the_hub_are_those_of_files(random_pair, capsys, monkeypatch):
    """Datasets as the Hub gives them lead to the same numbers as the local files."""
    import datasets
    monkeypatch.chdir(random_pair)
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        if 'lambada' in name:
            return [json.loads(line) for line in open('bench/lambada_test.jsonl')]
        if 'wikitext' in name:
            return [{'page': page} for page in likely.pages_of(Path('bench/wiki.test.raw').read_text())]
        return [json.loads(line) for line in open(f'bench/blimp/{config}.jsonl')]

    monkeypatch.setattr(datasets, 'load_dataset', load)
    monkeypatch.setattr(datasets, 'get_dataset_config_names', lambda name: ['first', 'second'])
    for name in ('lambada', 'wikitext', 'blimp'):
        local = rows_of(random_pair, capsys, name, '--from', 'out/run', '--data', 'bench')
        assert rows_of(random_pair, capsys, name, '--from', 'out/run') == local
    assert {('EleutherAI/lambada_openai', 'default', 'test'), ('nyu-mll/blimp', 'first', 'train'),
            ('EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test')} == {
                ask for ask in asked if ask[1] != 'second'}
