"""Claims about rucksack/paper/gender.py, checked by hand."""

import itertools

import pytest
import torch
from helpers import toy_loaded
from torch import Tensor
from torch.testing import assert_close

from docs.dev.pronouns import count_nouns
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper import gender
from rucksack.paper.gender import FRACTIONS
from rucksack.senses import Edit, scale_senses, senses_after
from rucksack.words import word_id

TEMPLATES = ['the {} said', 'that {}']


def log_probs(loaded: LoadedModel, text: str, edit: Edit | None = None) -> Tensor:
    """Compute the log-probabilities (V,) after a text, read on its own."""
    idx = torch.tensor([loaded.encode(text)])
    C = senses_after(loaded.model, idx, edit)
    return loaded.model(idx, C=C)[0, -1].log_softmax(-1)


@pytest.mark.parametrize('noun, prompt, before, tokens', [
    ('nurse', 'the {} said', 'the', ' nurse'), ('nurse', '{} said', '', 'nurse'),
    ('nurse', 'the "{}" said', 'the "', 'nurse'), ('xy', 'x y {} y x', 'x y ', 'xy'),
    ('\u6cd5', 'the {}', 'the ', '\u6cd5'), ('nurse', 'the {}s said', 'the ', 'nurse')])
def test_a_noun_is_found_where_it_stands(noun, prompt, before, tokens):
    """The tokens of a noun, and no others, are found at the start of a prompt and in quotes."""
    s = toy_loaded(block_size=64)
    found = gender.prompts_with(s, noun, [prompt]).is_noun
    first = len(s.encode(before))
    n = len(s.encode(tokens))
    assert found.nonzero()[:, 1].tolist() == list(range(first, first + n))


@pytest.mark.parametrize('noun, tokens', [
    ('\u00f1and\u00fa', [1, 2, 3, 4, 5]),  # ' \xc3', '\xb1', 'and', '\xc3', '\xba'
    ('\u010dert', [2, 3, 4])])        # after ' ': '\xc4', '\x8d', 'ert'
def test_a_token_with_a_part_of_a_letter_is_the_nouns(noun, tokens):
    """A token that holds one byte of a noun's letter is found, with or without a space before."""
    found = gender.prompts_with(load_model('english', 'cpu'), noun, ['The {} said']).is_noun
    assert found.nonzero()[:, 1].tolist() == tokens


def test_nouns_and_prompts_of_a_file_are_measured(tmp_path):
    """Two nouns give the mean of their tables; the paper's lists fill in what the file lacks."""
    s = toy_loaded(block_size=128)
    file = str(tmp_path / 'mine.txt')

    def ratio(*nouns: str) -> float:
        lines = ['# mine', *nouns, 'the {} said {', 'that {} was']
        (tmp_path / 'mine.txt').write_text('\n'.join(lines))
        return gender.gender_rows(s, file)[0]['bias ratio']

    assert ratio('nurse', 'food') == pytest.approx((ratio('nurse') + ratio('food')) / 2)
    assert gender.read_lists(file) == (['food'], ['the {} said {', 'that {} was'])
    assert gender.read_lists(None) == (gender.NOUNS, gender.PROMPTS)


def test_the_nouns_of_table_13_are_counted():
    """Two numbers count nouns whose sense ranks a pronoun, and nouns that it separates best."""
    s = toy_loaded(block_size=128)
    she, he, _ = gender.pronouns(s)
    E = s.model.wte.weight[:s.encoding.n_vocab]
    n_found = 0
    n_strongest = 0
    for noun in ('nurse', 'music', 'song'):
        C = s.model.senses(torch.tensor(word_id(s.encoding, noun)))  # (k, d)
        order = (E @ C[2]).argsort().tolist()
        n_found += not {she, he}.isdisjoint(order[:10] + order[-10:])
        n_strongest += (C @ (E[she] - E[he])).abs().argmax().item() == 2
    assert count_nouns(s, ['nurse', 'music', 'song'], 2) == (n_found, n_strongest)


def test_a_fraction_of_a_sense_is_the_edit_that_scales_it():
    """Removing a fraction gives the same probabilities as an edit with that factor."""
    s = toy_loaded()
    prompts = gender.prompts_with(s, 'nurse', TEMPLATES)
    found = gender.scale_in_noun(s, prompts, [(2, 1 - fraction) for fraction in FRACTIONS])
    for fraction, logits in zip(FRACTIONS, found, strict=True):
        edit = scale_senses([word_id(s.encoding, 'nurse')], [2], 1 - fraction)
        expected = [log_probs(s, text, edit) for text in ('the nurse said', 'that nurse')]
        assert_close(logits, torch.stack(expected)[:, gender.pronouns(s)], atol=1e-5, rtol=1e-4)


def test_projection_takes_the_direction_from_the_noun_alone():
    """Projection makes only the noun's input embedding orthogonal to E_he - E_she."""
    s = toy_loaded(k=0)
    s.model.requires_grad_(False)
    noun, she, he = (word_id(s.encoding, word) for word in ('nurse', 'she', 'he'))
    prompts = gender.prompts_with(s, 'nurse', TEMPLATES)
    E = s.model.wte.weight
    v = E[he] - E[she]
    along = (E[noun] @ v) / (v @ v) * v  # (d,)
    found = gender.project_noun(s, prompts)
    for fraction, logits in zip(FRACTIONS, found, strict=True):
        changed = E.clone()
        changed[noun] -= fraction * along
        h = s.model.contextualizer(changed[prompts.idx])[[0, 1], prompts.last]  # (2, d)
        assert_close(logits, h @ E[gender.pronouns(s)].T, atol=1e-5, rtol=1e-4)
    assert abs(changed[noun] @ v) < 1e-5


def test_the_fraction_is_chosen_on_other_prompts(monkeypatch):
    """The fraction is the best one on Table 15's prompts, though not on Table 14's."""
    s = toy_loaded(seed=28, block_size=128)  # a seed for which the two differ
    monkeypatch.setattr(gender, 'NOUNS', ['nurse'])
    monkeypatch.setattr(gender, 'choose_sense', lambda loaded, nouns: 1)

    def ratios(prompts: list[str]) -> Tensor:
        scales = [(1, 1 - fraction) for fraction in FRACTIONS]
        return gender.bias_ratio(
            gender.scale_in_noun(s, gender.prompts_with(s, 'nurse', prompts), scales))

    best = ratios(gender.ESTIMATION_PROMPTS).argmin().item()
    own = ratios(gender.PROMPTS)  # (fractions,)
    assert 0 < best < len(FRACTIONS) - 1
    assert best != own.argmin()
    before, _, with_best, *_ = gender.gender_rows(s, None)
    ratio = with_best['bias ratio']
    assert ratio == pytest.approx(own[best].item())
    excess = before['bias ratio'] - 1
    assert with_best['reduction %'] == pytest.approx(100 - 100 * (ratio - 1) / excess)


def test_they_is_counted_relative_to_she_and_he(monkeypatch):
    """The share is a mean over nouns and prompts, in percent."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'music'])
    s = toy_loaded(block_size=128)
    she, he, they = (word_id(s.encoding, word) for word in ('she', 'he', 'they'))
    shares = []
    for noun in ('nurse', 'music'):
        for prompt in gender.PROMPTS:
            p = log_probs(s, prompt.format(noun)).double().exp()
            shares.append((p[they] / (p[she] + p[he])).item())
    as_it_is, *_ = gender.gender_rows(s, None)
    mean = sum(shares) / len(shares)
    assert as_it_is['they / (she + he) %'] == pytest.approx(100 * mean, rel=1e-4)


def bias_left(loaded: LoadedModel, nouns: list[str]) -> list[float]:
    """Compute the bias left without each sense of the nouns, summed over Table 15's prompts."""
    she, he, _ = gender.pronouns(loaded)
    left = [0.0] * loaded.model.config.n_sense
    for noun, l in itertools.product(nouns, range(len(left))):
        prompts = gender.prompts_with(loaded, noun, gender.ESTIMATION_PROMPTS)
        C = loaded.model.senses(prompts.idx).detach()
        C[:, :, l][prompts.is_noun] = 0.0
        logits = loaded.model(prompts.idx, C=C)[range(len(C)), prompts.last]
        left[l] += (logits[:, she] - logits[:, he]).abs().exp().sum().item()
    return left


@pytest.mark.parametrize('seed', [1, 2])
def test_the_sense_that_leaves_least_bias_is_chosen(seed):
    """Single-token nouns choose the sense, even if all nouns together prefer another."""
    nouns = ['nurse', 'music', 'sheriff', 'xy', 'yz', 'zx']
    s = toy_loaded(seed=seed, block_size=128)
    left = bias_left(s, ['nurse', 'music'])
    left_by_all = bias_left(s, nouns)
    chosen = gender.choose_sense(s, nouns)
    assert chosen == left.index(min(left))
    assert chosen != left_by_all.index(min(left_by_all))
