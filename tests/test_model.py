"""Claims about model.py: equations, size, initialization, loss and generation."""

import re
from itertools import product

import pytest
import torch
from helpers import SIZES, Averages, lively, some_targets, text
from torch import nn
from torch.testing import assert_close

from rucksack.checkpoint import count_parameters, make_model
from rucksack.fast import Cached
from rucksack.model import GPT, Backpack, Config, draw, weighted_sum
from rucksack.senses import scale_senses, senses_after


def test_o_is_the_quadruple_loop_of_eq_2():
    """Summed one term at a time, o_i = sum_j sum_l alpha_lij C(x_j)_l, and the logits are E o."""
    model = lively()
    idx = text(5)
    C = model.senses(idx)
    alpha = model.alpha(idx)
    o = torch.zeros(2, 5, 24).double()
    for b, i, j, l in product(range(2), range(5), range(5), range(3)):
        o[b, i] += alpha[b, l, i, j] * C[b, j, l]
    assert_close(weighted_sum(alpha, C), o)
    assert_close(model(idx), o @ model.wte.weight.T)


def test_the_example_in_the_docstring():
    """o of "sick trick" is (1, 0), skateboarding, as worked out by hand at the top of model.py."""
    alpha = [[[1, 0], [0.5, 0.5]], [[1, 0], [0, 1]]]
    C = [[[1.0, 0], [0, 1]], [[1, 0], [0, 0]]]
    o = weighted_sum(torch.tensor([alpha]), torch.tensor([C]))
    assert o[0, 1].tolist() == [1, 0]


def test_alpha_rows_are_the_causal_distributions_of_eq_12():
    """alpha_li is the softmax over j <= i of q_li . k_lj / sqrt(d/k), and exactly 0 for j > i."""
    model = lively()
    idx = text()
    h = model.contextualizer(model.wte(idx))
    q, k = model.sense_weights.c_attn(h).view(2, 10, 2, 3, 8).unbind(2)  # (B, T, k, d/k)
    expected = torch.zeros(2, 3, 10, 10).double()
    for b, l, i in product(range(2), range(3), range(10)):
        scores = [q[b, i, l] @ k[b, j, l] / 8 ** 0.5 for j in range(i + 1)]
        odds = torch.stack(scores).exp()
        expected[b, l, i, :i + 1] = odds / odds.sum()
    alpha = model.alpha(idx)
    assert_close(alpha, expected)
    assert (alpha.triu(1) == 0).all()


@pytest.mark.parametrize('n_sense', [0, 3])
def test_a_later_token_changes_nothing_earlier(n_sense):
    """Logits up to a position have the same bits whatever follows."""
    model = lively(n_sense=n_sense)
    idx = text()
    other = idx.clone()
    other[:, 6:] = (idx[:, 6:] + 1) % 40
    a = model(idx)
    b = model(other)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


@pytest.mark.parametrize('change', [
    {'block_size': 0}, {'n_head': 2.0}, {'n_layer': 0}, {'dropout': float('nan')}, {'dropout': 1.0},
    {'n_vocab': 50258}, {'n_embd': 770}, {'n_sense': 5}, {'n_sense': -1}], ids=str)
def test_a_config_with_impossible_numbers_is_refused(change):
    """Impossible numbers in a config are refused, because they would fail or mislead later."""
    with pytest.raises(ValueError):
        Config(**change)


def test_alpha_sums_to_1_under_autocast_on_a_cpu():
    """Each row of alpha sums to 1 within 1e-6, even though the scores are in bfloat16."""
    model = lively().float()
    with torch.autocast('cpu', torch.bfloat16):
        sums = model.alpha(text()).sum(-1)
    assert (sums - 1).abs().max() < 1e-6


def test_alpha_may_be_given():
    """Logits are linear in alpha, and have the same bits for the model's own alpha."""
    model = lively()
    alpha = model.alpha(text())
    assert torch.equal(model(text(), alpha=alpha), model(text()))
    assert_close(model(text(), alpha=-2 * alpha), -2 * model(text()))


@pytest.mark.parametrize('shape', [(1, 10, 3, 24), (2, 1, 3, 24), (2, 10, 1, 24), (2, 9, 3, 24)])
def test_senses_that_do_not_fit_alpha_are_refused(shape):
    """The error names the shape, because einsum would broadcast a single text or sense."""
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        lively()(text(), C=torch.randn(shape).double())


@pytest.mark.parametrize('n_sense', [0, 3])
@pytest.mark.parametrize('cache', [lambda model: model, Cached], ids=['plain', 'cached'])
def test_a_text_longer_than_block_size_is_refused(cache, n_sense):
    """A Backpack and a GPT, cached or not, refuse a longer text and say how long it may be."""
    with pytest.raises(ValueError, match='13.*12'):
        cache(lively(n_sense=n_sense))(text(13))


@pytest.mark.parametrize('size, n_sense, hidden, total, contextual', [
    ('micro', 16, 0, 41.7, 30.4), ('mini', 16, 0, 103.9, 72.7), ('small', 16, 0, 170.1, 125.2),
    ('mini', 1, 640, 74.3, 72.7), ('mini', 4, 640, 75.6, 72.7), ('mini', 16, 640, 80.5, 72.7),
    ('mini', 64, 640, 100.2, 72.7), ('small', 0, 0, 124.0, 124.0)])
def test_parameter_counts(size, n_sense, hidden, total, contextual):
    """Millions of parameters match the paper's sizes and its Table 8."""
    with torch.device('meta'):
        model = make_model(Config(**SIZES[size], n_sense=n_sense, sense_hidden=hidden))
    n = count_parameters(model)
    assert round(n['total'] / 1e6, 1) == total
    assert round(n['contextualizer'] / 1e6, 1) == contextual


@pytest.mark.parametrize('n_sense', [0, 1, 16])
def test_a_new_model_has_the_deviations_of_gpt2(n_sense):
    """Matrices have std 0.02; the last layer of an MLP or attention has 0.02 / sqrt(2 n_layer)."""
    torch.manual_seed(0)
    model = make_model(Config(64, 5000, n_layer=8, n_head=4, n_embd=64, n_sense=n_sense))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            wanted = 0.02 / 4 if 'c_proj' in name else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.05), name
        else:
            is_scale_of_norm = 'ln_' in name and name.endswith('weight')
            assert (p == is_scale_of_norm).all(), name


def test_dropout_is_in_the_contextualizer_alone():
    """In training, dropout varies alpha but not senses; in evaluation, it changes nothing."""
    model = lively(dropout=0.5).train()
    idx = text()
    assert not torch.equal(model.alpha(idx), model.alpha(idx))
    assert torch.equal(model.senses(idx), model.senses(idx))
    model.eval()
    assert torch.equal(model.alpha(idx), model.alpha(idx))


@pytest.mark.parametrize('n_sense', [0, 3])
def test_the_loss_is_the_mean_over_targets_that_count(n_sense):
    """The loss is the mean of -log p over targets other than -1, as computed in a loop."""
    model = lively(n_sense=n_sense)
    idx = text()
    targets = some_targets(idx)
    logp = model(idx).log_softmax(-1)
    places = [(b, i) for b, i in product(range(2), range(10)) if targets[b, i] != -1]
    nats = [-logp[b, i, targets[b, i]].item() for b, i in places]
    assert model(idx, targets).item() == pytest.approx(sum(nats) / len(nats))


def test_another_contextualizer_keeps_its_parameters():
    """A contextualizer that you pass keeps its parameters, and alpha comes from it."""
    contextualizer = Averages(24, 24)
    nn.init.constant_(contextualizer.bias, 7.0)
    model = Backpack(Config(12, 40, n_head=2, n_embd=24, n_sense=3), contextualizer)
    assert (contextualizer.bias == 7).all()
    h = contextualizer(model.wte(text()))
    assert torch.equal(model.alpha(text()), model.sense_weights(h))


@torch.no_grad()
@pytest.mark.parametrize('temperature, top_k', [(0, None), (1.3, 4), (5.0, None)])
@pytest.mark.parametrize('n_prompt', [4, 12, 30])
@pytest.mark.parametrize('n_sense, edit', [
    (3, None), (3, scale_senses([3, 4, 5], [0, 2], 0.3)), (0, None)])
def test_each_id_is_drawn_from_the_logits_of_forward(n_sense, edit, n_prompt, temperature, top_k):
    """Each id is drawn from the logits after the last 12 = block_size ids, edited or not."""
    model = lively(2, n_sense=n_sense)
    torch.manual_seed(0)
    made = model.generate(text(n_prompt, 3), 20, temperature, top_k, edit=edit)
    assert made.shape == (3, n_prompt + 20)
    torch.manual_seed(0)
    for n in range(n_prompt, n_prompt + 20):
        read = made[:, max(0, n - 12):n]
        logits = model(read)
        if edit:
            logits = model(read, C=senses_after(model, read, edit))
        drawn = draw(logits[:, -1], temperature, top_k)
        assert torch.equal(made[:, n:n + 1], drawn)


def test_generation_calls_the_modules_so_that_hooks_fire():
    """A hook that puts all weight on the current token changes the generated text."""
    model = lively()
    plain = model.generate(text(4), 20, temperature=0)
    model.sense_weights.register_forward_hook(
        lambda module, inputs, alpha: torch.eye(alpha.shape[-1]).double().expand_as(alpha))
    assert not torch.equal(model.generate(text(4), 20, temperature=0), plain)


@pytest.mark.parametrize('n_sense, setting', [
    (3, {'top_k': 0}), (3, {'temperature': -0.5}), (3, {'edit': lambda idx, C: None}),
    (0, {'edit': scale_senses(None, [0], 0.0)})])
@pytest.mark.parametrize('cache', [lambda model: model, Cached], ids=['plain', 'cached'])
def test_what_would_be_ignored_or_inverted_is_refused(cache, n_sense, setting):
    """Negative temperature, no ids to draw from, an edit that returns nothing or is of a GPT."""
    with pytest.raises((ValueError, AssertionError, AttributeError)):
        cache(lively(n_sense=n_sense)).generate(text(4), 2, **setting)


@pytest.mark.parametrize('temperature', [0, 1, 5])
def test_padding_is_never_sampled(temperature):
    """Ids from n_vocab on are never generated, however large their logits."""
    model = lively(n_vocab=30)
    model.wte.weight.data[30:] *= 50
    logits = model(text() % 30)[:, -1]
    of_padding = logits[:, 30:].amax(-1)
    of_ids = logits[:, :30].amax(-1)
    assert (of_padding > of_ids).all()
    assert model.generate(text(3, 8) % 30, 20, temperature).max() < 30


def test_generation_ends_once_every_text_has_had_the_stop():
    """With stop, ids are the same as without it until every text has generated the stop id."""
    prompts = text(4, 3)
    prompts[:, 0] = 7  # does not count
    texts = []
    for stop in (None, 7):
        torch.manual_seed(3)
        texts.append(lively().generate(prompts, 900, 5.0, stop=stop))
    whole, ended = texts
    n = ended.shape[1]
    assert n < 904
    assert torch.equal(ended, whole[:, :n])
    assert (ended[:, 4:] == 7).any(1).all()
    assert not (ended[:, 4:-1] == 7).any(1).all()


@pytest.mark.parametrize('top_k, kept', [
    (None, [1, 1, 1, 1]), (9, [1, 1, 1, 1]), (2, [0, 1, 0, 1])])
def test_ids_are_drawn_by_softmax_of_the_top_k(top_k, kept):
    """Shares of 40,000 draws are proportional to exp(logit / temperature) within the top_k."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.5]])
    odds = (logits[0] / 0.7).exp() * torch.tensor(kept)
    torch.manual_seed(0)
    drawn = draw(logits.expand(40_000, -1), 0.7, top_k)
    shares = drawn.flatten().bincount(minlength=4) / 40_000
    assert_close(shares, odds / odds.sum(), rtol=0, atol=0.01)
    assert (shares[odds == 0] == 0).all()
    assert draw(logits, 0, top_k).item() == 1


def test_a_gpt_says_that_it_has_no_senses():
    """A GPT sets n_sense to 0, whatever its config says."""
    assert GPT(Config(n_layer=1, n_embd=24, n_head=2, n_sense=3)).config.n_sense == 0
