"""Claims about looking at senses, explaining predictions and editing them, on a small random model."""

import math

import pytest
import tiktoken
import torch
from test_model import lively, text

import senses
from model import weighted_sum
from rucksack.common import UserError
from rucksack.data import load_tokenizer
from rucksack.grammar import (
    bag_of_words,
    parse_factor,
    parse_replacement,
    parse_strength,
    parse_word_senses,
    word_forms,
    word_id,
)
from rucksack.page import Dials
from rucksack.toy import toy_tokenizer
from senses import (
    STRENGTHS,
    TOPICS,
    affinity,
    compose,
    explain,
    replace_word,
    scale_senses,
    separation,
    similarity,
    topic,
)

V, K, D = 34, 3, 24  # words of the models below, which have six rows of padding more; senses; width


@pytest.fixture
def model():
    """Random weights, in float64."""
    return lively(n_vocab=V)


@pytest.fixture
def toy_words() -> tiktoken.Encoding:
    """A tokenizer whose words are those of one sentence."""
    return load_tokenizer(toy_tokenizer(['The nurse said that she met Apple and HP, and he met The nurse.']))


def read(n: int = 10) -> torch.Tensor:
    """Random words (2, n)."""
    return text(n) % V


def edits_of(model) -> dict:
    """One edit of each kind, each of which changes something."""
    return {'off': scale_senses([3, 4], [1], 0.0), 'all': scale_senses(None, [0, 2], 1.7),
            'replace': replace_word(model, list(range(0, V, 2)), 5, 6),
            'topic': topic(model, affinity(model, [7, 8]), STRENGTHS[3])}


# -----------------------------------------------------------------------------
# Look.


@pytest.mark.parametrize('at_once', [1, 1000, 1 << 26])
def test_scores_over_the_vocabulary_are_those_of_each_word(model, at_once, monkeypatch):
    """Separation (section 6.2), affinity (Eq. 17) and similarity (Eq. 13) of all words equal loops over words
    and senses, whatever fits into memory at once; padding rows are nobody's neighbour and no divisor."""
    monkeypatch.setattr(senses, 'LOGITS_AT_ONCE', at_once)
    with torch.no_grad():
        model.wte.weight[V:] *= 100
    E, bag = model.wte.weight.detach(), [2, 30]
    apart, near, alike = separation(model, None, 4, 9), affinity(model, bag), similarity(model, 11)
    assert apart.shape == near.shape == alike.shape == (V, K)
    own = model.senses(torch.tensor([11]))[0]
    for word in range(V):
        C = model.senses(torch.tensor([word]))[0].detach()  # (k, d)
        torch.testing.assert_close(separation(model, word, 4, 9), apart[word])
        for l in range(K):
            logits = [(C[l] * E[v]).sum().item() for v in range(V)]
            assert apart[word, l].item() == pytest.approx(logits[4] - logits[9])
            assert near[word, l].item() == pytest.approx(sum(logits[w] for w in bag) / max(logits))
            cosine = (C[l] @ own[l] / C[l].norm() / own[l].norm()).item()
            assert alike[word, l].item() == pytest.approx(cosine)


def test_a_sense_of_nothing_has_no_affinity(model):
    """A sense that is all zero scores 0, not nan, and topic control leaves it zero."""
    with torch.no_grad():
        model.sense_network.final_mlp.c_proj.weight[:D] = 0
        model.sense_network.final_mlp.c_proj.bias[:D] = 0
    scores = affinity(model, [2])
    assert (scores[:, 0] == 0).all() and scores.isfinite().all()
    idx = read()
    assert (topic(model, scores, STRENGTHS[3])(idx, model.senses(idx))[:, :, 0] == 0).all()


# -----------------------------------------------------------------------------
# Explain.


@pytest.mark.parametrize('name', ['none', 'off', 'all', 'replace', 'topic'])
def test_the_terms_of_an_explanation_add_up_to_the_logit(model, name):
    """The sum of alpha * (C . E_w) over positions and senses is the logit of w, that of alpha * (C . (E_a -
    E_b)) the difference of two, for every word and in a batch, with an edit and without."""
    edit, idx, E = {**edits_of(model), 'none': None}[name], read(), model.wte.weight
    with torch.no_grad():
        logits = model(idx, edit=edit)[0][:, -1]  # (B, V)
        for word in range(V):
            alpha, scores = explain(model, idx, E[word], edit)
            assert alpha.shape == scores.shape == (2, 10, K) and (alpha >= 0).all()
            torch.testing.assert_close((alpha * scores).sum((1, 2)), logits[:, word])
        alpha, scores = explain(model, idx, E[3] - E[8], edit)
        torch.testing.assert_close((alpha * scores).sum((1, 2)), logits[:, 3] - logits[:, 8])


# -----------------------------------------------------------------------------
# A prediction for any weights.

IDS = [3, 7, 3, 11, 20, 7]  # two words stand twice


def exactly(model, dials: Dials, weights: torch.Tensor) -> torch.Tensor:
    """The probabilities of dials.next under an edit of the model for each word and sense: (n, N)."""
    rows = []
    for w in weights:
        edit = compose([scale_senses([word], [l], w[u, l].item())
                        for u, word in enumerate(dials.words.tolist()) for l in range(K)])
        with torch.no_grad():
            rows.append(model(torch.tensor([IDS]), edit=edit)[0][0, -1, :V].softmax(-1)[dials.next])
    return torch.stack(rows)


def test_dials_are_the_edits_of_all_senses_at_once(model):
    """For any weights the probabilities are the model's under scale_senses for each word and sense."""
    dials = Dials(model, IDS, columns=V)
    weights = dials.random_weights(6, seed=5)  # (6, U, k)
    assert weights.shape == (6, 4, K) and weights.min() >= 0 and weights.max() <= 2
    assert sorted(dials.next.tolist()) == list(range(V))
    assert torch.allclose(dials.probabilities(weights), exactly(model, dials, weights), rtol=1e-10)
    assert dials.error(50) < 1e-12


@pytest.mark.parametrize('columns', [2, 10, 33])
def test_groups_of_words_have_the_mass_and_its_derivative(model, columns):
    """With fewer columns than words the probabilities are the model's at weight 1, and so are their
    derivatives with respect to every weight; error is the largest difference elsewhere."""
    dials = Dials(model, IDS, columns)
    groups = len(dials.base) - len(dials.next)
    assert dials.parts.shape == (4, K, columns) and groups == columns // 2
    ones = torch.ones(1, 4, K, dtype=torch.float64)
    steps = 1 + 1e-4 * torch.eye(4 * K, dtype=torch.float64).reshape(-1, 4, K)
    back = 2 - steps
    assert torch.allclose(dials.probabilities(ones), exactly(model, dials, ones), rtol=1e-10)
    here, model_s = (f(steps) - f(back) for f in (dials.probabilities, lambda w: exactly(model, dials, w)))
    assert torch.allclose(here, model_s, rtol=1e-4, atol=1e-11)
    weights = dials.random_weights(40, seed=1)
    gap = (dials.probabilities(weights) - exactly(model, dials, weights)).abs().max().item()
    assert gap > 1e-9 and dials.error(40) >= gap * (1 - 1e-9)



# -----------------------------------------------------------------------------
# Edit.


def test_edits_that_ask_for_no_change_are_bit_identical(model):
    """Factor 1, strength 0 and replacing a word by itself leave every bit of the logits, in float32 too."""
    for dtype in (torch.float64, torch.float32):
        idx, scores = read(), affinity(model.to(dtype), [3])
        plain = model(idx)[0]
        for edit in (scale_senses(None, [0, 1], 1.0), topic(model, scores, STRENGTHS[0]), compose([]),
                     replace_word(model, list(range(V)), 5, 5), scale_senses([], [0], 0.0)):
            assert torch.equal(model(idx, edit=edit)[0], plain)


def test_edits_leave_weights_and_senses_as_they_were(model):
    """No edit writes into the senses it is given or into a weight; each changes the logits."""
    idx, before = read(), {k: v.clone() for k, v in model.state_dict().items()}
    plain = model(idx)[0]
    for edit in edits_of(model).values():
        C = model.senses(idx)
        kept = C.clone()
        edit(idx, C)
        assert torch.equal(C, kept) and not torch.allclose(model(idx, edit=edit)[0], plain)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_edits_of_different_words_commute(model):
    """Two edits that touch different words give the same logits in either order; those of the same word are
    applied in the order given."""
    idx = read()
    for one, two in ((scale_senses([1, 2], [0], 0.3), replace_word(model, [3, 4, 5], 8, 9)),
                     (replace_word(model, [1, 2], 6, 7), replace_word(model, [3, 4, 5], 7, 6))):
        there, back = (model(idx, edit=compose(pair))[0] for pair in ((one, two), (two, one)))
        torch.testing.assert_close(there, back)
        assert not torch.allclose(there, model(idx, edit=one)[0])
    one, two = replace_word(model, [3, 4, 5], 6, 7), replace_word(model, [3, 4, 5], 7, 6)
    there, back = (model(idx, edit=compose(pair))[0] for pair in ((one, two), (two, one)))
    assert not torch.allclose(there, back)
    C = model.senses(idx)
    assert torch.equal(compose([one, two])(idx, C), two(idx, one(idx, C)))


def test_a_scaled_sense_is_scaled_where_its_word_stands(model):
    """Senses are multiplied exactly at the given words and sense numbers, None being every word."""
    idx = read()
    C = model.senses(idx)
    expected = C.clone()
    for b in range(2):
        for t in range(10):
            for l in (0, 2):
                if idx[b, t] in (3, 4, 17):
                    expected[b, t, l] *= 0.25
    assert torch.equal(scale_senses([3, 4, 17], [0, 2], 0.25)(idx, C), expected)
    assert torch.equal(scale_senses(None, [1], -2.0)(idx, C)[:, :, 1], -2 * C[:, :, 1])


def test_a_replaced_word_loses_and_gains_what_section_63_says(model):
    """A sense C loses C.r (1 - a.r/|a|^2) on r and gains C.r (1 - a.r/|r|^2) on a; a direction orthogonal to
    both does not move, and neither does any other word."""
    idx, words = read(), list(range(0, V, 2))
    r, a = model.wte.weight[5].detach(), model.wte.weight[6].detach()
    C = model.senses(idx)
    moved = replace_word(model, words, 5, 6)(idx, C)
    here = torch.isin(idx, torch.tensor(words))
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


def test_what_was_said_is_pushed_less(model):
    """The sense with the highest score is multiplied by more than 1; by less, but never below 1, when words
    that it speaks for follow."""
    with torch.no_grad():
        model.sense_network.final_mlp.c_proj.weight.mul_(0.1)
        model.sense_network.final_mlp.c_proj.bias.zero_()
    scores = affinity(model, [7])
    word, l = divmod(scores.argmax().item(), K)
    edit, factors = topic(model, scores, STRENGTHS[3]), []
    said = model.project(model.senses(torch.tensor([word]))[0, l])[:V].argmax().item()
    for n in (0, 2, 20):
        idx = torch.tensor([[word] + n * [said]])
        C = model.senses(idx)
        factors.append((edit(idx, C) / C)[0, 0, l].mean().item())
    assert 1.5 < factors[0] <= 3.3 and factors[0] > factors[1] > factors[2] >= 1


@pytest.mark.parametrize('name', ['off', 'all', 'replace', 'topic'])
def test_generation_in_a_batch_edits_each_text_as_if_alone(model, name):
    """Greedy texts of a batch under an edit equal those of single texts, past block_size too, and each word
    is the argmax under the edit."""
    edit, idx = edits_of(model)[name], read(8)
    out = model.generate(idx, 8, temperature=0, edit=edit)
    for b in range(2):
        assert torch.equal(model.generate(idx[b:b + 1], 8, temperature=0, edit=edit)[0], out[b])
    assert torch.equal(out[:, 8], model(idx, edit=edit)[0][:, -1, :V].argmax(-1))


def test_edits_work_in_bfloat16(model):
    """Every edit gives finite senses of the model's own type."""
    model = model.bfloat16()
    idx = read()
    for edit in edits_of(model).values():
        C = edit(idx, model.senses(idx))
        assert C.dtype == torch.bfloat16 and C.isfinite().all()


def test_the_sum_under_an_edit_is_the_sum_of_edited_senses(model):
    """logits = E^T sum alpha C', with the alpha of the unedited model."""
    idx = read()
    for edit in edits_of(model).values():
        o = weighted_sum(model.alpha(idx), edit(idx, model.senses(idx)))
        torch.testing.assert_close(model(idx, edit=edit)[0], model.project(o))


# -----------------------------------------------------------------------------
# Words on the command line.


def test_word_senses_are_parsed(model, toy_words):
    """WORD:SENSES takes numbers, ranges, * for every word, and A/B for the sense that separates most."""
    model = lively(vocab_size=toy_words.n_vocab)
    nurse = word_forms(toy_words, 'nurse')
    assert nurse == [word_id(toy_words, 'nurse')] and len(word_forms(toy_words, 'The')) == 2
    for given, chosen in (('nurse:2', [2]), ('nurse:0,2', [0, 2]), ('nurse:0-2', [0, 1, 2]),
                          ('nurse:2, 0-1', [2, 0, 1])):
        assert parse_word_senses(given, model, toy_words)[:2] == (nurse, chosen)
    assert parse_word_senses('*:1', model, toy_words)[:2] == (None, [1])
    scores = separation(model, nurse[0], word_id(toy_words, 'she'), word_id(toy_words, 'he'))
    assert parse_word_senses('nurse:she/he', model, toy_words)[1] == [scores.abs().argmax().item()]
    assert parse_factor('nurse:1-2=0.5') == ('nurse:1-2', 0.5)
    assert parse_replacement('nurse: Apple -> HP', toy_words) == (
        nurse, word_id(toy_words, 'Apple'), word_id(toy_words, 'HP'))
    assert parse_strength('3') == (3.3, 3.3, 3, 1) and parse_strength('2,1.5, 1,1') == (2, 1.5, 1, 1)


@pytest.mark.parametrize('given, message', [
    ('nurse', 'WORD:SENSES'), (':1', 'WORD:SENSES'), ('nurse:', 'WORD:SENSES'), ('nurse:3', 'senses 0 to 2'),
    ('nurse:1-3', 'senses 0 to 2'), ('nurse:2-1', 'no sense 2-1'), ('nurse:-1', 'neither'),
    ('nurse:1-', 'neither'), ('nurse:one', 'neither'), ('nurse:1,', 'neither'), ('nurse:²', 'neither'),
    ('zebra:1', "'zebra' is no single word of this vocabulary but ' ' \\+ 'z'"), ('*:she/he', 'give its num'),
    ('nurse:she/', 'not A/B'), ('nurse:she/zebra', "'zebra'")])
def test_malformed_word_senses_are_refused(given, message, toy_words):
    """What is not WORD:SENSES, or names what is not there, is an error that says so."""
    with pytest.raises(UserError, match=message):
        parse_word_senses(given, lively(vocab_size=toy_words.n_vocab), toy_words)


@pytest.mark.parametrize('parse, given, message', [
    (parse_factor, 'nurse:1', 'FACTOR'), (parse_factor, 'nurse:1=x', 'FACTOR'),
    (parse_factor, 'nurse:1=nan', 'FACTOR'), (parse_factor, '=1', 'FACTOR'),
    (parse_strength, '4', 'neither'), (parse_strength, '-1', 'neither'), (parse_strength, '1,2,3', 'neither'),
    (parse_strength, '1,2,3,inf', 'neither'), (parse_strength, '1,1,1,-1', 'neither'),
    (parse_strength, '', 'neither')])
def test_malformed_numbers_are_refused(parse, given, message):
    """A factor or a strength that is none is an error that says what one is."""
    with pytest.raises(UserError, match=message):
        parse(given)


@pytest.mark.parametrize('given', ['nurse', 'nurse: Apple', 'nurse: Apple ->', ': Apple -> HP',
                                   'nurse: -> HP', 'nurse: Apple -> zebra'])
def test_a_malformed_replacement_is_refused(given, toy_words):
    """What is not "WORD: OLD -> NEW" with three words of the vocabulary is an error."""
    with pytest.raises(UserError, match='->|zebra'):
        parse_replacement(given, toy_words)


def test_bags_take_every_piece(toy_words):
    """A bag holds each id once; a word that can only be spelled, and an empty bag, are errors."""
    assert bag_of_words(toy_words, ['she', 'nurse', 'she']) == sorted(word_id(toy_words, w)
                                                                      for w in ('she', 'nurse'))
    for words, message in ((['zebra'], "'zebra' is no word"), ([], 'empty'), ([''], 'no word')):
        with pytest.raises(UserError, match=message):
            bag_of_words(toy_words, words)
    try:
        gpt2 = load_tokenizer({'name': 'gpt2'})
    except ValueError as error:
        pytest.skip(str(error))
    assert word_id(gpt2, 'nurse') == 15849 and len(word_forms(gpt2, 'MacBook')) == 1
    pieces = gpt2.encode_ordinary(' hairdresser')
    assert len(pieces) > 1 and bag_of_words(gpt2, ['hairdresser']) == sorted(set(pieces))
    with pytest.raises(UserError, match='hair'):
        word_id(gpt2, 'hairdresser')


def test_table_10_has_17_topics():
    """The labels of Table 10 with their bags, each word of which is one of the label's, or hobbies."""
    assert len(TOPICS) == 17 and TOPICS['arts_culture'] == ['arts', 'culture']
    assert all(set(words) <= set(label.split('_')) for label, words in TOPICS.items())
