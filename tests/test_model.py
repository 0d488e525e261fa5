"""Claims about the architecture: its equations, its size, its fast forms beside the plain, its generation."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model as model_py
from model import SIZES, Backpack, Cache, Config, DistinctIds, SenseTable, next_token_probs, weighted_sum
from rucksack.data import inputs_of
from senses import affinity, compose, edited, scale_senses, topic

TINY = dict(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)


def lively(seed: int = 0, **changes) -> Backpack:
    """A small model with large random weights, biases and norms, in float64: nothing is zero by accident."""
    torch.manual_seed(seed)
    model = Backpack(Config(**{**TINY, **changes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def text(n: int = 10, batch: int = 2, seed: int = 1) -> Tensor:
    """Random ids (batch, n)."""
    return torch.randint(TINY['vocab_size'], (batch, n), generator=torch.Generator().manual_seed(seed))


# -----------------------------------------------------------------------------
# The five equations.


@torch.no_grad()
def test_o_is_the_quadruple_loop_of_eq_2():
    """The logits are E o with o_i = sum_j sum_l alpha_lij C(x_j)_l, summed one term at a time."""
    model, idx = lively(), text(5)
    C, alpha, o = model.senses(idx), model.alpha(idx), torch.zeros(2, 5, 24, dtype=torch.float64)
    for b in range(2):
        for i in range(5):
            for j in range(5):
                for l in range(3):
                    o[b, i] += alpha[b, l, i, j] * C[b, j, l]
    torch.testing.assert_close([weighted_sum(alpha, C), model(idx)], [o, o @ model.wte.weight.T])


def test_the_example_in_the_docstring():
    """o of "trick sick" is (1, 0), skateboard, as worked out by hand at the top of model.py."""
    C = torch.tensor([[[[1., 0], [0, 0]], [[1, 0], [0, 1]]]])  # (1, 2, 2, 2)
    alpha = torch.tensor([[[[1, 0], [0.5, 0.5]], [[1, 0], [1, 0]]]])  # (1, 2, 2, 2)
    assert weighted_sum(alpha, C)[0, 1].tolist() == [1, 0]


@torch.no_grad()
def test_cbow_is_a_backpack():
    """Section 2.2: with one sense and equal weights the logits are E times the mean of the word vectors."""
    model, idx = lively(n_sense=1), text()
    for p in model.sense_weights.parameters():
        p.zero_()
    vectors = model.senses(torch.arange(40))[:, 0]  # (V, d)
    for i in range(10):
        bag = torch.stack([vectors[w] for w in idx[0, :i + 1]]).mean(0)
        torch.testing.assert_close(model(idx)[0, i], model.wte.weight @ bag)


def test_a_single_attention_layer_is_a_backpack():
    """Section 2.3: multi-head attention is weighted_sum with its own alpha and C(x)_l = O_l V_l x."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True).double()
    x, mask = torch.randn(2, 7, 12, dtype=torch.float64), torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, alpha = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    V = attention.in_proj_weight[24:].view(3, 4, 12)  # (head, d/head, d)
    O = attention.out_proj.weight.view(12, 3, 4)  # (d, head, d/head)
    C = torch.einsum('elh,lhd,btd->btle', O, V, x)  # (B, T, head, d)
    torch.testing.assert_close(weighted_sum(alpha, C), expected)


def test_alpha_rows_are_causal_distributions():
    """Every row of alpha is >= 0, sums to one, and gives later positions exactly zero."""
    alpha = lively().alpha(text())
    assert alpha.shape == (2, 3, 10, 10) and (alpha.tril() > 0).sum() == 2 * 3 * 55
    assert (alpha.triu(1) == 0).all() and (alpha >= 0).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]))


def test_alpha_divides_by_the_root_of_the_head_size():
    """alpha_l = softmax(q_l k_l^T / sqrt(d/k)), written out for one sense and position (Eq. 12)."""
    model, idx = lively(), text()
    q, k = model.sense_weights.c_attn(model.contextualizer(model.wte(idx))).split(24, dim=-1)
    scores = [q[0, 7, 8:16] @ k[0, j, 8:16] / 8 ** 0.5 for j in range(8)]  # sense 1 of 3: columns 8 to 15
    torch.testing.assert_close(model.alpha(idx)[0, 1, 7, :8], torch.stack(scores).softmax(0))


def test_the_sense_network_is_the_one_of_appendix_a1():
    """C = MLP2(LN2(r + MLP(LN1(r)))) with r = x + LN0(x), written out from the weights."""
    model = lively()
    net, x = model.sense_network, model.wte.weight[7]
    def mlp(m, v):
        return m.c_proj.weight @ F.gelu(m.c_fc.weight @ v + m.c_fc.bias, approximate='tanh') + m.c_proj.bias
    def ln(m, v):
        return (v - v.mean()) / (v.var(unbiased=False) + 1e-5).sqrt() * m.weight + m.bias
    r = x + ln(net.ln_0, x)
    expected = mlp(net.final_mlp, ln(net.ln_2, r + mlp(net.mlp, ln(net.ln_1, r))))
    torch.testing.assert_close(model.senses(torch.tensor([7]))[0].flatten(), expected)


@pytest.mark.parametrize('n_sense', [0, 3])
def test_a_later_token_changes_nothing_earlier(n_sense):
    """Logits up to a position are bit-identical whatever follows, in the Backpack and the Transformer."""
    model, idx = lively(n_sense=n_sense), text()
    other = idx.clone()
    other[:, 6] = (other[:, 6] + 1) % 40
    a, b = model(idx), model(other)
    assert torch.equal(a[:, :6], b[:, :6]) and not torch.allclose(a[:, 6:], b[:, 6:])


def test_logits_are_linear_in_the_senses():
    """Logits under senses 2 A - 3 B are 2 logits(A) - 3 logits(B)."""
    model, idx, (A, B) = lively(), text(), torch.randn(2, 2, 10, 3, 24, dtype=torch.float64)
    torch.testing.assert_close(model(idx, C=2 * A - 3 * B), 2 * model(idx, C=A) - 3 * model(idx, C=B))


def test_senses_do_not_depend_on_the_context():
    """An id has the same sense vectors at every position of every text."""
    model, idx = lively(), text()
    torch.testing.assert_close(model.senses(idx), model.senses(torch.arange(40))[idx])


# -----------------------------------------------------------------------------
# Size and start.


@pytest.mark.parametrize('size, n_sense, hidden, total, contextual', [
    ('micro', 16, 0, 41.7, 30.4), ('mini', 16, 0, 103.9, 72.7), ('small', 16, 0, 170.1, 125.2),
    ('mini', 1, 640, 74.3, 72.7), ('mini', 4, 640, 75.6, 72.7), ('mini', 16, 640, 80.5, 72.7),
    ('mini', 64, 640, 100.2, 72.7), ('small', 0, 0, 124.0, 124.0)])
def test_parameter_counts(size, n_sense, hidden, total, contextual):
    """Parameters in millions are those of the paper's sizes and its Table 8: 50,257 ids, length 512."""
    with torch.device('meta'):
        n = Backpack(Config(**SIZES[size], n_sense=n_sense, sense_hidden=hidden)).n_params()
    assert [round(n[key] / 1e6, 1) for key in ('total', 'contextualizer')] == [total, contextual]
    assert n['total'] == n['contextualizer'] + n['senses']


@pytest.mark.parametrize('n_sense', [0, 1, 16])
def test_loss_before_training_is_ln_v(n_sense):
    """A fresh model knows nothing: its loss is ln V within 0.2."""
    torch.manual_seed(0)
    model = Backpack(Config(block_size=64, vocab_size=5000, n_layer=4, n_head=4, n_embd=64, n_sense=n_sense))
    idx = torch.randint(5000, (4, 65))
    assert abs(model(idx[:, :-1], idx[:, 1:]).item() - math.log(5000)) < 0.2


def test_weights_start_as_in_gpt2():
    """Matrices have deviation 0.02, residual projections that over sqrt(2 n_layer); biases are zero."""
    torch.manual_seed(0)
    for name, p in Backpack(Config(64, 500, n_layer=8, n_head=4, n_embd=128)).named_parameters():
        if p.dim() == 2:
            residual = name.startswith('contextualizer.blocks.') and 'c_proj' in name
            assert p.std().item() == pytest.approx(0.005 if residual else 0.02, rel=0.05), name
        else:
            assert (p == ('ln_' in name and name.endswith('weight'))).all(), name


def test_weight_decay_is_on_matrices_alone():
    """AdamW decays every parameter with two axes, no other, and holds each of them once."""
    model = lively()
    decayed, free = model.adamw(1e-3, 0.1, (0.9, 0.95)).param_groups
    assert decayed['weight_decay'] == 0.1 and all(p.dim() == 2 for p in decayed['params'])
    assert free['weight_decay'] == 0 and all(p.dim() == 1 for p in free['params'])
    assert len(decayed['params'] + free['params']) == len(list(model.parameters()))


@pytest.mark.parametrize('changes, wrong, message', [
    ({'n_head': 5}, None, 'n_embd = 24 is not divisible by n_head = 5'),
    ({'n_sense': 7}, None, 'n_embd = 24 is not divisible by n_sense = 7'),
    ({}, lambda model: model(text(13)), 'the text has 13 tokens; block_size is 12'),
    ({'n_sense': 0}, lambda model: model(text(), C=torch.zeros(2, 10, 3, 24)), 'a Transformer has no senses'),
    ({'n_sense': 0}, lambda model: model.generate(text(), 1, edit=edited), 'a Transformer has no senses')])
def test_what_a_model_cannot_do_is_an_error(changes, wrong, message):
    """Heads that do not divide n_embd, a text beyond block_size, and senses or edits for a Transformer."""
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong(lively(**changes))


# -----------------------------------------------------------------------------
# The fast forms, each beside its plain one.

TEXTS = {  # seed -> ids (B, T): some repeat, one id alone, one token, all distinct, a larger batch, one text
    0: text(), 1: torch.full((3, 7), 5), 2: torch.zeros(1, 1, dtype=torch.long), 3: torch.arange(12)[None],
    4: text(12, 8), 5: text(12, 1)}


def with_gradients(value: Tensor, inputs) -> list[Tensor | None]:
    """A value, and the gradient of a number made of it with respect to each input."""
    number = value if value.dim() == 0 else (value * value.detach().sin()).sum()
    return [value, *torch.autograd.grad(number, list(inputs), allow_unused=True)]


@pytest.mark.parametrize('seed', TEXTS)
def test_forward_is_the_five_equations(seed):
    """model(idx) and model.plain(idx) have the same logits and the same gradient of every weight, whether
    the senses are the model's own or given."""
    model, idx = lively(seed), TEXTS[seed]
    given = torch.randn(*idx.shape, 3, 24, dtype=torch.float64, requires_grad=True)
    for C, inputs in ((None, [*model.parameters()]), (given, [*model.parameters(), given])):
        torch.testing.assert_close(*(with_gradients(logits, inputs) for logits in
                                     (model(idx, C=C), model.plain(idx, C))))


@pytest.mark.parametrize('seed', TEXTS)
def test_the_loss_is_the_cross_entropy_of_the_logits(seed, monkeypatch):
    """Made from some logits at a time, and with the senses of distinct ids, loss and gradients are those of
    the plain form; positions without a target count nothing; without gradients the loss is the same."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)  # 9 positions at a time
    idx = TEXTS[seed]
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    for model in (lively(seed), lively(seed, n_sense=0)):
        logits = model.plain(idx) if model.config.n_sense else model(idx)
        plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        fast = [model(idx, targets), DistinctIds(model)(idx, targets, *inputs_of(idx, targets, 'cpu')[2:])]
        with torch.no_grad():
            assert torch.equal(model(idx, targets), fast[0]) and not model(idx, targets).requires_grad
        plain, *fast = (with_gradients(loss / 2, model.parameters()) for loss in (plain, *fast))
        torch.testing.assert_close(fast, [plain, plain])


def test_the_loss_in_bfloat16_is_no_less_exact_than_the_plain_one():
    """Under autocast loss and gradients are float32, at most half again as far from exact as of all logits."""
    model, idx, found = lively().float(), text(), []
    for autocast, plain in ((False, False), (True, False), (True, True)):
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(idx).flatten(0, 1), idx.flatten()) if plain else model(idx, idx)
        found.append(with_gradients(loss, model.parameters()))
    exact, fast, plain = (torch.cat([t.flatten() for t in all_of_them]) for all_of_them in found)
    assert all(t.dtype == torch.float32 for t in found[1]) and 0 < (fast - exact).norm() < 1.5 * (plain - exact).norm()


@pytest.mark.parametrize('size', [1, 3, 4, 10, 128])
def test_a_sum_in_blocks_is_the_sum(size):
    """sum_in_blocks has the values and gradients of weighted_sum(causal_softmax(..), C), whatever the size
    of the blocks, for the last positions of a text too."""
    torch.manual_seed(size)
    for T, S in ((10, 10), (1, 7), (4, 9)):
        inputs = [torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (T, S)]
        C = torch.randn(2, S, 3, 24, dtype=torch.float64, requires_grad=True)
        sums = model_py.sum_in_blocks(*inputs, C, size), weighted_sum(model_py.causal_softmax(*inputs), C)
        torch.testing.assert_close(*(with_gradients(o, [*inputs, C]) for o in sums))


def uncached(model: Backpack, idx: Tensor, n: int, edit) -> Tensor:
    """Greedy text without a cache; past block_size only the last block_size // 2 tokens stay."""
    kept = idx
    for _ in range(n):
        kept = kept[:, -6:] if kept.shape[1] > 12 else kept
        C = edited(model, kept, edit) if model.config.n_sense else None
        best = model(kept, C=C)[:, -1].argmax(-1, keepdim=True)
        kept, idx = torch.cat([kept, best], 1), torch.cat([idx, best], 1)
    return idx


@torch.no_grad()
@pytest.mark.parametrize('name', ['none', 'factor', 'both'])
def test_the_cache_changes_no_logit_and_no_text(name):
    """Read token by token with a cache, a batch of texts has the vectors o of being read whole, to 1e-4 in
    float32; greedy text is that of the uncached loop far beyond block_size; two new tokens are an error."""
    model, whole, cache = lively(2).float(), text(12, 3), Cache(12)
    boost = topic(model, affinity(model, [3, 5, 8]), (3.0, 2.5, 2.0, 1.0))
    edit = {'none': None, 'factor': scale_senses(list(range(20)), [0, 2], 0.3),
            'both': compose([scale_senses(None, [1], 0.5), boost])}[name]
    for start, n in ((0, 4), *((n - 1, n) for n in range(5, 13))):
        C = edited(model, whole[:, :n], edit)
        o = model.represent(whole[:, start:n], C, cache)
        assert o.shape[1] == n - start and cache.length == n
        torch.testing.assert_close(o, model.represent(whole[:, :n], C)[:, start:], rtol=0, atol=1e-4)
    for one, its in ((model, edit), (lively(2, n_sense=0), None)):
        for T in (4, 30):
            made = one.generate(text(T, 3), 40, temperature=0, edit=its)
            assert torch.equal(made, uncached(one, text(T, 3), 40, its)) and len(made.unique()) > 3
    cache.length = 5
    with pytest.raises(AssertionError):
        model.represent(text(2, 3), cache=cache)


def test_the_cache_reads_each_token_once(monkeypatch):
    """Up to block_size every token goes through the contextualizer once; then half of them do again."""
    model, seen = lively(), []
    forward = model.contextualizer.forward
    monkeypatch.setattr(model.contextualizer, 'forward',
                        lambda x, cache: seen.append(x.shape[1]) or forward(x, cache))
    model.generate(text(4), 12)
    assert seen == [4, 1, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1]


@torch.no_grad()
def test_a_sense_table_is_the_senses():
    """A table of the vocabulary gives the senses, logits and text of senses made anew; in bfloat16 nearly."""
    model, ids = lively(vocab_size=2100, n_vocab=2080).float(), torch.arange(2080)  # more than one chunk
    table, small, idx = SenseTable(model), SenseTable(model, torch.bfloat16), text()
    torch.testing.assert_close(table(ids.view(40, 52)), model.senses(ids).view(40, 52, 3, 24))
    torch.testing.assert_close(model(idx, C=table(idx)), model(idx))
    assert torch.equal(*(model.generate(idx, 9, temperature=0, senses=made) for made in (table, None)))
    assert small.rows.dtype == torch.bfloat16 and small(ids).dtype == torch.float32 and len(small.rows) == 2080
    torch.testing.assert_close(small(ids), model.senses(ids), rtol=0.005, atol=0.005)


@pytest.mark.slow
def test_a_compiled_model_is_compiled_once_whatever_the_number_of_ids():
    """20 batches of 1 to 320 distinct ids make one graph without a break, with the plain loss and gradients;
    a last batch of fewer texts gives the plain loss too."""
    graphs, model = [], lively(vocab_size=400, block_size=40)
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    compiled = torch.compile(DistinctIds(model), backend=backend, fullgraph=True)
    for i in range(22):
        idx = torch.randint(1 + 19 * i, (8 if i < 20 else 23 - i, 40))
        torch.testing.assert_close(*(with_gradients(loss, model.parameters()) for loss in
                                     (compiled(*inputs_of(idx, idx, 'cpu')), model(idx, idx))))
        assert len(graphs) == 1 or i >= 20


# -----------------------------------------------------------------------------
# Generation.


def test_padding_is_never_sampled():
    """Ids from n_vocab on are never generated, however large their logits."""
    model = lively(n_vocab=30)
    with torch.no_grad():
        model.wte.weight[30:] *= 50
    logits = model(text() % 30)[:, -1]
    assert (logits[:, 30:].amax(-1) > logits[:, :30].amax(-1)).all()
    assert all(model.generate(text(3, 8) % 30, 20, temperature).max() < 30 for temperature in (0, 1, 5))


def test_generation_ends_once_every_text_has_had_the_stop():
    """With stop the ids are those without it, up to the place where the last text first has that id."""
    def make(stop: int | None) -> Tensor:
        torch.manual_seed(3)
        return lively().generate(text(4, 3), 200, stop=stop)
    whole = make(None)
    stop = next(w for w in range(40) if (whole[:, 4:] == w).any(1).all())
    last = max((row[4:] == stop).nonzero()[0].item() for row in whole)
    assert torch.equal(make(stop), whole[:, :4 + last + 1]) and last + 1 < 200


def test_temperature_zero_is_argmax():
    """Each id generated at temperature 0, at one too small for float32, and with top_k = 1, is the argmax of
    the logits before it."""
    model, idx = lively().float(), text(4)
    for options in ({'temperature': 0}, {'temperature': 1e-300}, {'top_k': 1}):
        out = model.generate(idx, 6, **options)
        assert out.shape == (2, 10) and torch.equal(out[:, :4], idx)
        assert torch.equal(out[:, 4:], model(out[:, :-1]).argmax(-1)[:, 3:])


def test_what_is_drawn_has_the_probabilities_of_temperature_and_top_k():
    """softmax(logits / temperature), renormalized over the top_k likeliest, even of very large logits."""
    logits, kept = torch.tensor([[1.0, 3.0, -2.0, 2.5], [3e38, -3e38, 0.0, 2.9e38]]), torch.tensor([0, 1, 0, 1])
    odds = (logits[0] / 0.7).exp()
    for top_k, expected in ((None, odds), (9, odds), (2, odds * kept)):
        probs = next_token_probs(logits, 0.7, top_k)
        torch.testing.assert_close(probs[0], expected / expected.sum())
        assert probs[1].tolist() == [1, 0, 0, 0]
