"""Claims about rucksack/gender.py, by hand."""

import pytest
import torch
from subjects import toy_subject

from rucksack import gender, toy
from rucksack.grammar import word_id
from senses import compose, scale_senses


def test_the_toy_world_speaks_of_the_papers_nouns():
    """Its roles are the 40 nouns of the paper, in the same order."""
    assert list(toy.ROLES) == gender.NOUNS


def test_bias_ratio_of_a_made_distribution():
    """p(she), p(he) of (0.6, 0.2) and (0.1, 0.5) give the ratios 3 and 5, mean 4."""
    logits = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4]]).log() + torch.tensor([[3.0], [-2]])
    assert gender.bias_ratio(logits, 0, 1).item() == pytest.approx(4)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """The logits for every fraction, computed from two passes, equal a pass with that factor as an edit."""
    s, same = toy_subject(), compose([])
    prompts = gender.prompts_on(s, 'nurse', ['the {} said', 'that {}'])
    idx = prompts.idx
    for fraction, logits in zip(gender.FRACTIONS, gender.without_sense(s.model, prompts, 2, same)):
        want = s.model(idx, C=scale_senses(prompts.noun, [2], 1 - fraction)(idx, s.model.senses(idx)))
        torch.testing.assert_close(logits, want[[0, 1], prompts.last], atol=1e-5, rtol=1e-4)


def test_projection_takes_the_direction_from_the_noun_alone():
    """Logits equal those of a changed input embedding of the noun, at last orthogonal to E_he - E_she."""
    s = toy_subject(k=0)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    prompts = gender.prompts_on(s, 'nurse', ['the {} said', 'that {}'])
    E = s.model.wte.weight.detach()
    v = E[he] - E[she]
    for fraction, logits in zip(gender.FRACTIONS, gender.without_direction(s.model, prompts, v)):
        changed = E.clone()
        changed[noun] -= fraction * (E[noun] @ v) / (v @ v) * v
        want = s.model.project(s.model.contextualizer(changed[prompts.idx])[[0, 1], prompts.last])
        torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-4)
    assert abs(changed[noun] @ v) < 1e-5


@pytest.mark.parametrize('k', [4, 0])
def test_the_best_fraction_is_never_worse_than_none_or_all_where_it_was_chosen(k, monkeypatch):
    """On the prompts of the estimate the third row is the lowest; a reduction is of the excess over 1."""
    monkeypatch.setattr(gender, 'PROMPTS', gender.ESTIMATION_PROMPTS)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table', 'music', 'chair'])
    for seed in range(3):
        rows = gender.gender_rows(toy_subject(k, seed=seed, block_size=64))
        plain, off, best = (row.ratio for row in rows)
        assert 1 <= best <= min(plain, off) + 1e-6
        assert rows[1].reduction == pytest.approx(100 * (plain - off) / (plain - 1))


def test_gender_has_the_mean_over_all_nouns_and_over_those_of_one_piece(monkeypatch):
    """The columns of one piece are those of a run with these nouns alone; they is relative to she and he."""
    s, rows = toy_subject(block_size=128), []
    for nouns in (['nurse', 'sheriff', 'music'], ['nurse', 'music']):  # sheriff is spelled
        monkeypatch.setattr(gender, 'NOUNS', nouns)
        rows.append(gender.gender_rows(s)[0])
    assert rows[0].ratio_single == pytest.approx(rows[1].ratio)
    assert rows[0].ratio_single != rows[0].ratio
    assert rows[0].reduction is rows[0].reduction_single is None
    asked = [gender.prompts_on(s, noun, gender.PROMPTS) for noun in nouns]
    p = torch.stack([s.model(p.idx)[range(len(p.last)), p.last, :s.encoding.n_vocab].softmax(-1)
                     for p in asked]).double()
    she, he, they = (p[..., word_id(s.encoding, word)] for word in ('she', 'he', 'they'))
    want = [100 * they.mean().item(), 100 * (they / (she + he)).mean().item()]
    assert [rows[1].they, rows[1].they_share] == pytest.approx(want, rel=1e-4)


def test_where_no_noun_is_one_piece_all_choose_the_sense(monkeypatch):
    """With nouns of several pieces alone, the sense taken off is still the one that leaves least."""
    monkeypatch.setattr(gender, 'NOUNS', ['xy', 'yz'])
    for seed in range(3):
        s, left = toy_subject(seed=seed, block_size=128), []
        she, he = (word_id(s.encoding, word) for word in ('she', 'he'))
        for l in range(4):
            left.append(0)
            for noun in gender.NOUNS:
                prompts = gender.prompts_on(s, noun, gender.ESTIMATION_PROMPTS)
                off = gender.without_sense(s.model, prompts, l, compose([]))[-1]
                left[l] += gender.bias_ratio(off, she, he).item()
        assert gender.choose_sense(s) == left.index(min(left))


def test_the_sense_that_is_taken_off_is_the_one_that_leaves_least_in_the_other_prompts(monkeypatch):
    """Whatever the senses of the nouns say: each is turned off in the prompts of the estimate."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    for seed in range(4):
        s, left = toy_subject(seed=seed, block_size=128), []
        she, he = (word_id(s.encoding, word) for word in ('she', 'he'))
        for l in range(4):
            ratios = []
            for noun in gender.NOUNS:
                off = scale_senses([word_id(s.encoding, noun)], [l], 0.0)
                for prompt in gender.ESTIMATION_PROMPTS:
                    idx = torch.tensor([s.encode(prompt.format(noun))])
                    logits = s.model(idx, C=off(idx, s.model.senses(idx)))[0, -1]
                    ratios.append((logits[she] - logits[he]).abs().exp().item())
            left.append(sum(ratios))
        assert gender.choose_sense(s) == left.index(min(left))
        assert gender.gender_rows(s)[1].change == f'without sense {gender.choose_sense(s)}'
