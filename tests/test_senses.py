"""Claims about looking at senses, explaining predictions and editing them, on a random model."""

import copy
import doctest
import math
from itertools import product

import numpy as np
import pytest
import torch
from helpers import lively, same, text
from torch import Tensor
from torch.testing import assert_close

from rucksack import senses
from rucksack import vocabulary as scoring
from rucksack.model import Backpack
from rucksack.senses import STRENGTHS, Edit, compose, replace_word, scale_senses, senses_after
from rucksack.training import sense_gauge
from rucksack.vocabulary import scores_of_bags

V = 34  # ids of the model; six more rows are padding
K = 3   # senses
D = 24  # width
IDX = text() % V  # (2, 10)
EVEN = list(range(0, V, 2))
KINDS = ['off', 'all', 'replace', 'topic', 'added']


@pytest.fixture
def model() -> Backpack:
    """Make a model with random weights, in float64, without gradients."""
    return lively(n_vocab=V).requires_grad_(False)


def edit_of(kind: str, model: Backpack) -> Edit:
    """Make an edit of this kind that changes something."""
    if kind == 'off':
        return scale_senses([3, 4], [1], 0.0)
    if kind == 'all':
        return scale_senses(None, [0, 2], 1.7)
    if kind == 'replace':
        return replace_word(model, EVEN, 5, 6)
    if kind == 'added':
        ids, numbers = torch.tensor([[3, 3, 4], [0, 1, 1]])
        return senses.add_to_senses(ids, numbers, torch.ones(3, D))
    return senses.topic(model, scores_of_bags(model, [[7, 8]])[0], STRENGTHS[3])


def test_affinities_are_those_of_each_word_and_sense(model):
    """An affinity is a bag's logits divided by the largest, as in a loop that skips padding."""
    model.wte.weight[V:] *= 100
    ids = torch.tensor([5, 0, 33, 5])
    bags = [[2, 30], [7]]
    found = senses.affinities(model, ids, bags)
    assert found.shape == (4, K, 2)
    for i, l in product(range(4), range(K)):
        logits = model.wte.weight[:V] @ model.senses(ids[i])[l]  # (V,)
        expected = [logits[bag].sum() / logits.max() for bag in bags]
        assert_close(found[i, l], torch.stack(expected))


def test_extremes_are_the_ends_of_all_logits_in_order(model):
    """The largest logits come first, then the smallest from the bottom up, without padding."""
    model.wte.weight[V:] *= 100
    C = model.senses(torch.tensor(7))  # (k, d)
    ids, added = senses.extremes(model, C, 4)
    for l in range(K):
        logits = model.wte.weight[:V] @ C[l]  # (V,)
        by_logit = sorted(range(V), key=lambda v: logits[v])
        assert ids[l].tolist() == by_logit[:-5:-1] + by_logit[:4]
        assert_close(added[l], logits[ids[l]])


def test_affinities_of_a_large_vocabulary_are_near_float32(monkeypatch):
    """In bfloat16, affinities are off by at most 2% of the largest, and 0.2% in the median."""
    model = lively(vocab_size=16_500, n_vocab=16_400, n_layer=1, n_sense=1).float()
    ids = torch.arange(300)  # enough; all would take a minute where bfloat16 is slow
    monkeypatch.setattr(
        scoring, 'over_vocabulary', lambda model, score, bags: score(model, ids, bags))
    monkeypatch.setattr(scoring, 'is_bfloat16_fast', lambda device: False)
    exact, = scores_of_bags(model, [[2, 300]])
    monkeypatch.setattr(scoring, 'is_bfloat16_fast', lambda device: True)
    fast, = scores_of_bags(model, [[2, 300]])
    off = (fast - exact).abs() / exact.abs().max()
    assert fast.dtype == torch.float32
    assert 0 < off.max() < 0.02
    assert off.median() < 0.002


def test_the_examples_in_the_docstrings():
    """The examples in senses.py show what Python prints."""
    assert doctest.testmod(senses) == (0, 11)


@pytest.mark.parametrize('kind', [None, *KINDS])
def test_the_terms_of_an_explanation_add_up_to_the_logit(model, kind):
    """The sum of alpha * (C . v) is a logit, or a difference of two, with and without an edit."""
    C = None
    if kind:
        C = senses_after(model, IDX, edit_of(kind, model))
    E = model.wte.weight
    logits = model(IDX, C=C)[:, -1]  # (B, rows of E)
    for v, expected in [(E[3], logits[:, 3]), (E[3] - E[8], logits[:, 3] - logits[:, 8])]:
        alpha, scores = senses.explain(model, IDX, v, C)  # (B, T, k) each
        assert (alpha >= 0).all()
        assert_close((alpha * scores).sum((1, 2)), expected)


@pytest.mark.parametrize('kind', ['off', 'added'])
def test_prompts_of_unequal_length_are_predicted_in_one_batch(model, kind):
    """A padded text has the same probabilities and terms as it has alone."""
    texts = [[5, 7, 9, 2], [8], [3, 3]]
    idx, last = senses.pad(texts)
    edit = edit_of(kind, model)
    v = model.wte.weight[3]
    probs = senses.next_word_probs(model, idx, edit, last)
    alpha, scores = senses.explain(model, idx, v, senses_after(model, idx, edit), last)
    terms = (alpha * scores).sum((1, 2))
    for i, ids in enumerate(texts):
        alone = torch.tensor([ids])
        alpha, scores = senses.explain(model, alone, v, senses_after(model, alone, edit))
        assert_close(probs[i:i + 1], senses.next_word_probs(model, alone, edit))
        assert_close(terms[i], (alpha * scores).sum())


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_edits_that_ask_for_no_change_are_bit_identical(model, dtype):
    """Edits that ask for no change keep every bit of the logits."""
    model.to(dtype)
    edits = {
        'factor 1': scale_senses(None, [0, 1], 1.0),
        'strength 0': senses.topic(model, scores_of_bags(model, [[3]])[0], STRENGTHS[0]),
        'no edit': compose([]),
        'added 0': senses.add_to_senses(torch.tensor([3]), torch.tensor([1]), torch.zeros(1, D)),
        'a word by itself': replace_word(model, list(range(V)), 5, 5),
        'no word': scale_senses([], [0], 0.0)}
    for name, edit in edits.items():
        assert torch.equal(model(IDX, C=senses_after(model, IDX, edit)), model(IDX)), name


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_edits_leave_weights_and_senses_as_they_were(model, dtype, kind):
    """No edit writes into senses or weights, and each changes the logits, in bfloat16 too."""
    model.to(dtype)
    before = copy.deepcopy(model.state_dict())
    edit = edit_of(kind, model)
    C = model.senses(IDX)
    kept = C.clone()
    changed = edit(IDX, C)
    assert torch.equal(C, kept)
    assert changed.dtype == dtype
    assert changed.isfinite().all()
    assert not torch.allclose(changed, C)
    assert not torch.allclose(model(IDX, C=changed), model(IDX))
    same(model.state_dict(), before)


PIECES = torch.tensor([[7, 5, 3, 9, 3, 7, 5, 5, 3], [3, 5, 3, 7, 5, 3, 3, 7, 5]])
OF_7_AND_9 = [(0, 0), (0, 3), (0, 5), (1, 3), (1, 7)]


@pytest.mark.parametrize('words, places', [
    ([7, 9], OF_7_AND_9), ([*np.array([7, 9])], OF_7_AND_9), (None, [*product(range(2), range(9))]),
    ([(7, 5, 3), 9], [(0, 2), (0, 3), (1, 5)])], ids=['ids', 'numpy', 'all', 'several tokens'])
def test_a_scaled_sense_is_scaled_where_its_word_stands(words, places, model):
    """Senses are multiplied at the ids of any integer type, and where a whole word ends."""
    C = model.senses(PIECES)
    expected = C.clone()
    for (b, t), l in product(places, (0, 2)):
        expected[b, t, l] *= 0.25
    assert torch.equal(scale_senses(words, [0, 2], 0.25)(PIECES, C), expected)


@pytest.mark.parametrize('words', [
    ['nurse'], 'nurse', [('a', 'b')], [1.5], [()], (7, 5, 3)], ids=repr)
def test_words_that_are_no_list_of_ids_are_refused(words, model):
    """Words that are not a list of ids, such as text or a bare tuple, raise TypeError."""
    with pytest.raises(TypeError):
        senses_after(model, text(), scale_senses(words, [0], 0.0))


def test_an_edit_of_a_gpt_is_refused():
    """An edit of a GPT is refused, because a GPT has no senses to edit."""
    with pytest.raises(ValueError, match='no senses'):
        senses.next_word_probs(lively(n_sense=0), IDX, scale_senses(None, [0], 0.0))


def test_a_text_without_tokens_is_not_padded():
    """A text without tokens is refused, because it has no last position to predict from."""
    with pytest.raises(ValueError, match='no tokens'):
        senses.pad([[5, 7], []])


def test_a_replaced_word_loses_and_gains_what_section_63_says(model):
    """A word loses C.r (1 - a.r/|a|^2) on r and gains C.r (1 - a.r/|r|^2) on a; all else stays."""
    C = model.senses(IDX)
    r, a = model.wte.weight[5:7]
    moved = replace_word(model, EVEN, 5, 6)(IDX, C)
    is_replaced = torch.isin(IDX, torch.tensor(EVEN))
    assert is_replaced.any()
    assert torch.equal(moved[~is_replaced], C[~is_replaced])

    before = C[is_replaced]  # (n, k, d)
    after = moved[is_replaced]
    assert_close(before @ r - after @ r, before @ r * (1 - a @ r / (a @ a)))
    assert_close(after @ a - before @ a, before @ r * (1 - a @ r / (r @ r)))

    vectors = torch.stack([r, a, torch.randn(D).double()], dim=1)
    basis, _ = torch.linalg.qr(vectors)
    orthogonal = basis[:, 2]  # to both r and a
    assert_close(after @ orthogonal, before @ orthogonal)


def test_topic_control_is_the_loop_of_eq_15_to_20(model):
    """delta depends on quantiles (a tie counts as above), annealed per sense by what was said."""
    weights = (3.3, 2.2, 1.5, 0.9)
    projection = model.sense_network.final_mlp.c_proj
    projection.weight[:D] = 0  # sense 0 is the zero vector, so its scores are equal
    projection.bias[:D] = 0
    scores = scores_of_bags(model, [[7, 8]])[0].round()  # many are equal, even to a quantile
    edges = scores.flatten().quantile(torch.tensor([0.95, 0.80, 0.60]).double())
    assert max((scores == edge).sum() for edge in edges) > 1

    C = model.senses(IDX)
    E = model.wte.weight
    expected = torch.zeros_like(C)
    for b, j, l in product(range(2), range(10), range(K)):
        n_above = (scores[IDX[b, j], l] < edges).sum()  # quantiles that the score does not reach
        delta = weights[n_above]
        said = sum(max(0.0, (E[IDX[b, i]] @ C[b, j, l]).item()) for i in range(10))  # Eq. 18
        annealing = 1 / (1 + math.exp(3.3 / 7.5 * said - 6)) * (1 + j / 100)  # Eq. 19
        expected[b, j, l] = C[b, j, l] * (1 + annealing * (delta - 1))  # Eq. 20 and 15
    assert_close(senses.topic(model, scores, weights)(IDX, C), expected)


def test_the_gauge_tells_senses_that_read_the_text(monkeypatch):
    """Weight on the current token, on all equally, and on the largest id: the last reads a text."""
    def alpha(idx: Tensor) -> Tensor:
        current = torch.eye(64)
        alike = torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None]
        largest = [idx[0, :i + 1].argmax() for i in range(64)]
        return torch.stack([current, alike, current[largest]])[None]  # (1, 3, T, T)

    model = lively()
    monkeypatch.setattr(model, 'alpha', alpha)
    idx = text(64, batch=3)
    on_current, moved = sense_gauge(model, idx)
    alike = sum(1 / i for i in range(33, 65)) / 32
    assert on_current[:2].tolist() == pytest.approx([1, alike])
    assert moved[:2].tolist() == [0, 0]
    assert moved[2] > 0.5


@pytest.mark.parametrize('words, found', [
    (torch.tensor([0]), [True, False, False]), (torch.tensor([1, 2]), [False, True, True]),
    ([-1], [False, False, False]), ([(1, 2)], [False, False, True]), ([], [False, False, False])])
def test_words_are_found_where_their_ids_stand(words, found):
    """Words may be a tensor of ids; an id that no vocabulary has, and no words, stand nowhere."""
    idx = torch.tensor([[0, 1, 2]])
    assert senses.occurrences(idx, words).flatten().tolist() == found
