"""Claims about looking at senses, explaining predictions and editing them, on a small random model."""

import math
from itertools import product

import pytest
import torch
from test_model import lively, text
from torch.testing import assert_close

import senses
from senses import (
    STRENGTHS,
    affinities,
    compose,
    edited,
    replace_word,
    scale_senses,
    sense_gauge,
    separation,
    topic,
)

V, K, D = 34, 3, 24  # ids of the model, which has six rows of padding more; senses; width
IDX = text() % V  # (2, 10)


@pytest.fixture
def model():
    """Random weights, in float64, without gradients."""
    return lively(n_vocab=V).requires_grad_(False)


def edits_of(model) -> dict:
    """One edit of each kind, each of which changes something."""
    return {'off': scale_senses([3, 4], [1], 0.0), 'all': scale_senses(None, [0, 2], 1.7),
            'replace': replace_word(model, list(range(0, V, 2)), 5, 6),
            'topic': topic(model, affinities(model, [[7, 8]])[0], STRENGTHS[3])}


@pytest.mark.parametrize('at_once', [(1, 7), (30, 16), (256, 2048)])
def test_scores_over_the_vocabulary_are_those_of_each_word(model, at_once, monkeypatch):
    """Separation, affinities and similarity equal loops over ids and senses, without padding rows."""
    monkeypatch.setattr(senses, 'IDS_AT_ONCE', at_once[0])
    monkeypatch.setattr(senses, 'LOGITS_AT_ONCE', at_once[1])
    model.wte.weight[V:] *= 100
    E, C, bag = model.wte.weight, model.senses(torch.arange(V)), [2, 30]  # (V, d), (V, k, d)
    apart, near = separation(model, None, 4, 9), affinities(model, [bag])[0]
    alike = senses.similarity(model, 11)
    assert apart.shape == near.shape == alike.shape == (V, K)
    for w, l in product(range(V), range(K)):
        its, norms = [(C[w, l] * E[v]).sum().item() for v in range(V)], C[w, l].norm() * C[11, l].norm()
        assert apart[w, l].item() == pytest.approx(its[4] - its[9])
        assert separation(model, w, 4, 9)[l].item() == pytest.approx(its[4] - its[9])
        assert near[w, l].item() == pytest.approx(sum(its[v] for v in bag) / max(its))
        assert alike[w, l].item() == pytest.approx((C[w, l] @ C[11, l] / norms).item())


@pytest.mark.parametrize('name', ['none', 'off', 'all', 'replace', 'topic'])
def test_the_terms_of_an_explanation_add_up_to_the_logit(model, name):
    """The sum of alpha * (C . v) is a logit, or a difference of two, with and without an edit."""
    E, C = model.wte.weight, None if name == 'none' else edited(model, IDX, edits_of(model)[name])
    last = model(IDX, C=C)[:, -1]  # (B, V)
    for v, expected in (*zip(E, last.T, strict=True), (E[3] - E[8], last[:, 3] - last[:, 8])):
        alpha, scores = senses.explain(model, IDX, v, C)
        assert alpha.shape == scores.shape == (2, 10, K) and (alpha >= 0).all()
        assert_close((alpha * scores).sum((1, 2)), expected)


def test_texts_of_different_lengths_are_explained_as_each_alone(model):
    """A list of texts is padded, and each is read at its own last token."""
    texts, v = [[3, 7, 3, 11], [5], [2, 2, 9, 30, 4, 1]], model.wte.weight[3]
    alpha, scores = senses.explain(model, texts, v)
    for i, ids in enumerate(texts):
        own = senses.explain(model, torch.tensor([ids]), v)
        assert_close(alpha[i, :len(ids)], own[0][0])
        assert_close(scores[i, :len(ids)], own[1][0])
        assert not alpha[i, len(ids):].any()


def test_edits_that_ask_for_no_change_are_bit_identical(model):
    """Factor 1, strength 0, no edit and replacing a word by itself change no bit of logits or drawn text."""
    for dtype in (torch.float64, torch.float32):
        scores, made = affinities(model.to(dtype), [[3]])[0], []
        for edit in (None, scale_senses(None, [0, 1], 1.0), topic(model, scores, STRENGTHS[0]), compose([]),
                     replace_word(model, list(range(V)), 5, 5), scale_senses([], [0], 0.0)):
            assert torch.equal(model(IDX, C=edited(model, IDX, edit)), model(IDX))
            torch.manual_seed(0)
            made.append(model.generate(IDX, 20, edit=edit))
        assert all(torch.equal(each, made[0]) for each in made)


def test_edits_leave_weights_and_senses_as_they_were(model):
    """No edit writes into senses or weights, and each changes the logits, in bfloat16 too."""
    for dtype in (torch.float64, torch.bfloat16):
        before = {k: v.clone() for k, v in model.to(dtype).state_dict().items()}
        for edit in edits_of(model).values():
            C = model.senses(IDX)
            kept, changed = C.clone(), edit(IDX, C)
            assert torch.equal(C, kept) and changed.dtype == dtype and changed.isfinite().all()
            assert not torch.allclose(changed, C) and not torch.allclose(model(IDX, C=changed), model(IDX))
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_edits_of_different_words_commute(model):
    """Edits of the same word do not, and are applied in the order given."""
    C, swap = model.senses(IDX), replace_word(model, [3, 4, 5], 7, 6)
    for one, commute in ((scale_senses([1, 2], [0], 0.3), True), (replace_word(model, [1, 2], 6, 7), True),
                         (replace_word(model, [3, 4, 5], 6, 7), False)):
        there, back = (compose(pair)(IDX, C) for pair in ((one, swap), (swap, one)))
        assert torch.allclose(there, back) == commute and not torch.allclose(there, one(IDX, C))
        assert torch.equal(there, swap(IDX, one(IDX, C)))


def test_a_scaled_sense_is_scaled_where_its_word_stands(model):
    """Senses are multiplied exactly at the given ids and sense numbers, None being every id."""
    C = model.senses(IDX)
    expected = C.clone()
    for b, t, l in product(range(2), range(10), (0, 2)):
        expected[b, t, l] *= 0.25 if IDX[b, t] in (3, 4, 17) else 1
    assert torch.equal(scale_senses([3, 4, 17], [0, 2], 0.25)(IDX, C), expected) and (C != expected).any()
    assert torch.equal(scale_senses(None, [1], -2.0)(IDX, C)[:, :, 1], -2 * C[:, :, 1])


def test_a_word_of_several_pieces_is_edited_in_its_last_where_all_stand(model):
    """Another text's same last piece is left alone, and so is one whose first piece is out of sight."""
    idx = torch.tensor([[7, 5, 3, 9, 3, 7, 5, 5, 3], [3, 5, 3, 7, 5, 3, 3, 7, 5]])
    C = model.senses(idx)
    expected = C.clone()
    for b, t in product(range(2), range(9)):
        if t > 1 and idx[b, t - 2:t + 1].tolist() == [7, 5, 3] or idx[b, t] == 9:
            expected[b, t, 1] = 0
    assert torch.equal(scale_senses([(7, 5, 3), 9], [1], 0.0)(idx, C), expected)
    assert (expected != C).any(-1).any(-1).nonzero().tolist() == [[0, 2], [0, 3], [1, 5]]
    cut = replace_word(model, [(7, 5, 3)], 5, 6)(idx[:, 1:], C[:, 1:])
    assert torch.equal(cut[0], C[0, 1:]) and not torch.equal(cut[1], C[1, 1:])


def test_a_replaced_word_loses_and_gains_what_section_63_says(model):
    """It loses C.r (1 - a.r/|a|^2) on r and gains C.r (1 - a.r/|r|^2) on a; nothing else moves."""
    words, C, (r, a) = list(range(0, V, 2)), model.senses(IDX), model.wte.weight[5:7]
    moved, here = replace_word(model, words, 5, 6)(IDX, C), torch.isin(IDX, torch.tensor(words))
    assert here.any() and torch.equal(moved[~here], C[~here])
    C, moved = C[here], moved[here]
    assert_close(C @ r - moved @ r, C @ r * (1 - a @ r / (a @ a)))
    assert_close(moved @ a - C @ a, C @ r * (1 - a @ r / (r @ r)))
    basis = torch.linalg.qr(torch.stack([r, a, torch.randn(D).double()], 1))[0]
    assert_close(moved @ basis[:, 2], C @ basis[:, 2])


def test_topic_control_is_the_loop_of_eq_15_to_20(model):
    """delta by quantile (equal scores are above it), annealed by what was said, sense by sense."""
    weights = (3.3, 2.2, 1.5, 0.9)
    model.sense_network.final_mlp.c_proj.weight[:D] = model.sense_network.final_mlp.c_proj.bias[:D] = 0
    scores = affinities(model, [[7, 8]])[0].round(decimals=0)  # many are equal, to the quantiles too
    ordered, edges = scores.flatten().sort().values, []
    for q in (0.95, 0.80, 0.60):
        at = q * (len(ordered) - 1)  # a quantile is linear between the two values beside it
        low, part = int(at), at - int(at)
        edges.append((1 - part) * ordered[low] + part * ordered[low + 1])
    assert any((scores == edge).sum() > 1 for edge in edges) and (scores[:, 0] == 0).all()
    C, E = model.senses(IDX), model.wte.weight
    expected = torch.zeros_like(C)
    for b, j, l in product(range(2), range(10), range(K)):
        delta = next((w for edge, w in zip(edges, weights) if scores[IDX[b, j], l] >= edge), weights[3])
        said = sum(max(0.0, (E[IDX[b, i]] @ C[b, j, l]).item()) for i in range(10))  # Eq. 18
        near = 1 / (1 + math.exp(3.3 / 7.5 * said - 6)) * (1 + j / 100)  # Eq. 19
        expected[b, j, l] = C[b, j, l] * (1 + near * (delta - 1))  # Eq. 20 and 15
    assert_close(topic(model, scores, weights)(IDX, C), expected)


@pytest.mark.parametrize('name', ['off', 'all', 'replace', 'topic'])
def test_generation_in_a_batch_edits_each_text_as_if_alone(model, name):
    """Greedy texts of a batch under an edit equal those of single texts, past block_size too."""
    edit = edits_of(model)[name]
    out, *alone = (model.generate(idx, 8, temperature=0, edit=edit) for idx in (IDX, IDX[:1], IDX[1:]))
    assert torch.equal(out, torch.cat(alone))


def test_affinities_over_a_large_vocabulary_are_near_those_in_float32(monkeypatch):
    """In bfloat16, by tiles, they are off by at most 2% of the largest, and by 0.2% in the median."""
    m, found = lively(vocab_size=17_000, n_vocab=16_900, n_layer=1).float(), []
    for unit in ('', 'AMX'):
        monkeypatch.setattr(senses, 'bfloat16_unit', lambda device, unit=unit: unit)
        found.append(affinities(m, [[2, 300]])[0])
    off, largest = (found[1] - found[0]).abs(), found[0].abs().max()
    assert found[1].dtype == torch.float32 and 0 < off.max() < 0.02 * largest
    assert off.median() < 0.002 * largest


def test_the_gauge_tells_senses_that_read_the_text_from_those_that_do_not(monkeypatch):
    """Of three senses made by hand, one keeps to the current token, one weighs all positions alike, one looks
    for the largest id so far: means from position 32 on, and the first two follow position alone."""
    def alpha(idx):  # (1, T) -> (1, 3, T, T)
        largest = [idx[0, :i + 1].argmax() for i in range(64)]
        return torch.stack([torch.eye(64), torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None],
                            torch.eye(64)[largest]])[None]

    model, idx = lively(), text(64, batch=3)
    monkeypatch.setattr(model, 'alpha', alpha)
    on_current, moved = sense_gauge(model, idx)
    is_largest = [ids[:i + 1].argmax() == i for ids in idx for i in range(32, 64)]
    assert on_current.tolist() == pytest.approx([
        1, sum(1 / i for i in range(33, 65)) / 32, sum(is_largest).item() / len(is_largest)])
    assert moved[:2].tolist() == [0, 0]
    assert moved[2] > 0.5


def test_the_gauge_reads_alpha_as_the_model_gives_it(model):
    """In a text of 10 tokens it begins at the fifth: weights of the current token, by a loop over them."""
    alpha = model.alpha(IDX)  # (2, k, 10, 10)
    on_current, moved = sense_gauge(model, IDX)
    for l in range(K):
        weights = [alpha[b, l, i, i].item() for b, i in product(range(2), range(5, 10))]
        assert on_current[l].item() == pytest.approx(sum(weights) / 10, rel=1e-5)
    assert moved.gt(0).all()
