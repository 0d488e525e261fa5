"""Claims about rucksack/paper/gender.py, by hand."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import toy_subject
from torch import Tensor
from torch.testing import assert_close

from rucksack import toy
from rucksack.cli import UserError
from rucksack.loaded import Subject
from rucksack.paper import gender
from rucksack.paper.gender import FRACTIONS, NounPrompts
from rucksack.senses import Edit, scale_senses, senses_after
from rucksack.tokenizer import words_tokenizer
from rucksack.words import word_id

TEMPLATES = ['the {} said', 'that {}']


def no_edit(idx: Tensor, C: Tensor) -> Tensor:
    """The edit that changes nothing."""
    return C


def last_logits(subject: Subject, text: str, edit: Edit = no_edit) -> Tensor:
    """The logits (V,) after a text, read by itself."""
    idx = torch.tensor([subject.encode(text)])
    C = senses_after(subject.model, idx, edit)
    return subject.model(idx, C=C)[0, -1]


def test_the_toy_world_speaks_of_the_papers_nouns():
    """Its roles are the 40 nouns of the paper, in the same order."""
    assert list(toy.ROLES) == gender.NOUNS
    assert len(gender.NOUNS) == 40


def test_bias_ratio_of_a_made_distribution():
    """p(she), p(he) of (0.6, 0.2) and (0.1, 0.5) give the ratios 3 and 5, mean 4."""
    log_p = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4]]).log()
    logits = log_p + torch.tensor([[3.0], [-2.0]])
    assert gender.bias_ratio(logits, 0, 1).item() == pytest.approx(4)


def test_a_reduction_is_of_the_excess_over_1():
    """From 3 to 2 half of the bias is gone, from 3 to 1 all of it."""
    ratios = torch.tensor([3.0, 2.0, 1.0])
    assert gender.reductions(ratios)[1:].tolist() == pytest.approx([50, 100])


def test_prompts_are_padded_and_know_where_they_end():
    """Each is the ids of its text, with the noun in it."""
    s = toy_subject()
    prompts = gender.prompts_on(s, 'nurse', TEMPLATES)
    texts = ['the nurse said', 'that nurse']
    for i, text in enumerate(texts):
        end = prompts.last[i] + 1
        assert prompts.idx[i, :end].tolist() == s.encode(text)
    assert prompts.last.tolist() == [len(s.encode(text)) - 1 for text in texts]
    assert torch.equal(prompts.is_noun, prompts.idx == word_id(s.encoding, 'nurse'))


def test_a_noun_of_several_pieces_is_found_where_it_stands_whole():
    """All its pieces count, and none of them elsewhere: "car" in a prompt on the carpenter."""
    s = toy_subject(block_size=64)
    prompts = gender.prompts_on(s, 'xy', ['x y {} y x', 'yx {} xy'])
    for i, (before, after) in enumerate([('x y', ' y x'), ('yx', ' xy')]):
        n_before = len(s.encode(before))
        n_noun = len(s.encode(' xy'))
        assert n_noun > 1
        wanted = torch.zeros_like(prompts.is_noun[i])
        wanted[n_before:n_before + n_noun] = True
        if after == ' xy':  # the noun once more
            wanted[n_before + n_noun:n_before + 2 * n_noun] = True
        assert torch.equal(prompts.is_noun[i], wanted)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """The logits of every fraction, from two passes, equal a pass with that factor as an edit."""
    s = toy_subject()
    prompts = gender.prompts_on(s, 'nurse', TEMPLATES)
    found = gender.without_sense(s, 2, prompts)
    for fraction, logits in zip(FRACTIONS, found, strict=True):
        edit = scale_senses([word_id(s.encoding, 'nurse')], [2], 1 - fraction)
        expected = [last_logits(s, text, edit) for text in ('the nurse said', 'that nurse')]
        assert_close(logits, torch.stack(expected), atol=1e-5, rtol=1e-4)


def changed_embeddings(E: Tensor, noun: int, v: Tensor, fraction: float) -> Tensor:
    """The embeddings E (V, d), with a fraction of the noun's part along v (d,) taken off."""
    changed = E.clone()
    changed[noun] -= fraction * (E[noun] @ v) / (v @ v) * v
    return changed


def at_the_end(prompts: NounPrompts, x: Tensor) -> Tensor:
    """What there is at the last token of each of two prompts."""
    return torch.stack([x[0, prompts.last[0]], x[1, prompts.last[1]]])


def test_projection_takes_the_direction_from_the_noun_alone():
    """Logits equal those of a changed input embedding, at last orthogonal to E_he - E_she."""
    s = toy_subject(k=0)
    s.model.requires_grad_(False)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    prompts = gender.prompts_on(s, 'nurse', TEMPLATES)
    E = s.model.wte.weight
    v = E[he] - E[she]
    found = gender.without_direction(s, prompts)
    for fraction, logits in zip(FRACTIONS, found, strict=True):
        changed = changed_embeddings(E, noun, v, fraction)
        h = s.model.contextualizer(changed[prompts.idx])
        assert_close(logits, at_the_end(prompts, h) @ s.model.wte.weight.T, atol=1e-5, rtol=1e-4)
    assert abs(changed_embeddings(E, noun, v, 1.0)[noun] @ v) < 1e-5


@pytest.fixture
def on_the_prompts_of_the_estimate(monkeypatch):
    """Table 5 on the prompts that choose the sense and the fractions, for four nouns."""
    monkeypatch.setattr(gender, 'PROMPTS', gender.ESTIMATION_PROMPTS)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table', 'music', 'chair'])


@pytest.mark.parametrize('seed', [0, 1, 2])
@pytest.mark.parametrize('k', [4, 0])
def test_the_best_fraction_is_never_worse_than_none_or_all(k, seed, on_the_prompts_of_the_estimate):
    """On the prompts where it was chosen the third row is the lowest, and no ratio is below 1."""
    as_it_is, off, best = gender.gender_rows(toy_subject(k, seed=seed, block_size=64))
    assert best.ratio >= 1
    assert best.ratio <= as_it_is.ratio + 1e-6
    assert best.ratio <= off.ratio + 1e-6
    excess = as_it_is.ratio - 1
    assert off.reduction == pytest.approx(100 * (as_it_is.ratio - off.ratio) / excess)
    assert best.reduction == pytest.approx(100 * (as_it_is.ratio - best.ratio) / excess)


def test_the_fraction_is_chosen_on_other_prompts():
    """It is the best on the prompts of Table 15, which is not the best on those of Table 14."""
    s = toy_subject(seed=28, block_size=128)  # for which the two differ
    intervene = partial(gender.without_sense, s, 1)
    she, he, _ = gender.pronouns(s)

    def ratios(prompts: list[str]) -> Tensor:
        return gender.bias_ratio(intervene(gender.prompts_on(s, 'nurse', prompts)), she, he)

    best = ratios(gender.ESTIMATION_PROMPTS).argmin().item()
    own = ratios(gender.PROMPTS)  # (fractions,)
    assert 0 < best < len(FRACTIONS) - 1
    assert best != own.argmin()
    _, _, with_best = gender.measure(s, 'nurse', intervene)
    assert with_best[0].item() == pytest.approx(own[best].item())


def test_the_mean_is_over_all_nouns_and_over_those_of_one_piece(monkeypatch):
    """The columns of one piece are those of a run with these nouns alone."""
    s = toy_subject(block_size=128)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'sheriff', 'music'])  # sheriff is spelled
    with_spelled, *_ = gender.gender_rows(s)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    without, *_ = gender.gender_rows(s)
    assert with_spelled.ratio_single == pytest.approx(without.ratio)
    assert with_spelled.ratio_single != with_spelled.ratio
    assert math.isnan(with_spelled.reduction)
    assert math.isnan(with_spelled.reduction_single)


def test_they_is_counted_by_itself_and_relative_to_she_and_he(monkeypatch):
    """Both are means over nouns and prompts, in percent."""
    s = toy_subject(block_size=128)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    she, he, they = (word_id(s.encoding, word) for word in ('she', 'he', 'they'))
    chances = []
    shares = []
    for noun in ('nurse', 'music'):
        for prompt in gender.PROMPTS:
            p = last_logits(s, prompt.format(noun)).double().softmax(-1)
            chances.append(p[they].item())
            shares.append((p[they] / (p[she] + p[he])).item())
    as_it_is, *_ = gender.gender_rows(s)
    assert as_it_is.they == pytest.approx(100 * sum(chances) / len(chances), rel=1e-4)
    assert as_it_is.they_share == pytest.approx(100 * sum(shares) / len(shares), rel=1e-4)


def bias_left(subject: Subject, nouns: list[str]) -> list[float]:
    """The bias that is left without each sense of the nouns, summed over Table 15's prompts."""
    she, he = (word_id(subject.encoding, word) for word in ('she', 'he'))
    left = []
    for l in range(subject.model.config.n_sense):
        ratios = []
        for noun in nouns:
            for prompt in gender.ESTIMATION_PROMPTS:
                before, _ = prompt.split(' {}')
                start = len(subject.encode(before))
                end = start + len(subject.encode(f' {noun}'))
                idx = torch.tensor([subject.encode(prompt.format(noun))])
                C = subject.model.senses(idx).detach()
                C[:, start:end, l] = 0.0
                logits = subject.model(idx, C=C)[0, -1]
                log_odds = logits[she] - logits[he]
                ratios.append(log_odds.abs().exp().item())
        left.append(sum(ratios))
    return left


@pytest.mark.parametrize('seed', [0, 1, 2, 3])
def test_the_sense_taken_off_leaves_least_in_the_other_prompts(seed, monkeypatch):
    """Each is turned off in the prompts of the estimate, whatever the senses of the nouns say."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    s = toy_subject(seed=seed, block_size=128)
    left = bias_left(s, ['nurse', 'music'])
    best = left.index(min(left))
    assert gender.choose_sense(s) == best
    _, off, _ = gender.gender_rows(s)
    assert off.change == f'without sense {best}'


@pytest.mark.parametrize('seed', [1, 2])
def test_nouns_of_several_pieces_do_not_choose_the_sense(seed, monkeypatch):
    """The nouns that are one token choose it, though with the others it would be another."""
    nouns = ['nurse', 'sheriff', 'xy', 'music', 'yz', 'zx']
    monkeypatch.setattr(gender, 'NOUNS', nouns)
    s = toy_subject(seed=seed, block_size=128)
    by_singles = bias_left(s, ['nurse', 'music'])
    by_all = bias_left(s, nouns)
    best = by_singles.index(min(by_singles))
    assert best != by_all.index(min(by_all))
    assert gender.choose_sense(s) == best


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_where_no_noun_is_one_piece_all_choose_the_sense(seed, monkeypatch):
    """The sense taken off is still the one that leaves least."""
    monkeypatch.setattr(gender, 'NOUNS', ['xy', 'yz'])
    s = toy_subject(seed=seed, block_size=128)
    left = bias_left(s, ['xy', 'yz'])
    assert gender.choose_sense(s) == left.index(min(left))


def test_a_prompt_longer_than_block_size_is_named():
    """A model of a few tokens has no row: the error says how many it reads."""
    with pytest.raises(UserError, match='at most 4 tokens'):
        gender.gender_table([toy_subject(block_size=4)])


def test_models_of_other_words_have_other_single_token_nouns(monkeypatch):
    """The note has the count of each model that is compared."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    s = toy_subject(block_size=128)
    tokenizer = words_tokenizer([' nurse', ' she', ' he', ' they'])
    other = replace(s, tokenizer=tokenizer)
    note = gender.gender_table([s, other]).notes[0]
    assert 'the 1 or 2 nouns' in note
