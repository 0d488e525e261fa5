"""Claims about rucksack/words.py: similarity and gender, by hand."""

import math

import pytest
import torch
from conftest import SHARED
from subjects import flags, toy_subject
from torch.nn import functional as F

from rucksack import words
from rucksack.common import UserError
from rucksack.grammar import word_id
from senses import scale_senses


def test_spearman_with_ties_is_the_known_value():
    """Ranks of equal numbers are averaged: for (1, 2, 2, 4, 5) and (3, 1, 2, 5, 5), by hand, the ranks are
    (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5), and their correlation is 6 / 9.5."""
    x, y = torch.tensor([1.0, 2, 2, 4, 5]), torch.tensor([3.0, 1, 2, 5, 5])
    assert words.spearman(x, y) == pytest.approx(6 / 9.5)
    assert words.spearman(x, -x) == pytest.approx(-1) and math.isnan(words.spearman(x, torch.ones(5)))


def test_similarity_is_the_cosine_of_each_sense():
    """Eq. 13, 14 and the embeddings by hand; a word of several tokens is their mean."""
    s = toy_subject()
    for a, b in (('nurse', 'she'), ('nurse', 'xy')):  # xy: ' x' is no token, so bytes
        ids = [torch.tensor(s.encode(f' {word}')) for word in (a, b)]
        senses = F.cosine_similarity(*(s.model.senses(word).mean(0) for word in ids)).tolist()
        embeddings = F.cosine_similarity(*(s.model.wte(word).mean(0) for word in ids), dim=0).item()
        found = words.similarities(s, [(a, b, 1.0)])
        assert list(found) == [*(f'sense {l}' for l in range(4)), 'minimum', 'embeddings, Backpack toy']
        assert torch.cat([*found.values()]).tolist() == pytest.approx([*senses, min(senses), embeddings], abs=1e-5)


@pytest.mark.skipif(not SHARED.is_dir(), reason='the real data files are not here')
def test_the_real_pairs_are_read(tmp_path):
    """SimLex-999, SimVerb-3500, RG65 and WS353 have as many pairs; a file without a score is named."""
    found = words.similarity_data(toy_subject(), flags(SHARED))
    assert {k: len(v) for k, v in found.items()} == {'SL999': 999, 'SV3500': 3500, 'RG65': 65, 'WS353': 353}
    (tmp_path / 'RG65.csv').write_text('cord;smile;0.02\nrooster;voyage;many\n')
    with pytest.raises(UserError, match='RG65.csv.*many'):
        words.similarity_data(toy_subject(), flags(tmp_path))


def test_bias_ratio_of_a_made_distribution():
    """p(she), p(he) of (0.6, 0.2) and (0.1, 0.5) give the ratios 3 and 5, mean 4."""
    logits = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4]]).log() + torch.tensor([[3.0], [-2]])
    assert words.bias_ratio(logits, 0, 1).item() == pytest.approx(4)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """The logits for every fraction, computed from two passes, equal a pass with that factor as an edit."""
    s = toy_subject()
    noun, (idx, last) = [word_id(s.encoding, 'nurse')], words.prompts_of(s, 'nurse', ['the {} said', 'that {}'])
    for fraction, logits in zip(words.FRACTIONS, words.without_sense(s.model, idx, last, noun, 2)):
        want = s.model(idx, C=scale_senses(noun, [2], 1 - fraction)(idx, s.model.senses(idx)))
        torch.testing.assert_close(logits, want[[0, 1], last], atol=1e-5, rtol=1e-4)


def test_projection_takes_the_direction_from_the_noun_alone():
    """The Transformer's logits for every fraction equal those with a changed row of the input embedding; with
    the whole taken, the noun's embedding is orthogonal to E_he - E_she."""
    s = toy_subject(k=0)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    idx, last = words.prompts_of(s, 'nurse', ['the {} said that', 'the {} was'])
    v = (s.model.wte.weight[he] - s.model.wte.weight[she]).detach()
    for fraction, logits in zip(words.FRACTIONS, words.without_direction(s.model, idx, last, [noun], v)):
        E = s.model.wte.weight.detach().clone()
        E[noun] -= fraction * (E[noun] @ v) / (v @ v) * v
        want = s.model.project(s.model.contextualizer(F.embedding(idx, E))[[0, 1], last])
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)
    assert abs(E[noun] @ v) < 1e-5


@pytest.mark.parametrize('k', [4, 0])
def test_the_best_fraction_is_never_worse_than_none_or_all_where_it_was_chosen(k, monkeypatch):
    """With the evaluation prompts replaced by the estimation prompts, the third row is at most the first and
    the second, for each of several random models. The reduction is of the excess over 1."""
    monkeypatch.setattr(words, 'PROMPTS', words.ESTIMATION)
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'table', 'music', 'chair'])
    for seed in range(3):
        (_, none, *_), (_, whole, fall, _), (_, best, *_) = words.gender_rows(toy_subject(k, seed=seed, block_size=64))
        assert 1 <= best <= min(none, whole) + 1e-6 and fall == pytest.approx(100 * (none - whole) / (none - 1))


def test_the_sense_is_the_one_that_most_separates_she_from_he(monkeypatch):
    """Over the tokens of all nouns, |C_l . (E_she - E_he)| is largest in the mean for the sense of the table."""
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'table', 'zz'])  # zz: several tokens
    s = toy_subject(block_size=64)
    E, (she, he) = s.model.wte.weight, (word_id(s.encoding, word) for word in ('she', 'he'))
    gaps = [[abs((C[l] @ (E[she] - E[he])).item()) for noun in words.NOUNS
             for C in s.model.senses(torch.tensor(s.encode(f' {noun}')))] for l in range(4)]
    best = max(range(4), key=lambda l: sum(gaps[l]))
    assert len(gaps[0]) > 3 and words.gender_rows(s)[1][0] == f'Backpack toy, without sense {best}'
