"""Claims about rucksack/words.py: similarity and gender, by hand."""

import math

import pytest
import torch
from conftest import SHARED
from subjects import flags, toy_subject
from torch.nn import functional as F

from rucksack import words
from rucksack.grammar import word_id
from senses import compose, scale_senses


def test_spearman_with_ties_is_the_known_value():
    """The ranks are, by hand, (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5), and their correlation 6 / 9.5."""
    x, y = torch.tensor([1.0, 2, 2, 4, 5]), torch.tensor([3.0, 1, 2, 5, 5])
    assert words.spearman(x, y) == pytest.approx(6 / 9.5)
    assert words.spearman(x, -x) == pytest.approx(-1) and math.isnan(words.spearman(x, torch.ones(5)))


def test_similarity_is_the_cosine_of_each_sense():
    """Eq. 13, 14 and the embeddings by hand; a word of several tokens is their mean."""
    s = toy_subject()
    ids = [torch.tensor(s.encode(f' {word}')) for word in ('nurse', 'xy')]  # xy: bytes
    cosines = F.cosine_similarity(*(s.model.senses(word).mean(0) for word in ids)).tolist()
    embeddings = F.cosine_similarity(*(s.model.wte(word).mean(0) for word in ids), dim=0).item()
    found = torch.stack([*words.similarities(s, [('nurse', 'xy', 1.0)]).values()])
    assert found.tolist() == [[pytest.approx(x, abs=1e-5)] for x in (*cosines, min(cosines), embeddings)]


@pytest.mark.skipif(not SHARED.is_dir(), reason='the real data files are not here')
def test_the_real_pairs_are_read():
    """SimLex-999, SimVerb-3500, RG65 and WS353 have as many pairs as their names say."""
    found = words.similarity_data(toy_subject(), flags(SHARED))
    assert [*map(len, found.values())] == [int(name.lstrip('RGSLVW')) for name in found] and len(found) == 4


def test_bias_ratio_of_a_made_distribution():
    """p(she), p(he) of (0.6, 0.2) and (0.1, 0.5) give the ratios 3 and 5, mean 4."""
    logits = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4]]).log() + torch.tensor([[3.0], [-2]])
    assert words.bias_ratio(logits, 0, 1).item() == pytest.approx(4)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """The logits for every fraction, computed from two passes, equal a pass with that factor as an edit."""
    s, same = toy_subject(), compose([])
    noun, (idx, last) = s.encode(' nurse'), words.prompts_of(s, 'nurse', ['the {} said', 'that {}'])
    for fraction, logits in zip(words.FRACTIONS, words.without_sense(s.model, idx, last, noun, 2, same)):
        want = s.model(idx, C=scale_senses(noun, [2], 1 - fraction)(idx, s.model.senses(idx)))
        torch.testing.assert_close(logits, want[[0, 1], last], atol=1e-5, rtol=1e-4)


def test_projection_takes_the_direction_from_the_noun_alone():
    """Logits equal those of a changed input embedding of the noun, at last orthogonal to E_he - E_she."""
    s = toy_subject(k=0)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    (idx, last), E = words.prompts_of(s, 'nurse', ['the {} said', 'that {}']), s.model.wte.weight.detach()
    v = E[he] - E[she]
    for fraction, logits in zip(words.FRACTIONS, words.without_direction(s.model, idx, last, [noun], v)):
        changed = E.clone()
        changed[noun] -= fraction * (E[noun] @ v) / (v @ v) * v
        want = s.model.project(s.model.contextualizer(changed[idx])[[0, 1], last])
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)
    assert abs(changed[noun] @ v) < 1e-5


@pytest.mark.parametrize('k', [4, 0])
def test_the_best_fraction_is_never_worse_than_none_or_all_where_it_was_chosen(k, monkeypatch):
    """On the prompts of the estimate the third row is the lowest; a reduction is of the excess over 1."""
    monkeypatch.setattr(words, 'PROMPTS', words.ESTIMATION)
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'table', 'music', 'chair'])
    for seed in range(3):
        (_, a, *_), (_, b, fall, *_), (_, c, *_) = words.gender_rows(toy_subject(k, seed=seed, block_size=64))
        assert 1 <= c <= min(a, b) + 1e-6 and fall == pytest.approx(100 * (a - b) / (a - 1))


def test_gender_has_the_mean_over_all_nouns_and_over_those_of_one_piece(monkeypatch):
    """The columns of one piece are those of a run with these nouns alone; they is relative to she and he."""
    s, rows = toy_subject(block_size=128), []
    for nouns in (['nurse', 'sheriff', 'music'], ['nurse', 'music']):  # sheriff is spelled
        monkeypatch.setattr(words, 'NOUNS', nouns)
        rows.append(words.gender_rows(s)[0])
    assert rows[0][3] == pytest.approx(rows[1][1]) != rows[0][1] and rows[0][4] is rows[0][2] is None
    p = torch.stack([s.model(idx)[range(len(last)), last, :s.encoding.n_vocab].softmax(-1) for idx, last in (
        words.prompts_of(s, noun, words.PROMPTS) for noun in nouns)]).double()
    she, he, they = (p[..., word_id(s.encoding, word)] for word in ('she', 'he', 'they'))
    want = [100 * they.mean().item(), 100 * (they / (she + he)).mean().item()]
    assert rows[1][5:] == pytest.approx(want, rel=1e-4)


def test_where_no_noun_is_one_piece_all_choose_the_sense(monkeypatch):
    """With nouns of several pieces alone, the sense taken off is still the one that leaves least."""
    monkeypatch.setattr(words, 'NOUNS', ['xy', 'yz'])
    for seed in range(3):
        s, left = toy_subject(seed=seed, block_size=128), []
        she, he = (word_id(s.encoding, word) for word in ('she', 'he'))
        for l in range(4):
            left.append(0)
            for noun in words.NOUNS:
                args = *words.prompts_of(s, noun, words.ESTIMATION), s.encode(f' {noun}'), l, compose([])
                left[l] += words.bias_ratio(words.without_sense(s.model, *args)[-1], she, he).item()
        assert words.gender_rows(s)[1][0].endswith(f'without sense {left.index(min(left))}')


def test_the_sense_that_is_taken_off_is_the_one_that_leaves_least_in_the_other_prompts(monkeypatch):
    """Whatever the senses of the nouns say: each is turned off in the prompts of the estimate."""
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'music'])
    for seed in range(4):
        s, left = toy_subject(seed=seed, block_size=128), []
        she, he = (word_id(s.encoding, word) for word in ('she', 'he'))
        for l in range(4):
            ratios = []
            for noun in words.NOUNS:
                off = scale_senses([word_id(s.encoding, noun)], [l], 0.0)
                for prompt in words.ESTIMATION:
                    idx = torch.tensor([s.encode(prompt.format(noun))])
                    logits = s.model(idx, C=off(idx, s.model.senses(idx)))[0, -1]
                    ratios.append((logits[she] - logits[he]).abs().exp().item())
            left.append(sum(ratios))
        assert words.gender_rows(s)[1][0].endswith(f'without sense {left.index(min(left))}')
