"""Claims about model.py: equations, size, start, fast forms beside plain ones, generation."""

import math
from itertools import product

import pytest
import torch
from helpers import lively, text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import model as model_py
from model import SIZES, Backpack, Cache, Config, next_token_probs, weighted_sum
from rucksack.data import DistinctIds, inputs_of
from senses import affinities, compose, edited, scale_senses, topic

# -----------------------------------------------------------------------------
# The equations.


def test_o_is_the_quadruple_loop_of_eq_2():
    """o_i = sum_j sum_l alpha_lij C(x_j)_l, summed one term at a time, and the logits are E o."""
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
    """o of "trick sick" is (1, 0), skateboard, as worked out by hand at the top of model.py."""
    alpha = [[[1, 0], [0.5, 0.5]], [[1, 0], [1, 0]]]
    C = [[[1.0, 0], [0, 0]], [[1, 0], [0, 1]]]
    o = weighted_sum(torch.tensor([alpha]), torch.tensor([C]))
    assert o[0, 1].tolist() == [1, 0]


def test_cbow_is_a_backpack():
    """With one sense and equal weights, logits are E times the mean of vectors (section 2.2)."""
    model = lively(n_sense=1)
    idx = text()
    for p in model.sense_weights.parameters():
        p.data.zero_()
    vectors = model.senses(idx)[:, :, 0]  # (B, T, d)
    means = vectors.cumsum(1) / torch.arange(1, 11)[:, None]
    assert_close(model(idx), means @ model.wte.weight.T)


def test_a_single_attention_layer_is_a_backpack():
    """Attention is weighted_sum with its own alpha and C(x)_l = O_l V_l x (section 2.3)."""
    attention = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
    x = torch.randn(2, 7, 12)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, alpha = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    V = attention.in_proj_weight[24:].view(3, 4, 12)  # (head, d/head, d)
    O = attention.out_proj.weight.view(12, 3, 4)  # (d, head, d/head)
    C = torch.einsum('elh,lhd,btd->btle', O, V, x)
    assert_close(weighted_sum(alpha, C), expected)


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
    is_past = torch.ones(10, 10, dtype=torch.bool).tril()
    assert_close(alpha, expected)
    assert (alpha[..., is_past] > 0).all()
    assert (alpha[..., ~is_past] == 0).all()


@pytest.mark.parametrize('n_sense', [0, 3])
def test_a_later_token_changes_nothing_earlier(n_sense):
    """Logits up to a position are the same bits, whatever follows."""
    model = lively(n_sense=n_sense)
    idx = text()
    other = idx.clone()
    other[:, 6:] = (idx[:, 6:] + 1) % 40
    a = model(idx)
    b = model(other)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.allclose(a[:, 6:], b[:, 6:])


def test_logits_are_linear_in_senses():
    """Logits under 2 A - 3 B are 2 logits(A) - 3 logits(B)."""
    model = lively()
    idx = text()
    A, B = torch.randn(2, 2, 10, 3, 24).double()
    assert_close(model(idx, C=2 * A - 3 * B), 2 * model(idx, C=A) - 3 * model(idx, C=B))


def test_gradients_of_a_frequent_id_are_summed_exactly():
    """In bfloat16, a thousand gradients of 1 for an id add up to 1000; summed as such, to 256."""
    model = lively(block_size=1000).float()
    for p in model.sense_network.parameters():
        p.data.zero_()
    idx = torch.full((1, 1000), 7)
    with torch.autocast('cpu', torch.bfloat16):
        model.senses(idx).sum().backward()
    assert model.sense_network.final_mlp.c_proj.bias.grad.unique().tolist() == [1000]


def test_senses_know_no_context():
    """An id has the same senses wherever it is."""
    model = lively()
    idx = text()
    assert_close(model.senses(idx), model.senses(torch.arange(40))[idx])


def test_a_transformer_takes_no_senses():
    """Given to its forward pass, they are an error and not ignored."""
    with pytest.raises(AssertionError):
        lively(n_sense=0)(text(), C=torch.ones(1))


@pytest.mark.parametrize('shape', [(2, 1, 3, 24), (2, 12, 3, 24), (2, 10, 1, 24)])
def test_senses_of_another_shape_are_refused(shape):
    """An einsum would spread one position or sense over all, and a slice would drop the last."""
    with pytest.raises(AssertionError):
        lively()(text(), C=torch.randn(shape).double())


# -----------------------------------------------------------------------------
# Size and start.


@pytest.mark.parametrize('size, n_sense, hidden, total, contextual', [
    ('micro', 16, 0, 41.7, 30.4), ('mini', 16, 0, 103.9, 72.7), ('small', 16, 0, 170.1, 125.2),
    ('mini', 1, 640, 74.3, 72.7), ('mini', 4, 640, 75.6, 72.7), ('mini', 16, 640, 80.5, 72.7),
    ('mini', 64, 640, 100.2, 72.7), ('small', 0, 0, 124.0, 124.0)])
def test_parameter_counts(size, n_sense, hidden, total, contextual):
    """Millions of parameters are those of the paper's sizes and of its Table 8."""
    with torch.device('meta'):
        model = Backpack(Config(**SIZES[size], n_sense=n_sense, sense_hidden=hidden))
    n = model.n_params()
    assert round(n['total'] / 1e6, 1) == total
    assert round(n['contextualizer'] / 1e6, 1) == contextual
    assert n['total'] == n['contextualizer'] + n['senses']


def new_model(n_sense: int) -> Backpack:
    """A model as it starts, large enough to measure its deviations."""
    torch.manual_seed(0)
    return Backpack(Config(64, 5000, n_layer=8, n_head=4, n_embd=64, n_sense=n_sense))


@pytest.mark.parametrize('n_sense', [0, 1, 16])
def test_a_new_model_knows_nothing(n_sense):
    """Its loss is ln V within 0.2."""
    model = new_model(n_sense)
    idx = text(64, 4)
    assert model(idx, idx.roll(1)).item() == pytest.approx(math.log(5000), abs=0.2)


@pytest.mark.parametrize('n_sense', [0, 1, 16])
def test_a_new_model_has_the_deviations_of_gpt2(n_sense):
    """Matrices have 0.02; that over sqrt(2 n_layer) have second layers of MLPs, and attention's."""
    for name, p in new_model(n_sense).named_parameters():
        if p.dim() == 2:
            wanted = 0.02 / 4 if 'c_proj' in name else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.05), name
        else:
            is_scale_of_norm = 'ln_' in name and name.endswith('weight')
            assert (p == is_scale_of_norm).all(), name


# -----------------------------------------------------------------------------
# Fast forms beside plain ones.

# Ids (B, T): some repeat, one id alone, one token, all distinct, a larger batch, one text.
TEXTS = [text(), torch.full((3, 7), 5), text(1, 1), torch.arange(12)[None], text(12, 8),
         text(12, 1)]


def with_gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    """A value, and the gradients of a number made of it with respect to inputs."""
    number = (value * value.detach().sin()).sum()
    return [value, *torch.autograd.grad(number, inputs, allow_unused=True)]


def plain(model: Backpack, idx: Tensor, C: Tensor | None = None) -> Tensor:
    """The Backpack as the paper defines it, the five lines at the top of model.py."""
    h = model.contextualizer(model.wte(idx))
    C = model.sense_network(model.wte(idx)) if C is None else C
    alpha = model.sense_weights(h)
    o = weighted_sum(alpha, C)
    return model.project(o)


@pytest.mark.parametrize('seed', range(6))
def test_forward_is_the_five_equations(seed):
    """model(idx) has their logits and gradients."""
    model = lively(seed)
    idx = TEXTS[seed]
    inputs = [*model.parameters()]
    found = with_gradients(model(idx), inputs)
    assert_close(found, with_gradients(plain(model, idx), inputs))


@pytest.mark.parametrize('seed', range(6))
def test_forward_is_the_five_equations_of_given_senses(seed):
    """model(idx, C=C) has their logits and gradients, those of C among them."""
    model = lively(seed)
    idx = TEXTS[seed]
    C = torch.randn(*idx.shape, 3, 24, dtype=torch.float64, requires_grad=True)
    inputs = [*model.parameters(), C]
    found = with_gradients(model(idx, C=C), inputs)
    assert_close(found, with_gradients(plain(model, idx, C), inputs))


def test_senses_in_a_compiled_model_are_the_same(monkeypatch):
    """There the senses of every token are computed, not of every distinct id."""
    model = lively()
    expected = model.senses(text())
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    assert_close(model.senses(text()), expected)


def some_targets(idx: Tensor) -> Tensor:
    """Targets of the ids (B, T); about a fifth of them is -1, and does not count."""
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    return targets


@pytest.mark.parametrize('n_sense', [0, 3])
@pytest.mark.parametrize('seed', range(6))
def test_the_loss_is_the_cross_entropy_of_the_logits(seed, n_sense, monkeypatch):
    """In values and gradients, when few logits are made at a time, and with distinct ids too."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)  # 9 positions at a time
    model = lively(seed, n_sense=n_sense)
    inputs = [*model.parameters()]
    idx = TEXTS[seed]
    targets = some_targets(idx)
    logits = plain(model, idx) if n_sense else model(idx)
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss = model(idx, targets)
    of_distinct_ids = DistinctIds(model)(*inputs_of(idx, targets, 'cpu'))
    expected = with_gradients(entropy, inputs)
    assert_close(with_gradients(loss, inputs), expected)
    assert_close(with_gradients(of_distinct_ids, inputs), expected)


def test_the_loss_makes_few_logits_at_a_time(monkeypatch):
    """With room for 9 positions, no product with E has more."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)
    model = lively()
    sizes = []
    linear = F.linear

    def watched(x, weight, bias=None):
        if weight is model.wte.weight:
            sizes.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, 'linear', watched)
    model(text(), text())
    assert sizes == [9, 9, 2]


def test_work_is_saved_where_it_is_said_to_be(monkeypatch):
    """Senses of distinct ids alone, 37% of alpha at 512 tokens; generate has senses once a token.

    Distinct ids are padded to a multiple of 64.
    """
    model = lively(block_size=512)
    idx = text(512)
    rows = []
    cells = []
    softmax = model_py.causal_softmax

    def watched(query, key):
        cells.append(query.shape[2] * key.shape[2])
        return softmax(query, key)

    monkeypatch.setattr(model_py, 'causal_softmax', watched)
    model.sense_network.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    DistinctIds(model)(*inputs_of(idx, idx, 'cpu'))
    assert rows == [64]
    assert 1 - sum(cells) / 512 ** 2 == pytest.approx(0.375)
    rows.clear()
    model.generate(text(4, 1), 5)
    assert rows[1:] == [1, 1, 1, 1]


def test_dropout_is_in_the_contextualizer_alone():
    """In training alpha varies and senses do not; in evaluation nothing does."""
    model = lively(dropout=0.5).train()
    idx = text()
    assert not torch.equal(model.alpha(idx), model.alpha(idx))
    assert torch.equal(model.senses(idx), model.senses(idx))
    model.eval()
    assert torch.equal(model.alpha(idx), model.alpha(idx))


@pytest.mark.parametrize('n_sense', [0, 3])
@pytest.mark.parametrize('seed', range(6))
def test_the_loss_without_gradients_is_the_same(seed, n_sense, monkeypatch):
    """Under no_grad it has the same bits, and takes part in no gradient."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)
    model = lively(seed, n_sense=n_sense)
    idx = TEXTS[seed]
    targets = some_targets(idx)
    loss = model(idx, targets)
    with torch.no_grad():
        alone = model(idx, targets)
    assert torch.equal(alone, loss)
    assert not alone.requires_grad


@pytest.mark.parametrize('T, S', [(10, 10), (1, 7), (4, 9)])
@pytest.mark.parametrize('size', [1, 3, 4, 10, 128])
def test_a_sum_in_blocks_is_the_sum(size, T, S):
    """Blocks of any size have the values and gradients of weighted_sum(causal_softmax(..), C)."""
    shapes = [(2, 3, T, 8), (2, 3, S, 8), (2, S, 3, 24)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, C = inputs
    in_blocks = model_py.sum_in_blocks(query, key, C, size)
    whole = weighted_sum(model_py.causal_softmax(query, key), C)
    assert_close(with_gradients(in_blocks, inputs), with_gradients(whole, inputs))


# -----------------------------------------------------------------------------
# Generation.


def edit_of(name: str, model: Backpack):
    """An edit of a model, or None."""
    if name == 'none':
        return None
    if name == 'factor':
        return scale_senses(list(range(20)), [0, 2], 0.3)
    scores = affinities(model, [[3, 5, 8]])[0]
    boost = topic(model, scores, (3.0, 2.5, 2.0, 1.0))
    return compose([scale_senses(None, [1], 0.5), boost])


@torch.no_grad()
@pytest.mark.parametrize('name', ['none', 'factor', 'both'])
def test_the_cache_changes_no_logit(name):
    """A start and then one token at a time give the logits of the whole text, to 1e-4."""
    model = lively(2).float()
    edit = edit_of(name, model)
    idx = text(12, 3)
    cache = Cache(12)
    for start, end in [(0, 4), *zip(range(4, 12), range(5, 13))]:
        C = edited(model, idx[:, :end], edit)
        logits = model(idx[:, start:end], C=C, cache=cache)
        cache.length = end
        expected = model(idx[:, :end], C=C)[:, start:]
        assert_close(logits, expected, rtol=0, atol=1e-4)


def uncached(model: Backpack, idx: Tensor, n: int, edit) -> Tensor:
    """Greedy text without a cache; past block_size only the last block_size // 2 tokens stay."""
    kept = idx
    for _ in range(n):
        if kept.shape[1] > 12:
            kept = kept[:, -6:]
        C = edited(model, kept, edit) if model.config.n_sense else None
        likeliest = model(kept, C=C)[:, -1].argmax(-1, keepdim=True)
        kept = torch.cat([kept, likeliest], dim=1)
        idx = torch.cat([idx, likeliest], dim=1)
    return idx


@torch.no_grad()
@pytest.mark.parametrize('n_prompt', [4, 30])
@pytest.mark.parametrize('n_sense, name', [(3, 'none'), (3, 'factor'), (3, 'both'), (0, 'none')])
def test_the_cache_changes_no_text(n_sense, name, n_prompt):
    """The likeliest text is the same without it, for prompts shorter and longer than block_size."""
    model = lively(2, n_sense=n_sense).float()
    edit = edit_of(name, model)
    prompt = text(n_prompt, 3)
    made = model.generate(prompt, 40, temperature=0, edit=edit)
    assert torch.equal(made, uncached(model, prompt, 40, edit))
    assert len(made.unique()) > 3


def test_the_cache_reads_each_token_once():
    """Up to block_size a token goes through the contextualizer once; then half of them do again."""
    model = lively()
    seen = []

    def count(module, args):
        x, _ = args
        seen.append(x.shape[1])

    model.contextualizer.register_forward_pre_hook(count)
    model.generate(text(4), 12)
    assert seen == [4, 1, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1]


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
    """With stop the ids are those without it, up to where the last text first has that id."""
    def make(stop: int | None) -> Tensor:
        torch.manual_seed(3)
        return lively().generate(text(4, 3), 200, stop=stop)

    whole = make(None)
    drawn = whole[:, 4:]
    stop = next(v for v in range(40) if (drawn == v).any(1).all())
    first_places = [(row == stop).nonzero()[0].item() for row in drawn]
    n = max(first_places) + 1
    assert n < 200
    assert torch.equal(make(stop), whole[:, :4 + n])


@pytest.mark.parametrize('options', [{'temperature': 0}, {'temperature': 1e-300}, {'top_k': 1}])
def test_temperature_zero_is_argmax(options):
    """So are tiny temperatures, and top_k = 1."""
    model = lively().float()
    out = model.generate(text(4), 6, **options)
    likeliest = model(out[:, :-1]).argmax(-1)
    assert out.shape == (2, 10)
    assert torch.equal(out[:, 4:], likeliest[:, 3:])


@pytest.mark.parametrize('top_k, kept', [
    (None, [1, 1, 1, 1]), (9, [1, 1, 1, 1]), (2, [0, 1, 0, 1])])
def test_ids_are_drawn_by_softmax_of_the_top_k(top_k, kept):
    """Probabilities are in proportion to exp(logit / temperature) of the top_k likeliest."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.5]])
    odds = (logits / 0.7).exp() * torch.tensor(kept)
    assert_close(next_token_probs(logits, 0.7, top_k), odds / odds.sum())


def test_generate_draws_as_it_is_asked_to(monkeypatch):
    """temperature and top_k go to next_token_probs at each step."""
    asked = []

    def watched(logits, *how):
        asked.append(how)
        return next_token_probs(logits, *how)

    monkeypatch.setattr(model_py, 'next_token_probs', watched)
    lively().generate(text(4), 3, 0.7, 5)
    assert asked == [(0.7, 5)] * 3


def test_huge_logits_overflow_no_probability():
    """The likeliest id then has all of it."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.5]])
    assert next_token_probs(1e38 * logits)[0].tolist() == [0, 1, 0, 0]
