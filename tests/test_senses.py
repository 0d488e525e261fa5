"""Claims about looking at senses, explaining predictions and editing them, on a small random model."""

import math

import pytest
import torch
from test_model import lively, text
from torch import Tensor

import senses
from senses import STRENGTHS, affinity, compose, edited, explain, replace_word, scale_senses, separation, topic

V, K, D = 34, 3, 24  # ids of the model, which has six rows of padding more; senses; width


@pytest.fixture
def model():
    """Random weights, in float64."""
    return lively(n_vocab=V)


def read(n: int = 10) -> Tensor:
    """Random ids (2, n)."""
    return text(n) % V


def edits_of(model) -> dict:
    """One edit of each kind, each of which changes something."""
    return {'off': scale_senses([3, 4], [1], 0.0), 'all': scale_senses(None, [0, 2], 1.7),
            'replace': replace_word(model, list(range(0, V, 2)), 5, 6),
            'topic': topic(model, affinity(model, [7, 8]), STRENGTHS[3])}


def logits(model, idx: Tensor, edit) -> Tensor:
    """The logits under an edit."""
    return model(idx, C=edited(model, idx, edit))


# -----------------------------------------------------------------------------
# Look and explain.


@torch.no_grad()
@pytest.mark.parametrize('at_once', [1, 1000, 1 << 26])
def test_scores_over_the_vocabulary_are_those_of_each_word(model, at_once, monkeypatch):
    """Separation (section 6.2), affinity (Eq. 17) and similarity (Eq. 13) of all ids equal loops over ids and
    senses, whatever fits into memory at once; padding rows are nobody's neighbour and no divisor."""
    monkeypatch.setattr(senses, 'LOGITS_AT_ONCE', at_once)
    model.wte.weight[V:] *= 100
    E, bag, own = model.wte.weight, [2, 30], model.senses(torch.tensor([11]))[0]
    apart, near, alike = separation(model, None, 4, 9), affinity(model, bag), senses.similarity(model, 11)
    assert apart.shape == near.shape == alike.shape == (V, K)
    for w in range(V):
        C = model.senses(torch.tensor([w]))[0]  # (k, d)
        torch.testing.assert_close(separation(model, w, 4, 9), apart[w])
        for l in range(K):
            its = [(C[l] * E[v]).sum().item() for v in range(V)]
            assert apart[w, l].item() == pytest.approx(its[4] - its[9])
            assert near[w, l].item() == pytest.approx(sum(its[v] for v in bag) / max(its))
            cosine = (C[l] @ own[l] / C[l].norm() / own[l].norm()).item()
            assert alike[w, l].item() == pytest.approx(cosine)


@torch.no_grad()
def test_a_sense_of_nothing_has_no_affinity(model):
    """A sense that is all zero scores 0, not nan, and topic control leaves it zero."""
    model.sense_network.final_mlp.c_proj.weight[:D] = 0
    model.sense_network.final_mlp.c_proj.bias[:D] = 0
    scores, idx = affinity(model, [2]), read()
    assert (scores[:, 0] == 0).all() and scores.isfinite().all()
    assert (topic(model, scores, STRENGTHS[3])(idx, model.senses(idx))[:, :, 0] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize('name', ['none', 'off', 'all', 'replace', 'topic'])
def test_the_terms_of_an_explanation_add_up_to_the_logit(model, name):
    """The sum of alpha * (C . E_w) over positions and senses is the logit of w, that of alpha * (C . (E_a -
    E_b)) the difference of two, for every id and in a batch, with an edit and without."""
    idx, E = read(), model.wte.weight
    C = edited(model, idx, {**edits_of(model), 'none': None}[name])
    last = model(idx, C=C)[:, -1]  # (B, V)
    for w in range(V):
        alpha, scores = explain(model, idx, E[w], None if name == 'none' else C)
        assert alpha.shape == scores.shape == (2, 10, K) and (alpha >= 0).all()
        torch.testing.assert_close((alpha * scores).sum((1, 2)), last[:, w])
    alpha, scores = explain(model, idx, E[3] - E[8], C)
    torch.testing.assert_close((alpha * scores).sum((1, 2)), last[:, 3] - last[:, 8])


# -----------------------------------------------------------------------------
# Edit.


def test_edits_that_ask_for_no_change_are_bit_identical(model):
    """Factor 1, strength 0, no edit and replacing a word by itself leave every bit of the logits, and of the
    text that is drawn, in float32 too."""
    for dtype in (torch.float64, torch.float32):
        idx, scores, made = read(), affinity(model.to(dtype), [3]), []
        for edit in (None, scale_senses(None, [0, 1], 1.0), topic(model, scores, STRENGTHS[0]), compose([]),
                     replace_word(model, list(range(V)), 5, 5), scale_senses([], [0], 0.0)):
            assert torch.equal(logits(model, idx, edit), model(idx))
            torch.manual_seed(0)
            made.append(model.generate(idx, 20, edit=edit))
        assert all(torch.equal(each, made[0]) for each in made)


def test_edits_leave_weights_and_senses_as_they_were(model):
    """No edit writes into the senses it is given or into a weight, and each changes the logits; in bfloat16
    they are finite and of the model's own type."""
    idx, before = read(), {k: v.clone() for k, v in model.state_dict().items()}
    for edit in edits_of(model).values():
        C = model.senses(idx)
        kept = C.clone()
        assert not torch.allclose(edit(idx, C), kept) and torch.equal(C, kept)
        assert not torch.allclose(logits(model, idx, edit), model(idx))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.bfloat16()
    for edit in edits_of(model).values():
        C = edit(idx, model.senses(idx))
        assert C.dtype == torch.bfloat16 and C.isfinite().all()


def test_edits_of_different_words_commute(model):
    """Two edits that touch different words give the same logits in either order; those of the same word are
    applied in the order given."""
    idx, swap = read(), replace_word(model, [3, 4, 5], 7, 6)
    C = model.senses(idx)
    for one, two, commute in ((scale_senses([1, 2], [0], 0.3), swap, True),
                              (replace_word(model, [1, 2], 6, 7), swap, True),
                              (replace_word(model, [3, 4, 5], 6, 7), swap, False)):
        there, back = (compose(pair)(idx, C) for pair in ((one, two), (two, one)))
        assert torch.allclose(there, back) == commute and not torch.allclose(there, one(idx, C))
        assert torch.equal(there, two(idx, one(idx, C)))


def test_a_scaled_sense_is_scaled_where_its_word_stands(model):
    """Senses are multiplied exactly at the given ids and sense numbers, None being every id; a sense turned
    off takes alpha * C . E from the logits, nothing else."""
    idx = read()
    C = model.senses(idx)
    expected, lost = C.clone(), torch.zeros_like(C)
    for b in range(2):
        for t in range(10):
            for l in (0, 2):
                if idx[b, t] in (3, 4, 17):
                    expected[b, t, l], lost[b, t, l] = 0.25 * C[b, t, l], C[b, t, l]
    assert torch.equal(scale_senses([3, 4, 17], [0, 2], 0.25)(idx, C), expected) and lost.any()
    assert torch.equal(scale_senses(None, [1], -2.0)(idx, C)[:, :, 1], -2 * C[:, :, 1])
    off = logits(model, idx, scale_senses([3, 4, 17], [0, 2], 0.0))
    torch.testing.assert_close(model(idx) - off, model(idx, C=lost))


def test_a_replaced_word_loses_and_gains_what_section_63_says(model):
    """A sense C loses C.r (1 - a.r/|a|^2) on r and gains C.r (1 - a.r/|r|^2) on a; a direction orthogonal to
    both does not move, and neither does any other word."""
    idx, words = read(), list(range(0, V, 2))
    r, a = model.wte.weight[5].detach(), model.wte.weight[6].detach()
    C, here = model.senses(idx), torch.isin(idx, torch.tensor(words))
    moved = replace_word(model, words, 5, 6)(idx, C)
    assert here.any() and torch.equal(moved[~here], C[~here])
    C, moved = C[here], moved[here]
    torch.testing.assert_close(C @ r - moved @ r, C @ r * (1 - a @ r / (a @ a)))
    torch.testing.assert_close(moved @ a - C @ a, C @ r * (1 - a @ r / (r @ r)))
    basis = torch.linalg.qr(torch.stack([r, a, torch.randn(D).double()], 1))[0]
    torch.testing.assert_close(moved @ basis[:, 2], C @ basis[:, 2])


def test_topic_control_is_the_loop_of_eq_15_to_20(model):
    """delta by quantile over all senses, annealed by what was said, written out for each position and sense;
    scores that equal a quantile count as above it."""
    idx, weights = read(), (3.3, 2.2, 1.5, 0.9)
    scores = affinity(model, [7, 8]).round(decimals=0)  # many are equal, to the quantiles too
    ordered, edges = scores.flatten().sort().values, []
    for q in (0.95, 0.80, 0.60):
        at = q * (len(ordered) - 1)  # a quantile is linear between the two values beside it
        low, part = int(at), at - int(at)
        edges.append((1 - part) * ordered[low] + part * ordered[min(low + 1, len(ordered) - 1)])
    assert any((scores == edge).sum() > 1 for edge in edges)
    C, E = model.senses(idx).detach(), model.wte.weight.detach()
    expected = torch.zeros_like(C)
    for b in range(2):
        for j in range(10):
            for l in range(K):
                score = scores[idx[b, j], l]
                delta = next((w for edge, w in zip(edges, weights) if score >= edge), weights[3])
                said = sum(max(0.0, (E[idx[b, i]] @ C[b, j, l]).item()) for i in range(10))  # Eq. 18
                squashed = 1 / (1 + math.exp(3.3 / 7.5 * said - 6)) * (1 + j / 100)  # Eq. 19
                expected[b, j, l] = C[b, j, l] * (1 + squashed * (delta - 1))  # Eq. 20 and 15
    torch.testing.assert_close(topic(model, scores, weights)(idx, C), expected)


@pytest.mark.parametrize('name', ['off', 'all', 'replace', 'topic'])
def test_generation_in_a_batch_edits_each_text_as_if_alone(model, name):
    """Greedy texts of a batch under an edit equal those of single texts, past block_size too, and the first
    id is the argmax under the edit."""
    edit, idx = edits_of(model)[name], read(8)
    out = model.generate(idx, 8, temperature=0, edit=edit)
    for b in range(2):
        assert torch.equal(model.generate(idx[b:b + 1], 8, temperature=0, edit=edit)[0], out[b])
    assert torch.equal(out[:, 8], logits(model, idx, edit)[:, -1, :V].argmax(-1))


def test_table_10_has_17_topics():
    """The labels of Table 10 with their bags, each word of which is one of the label's, or hobbies."""
    assert len(senses.TOPICS) == 17 and senses.TOPICS['arts_culture'] == ['arts', 'culture']
    assert all(set(words) <= set(label.split('_')) for label, words in senses.TOPICS.items())
