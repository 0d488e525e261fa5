"""Claims about the architecture: its equations, its size, its fast forms beside the plain, its generation."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import model as model_py
from model import SIZES, Backpack, Cache, Config, SenseTable, next_token_probs, weighted_sum
from rucksack.data import DistinctIds, inputs_of
from senses import affinities, compose, edited, scale_senses, topic


def lively(seed: int = 0, **changes) -> Backpack:
    """A small model with large random weights, biases and norms, in float64: nothing is zero by accident."""
    torch.manual_seed(seed)
    tiny = dict(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)
    model = Backpack(Config(**{**tiny, **changes})).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def text(n: int = 10, batch: int = 2, seed: int = 1) -> Tensor:
    """Random ids (batch, n)."""
    return torch.randint(40, (batch, n), generator=torch.Generator().manual_seed(seed))


def test_o_is_the_quadruple_loop_of_eq_2():
    """The logits are E o with o_i = sum_j sum_l alpha_lij C(x_j)_l, summed one term at a time."""
    model, idx, o = lively(), text(5), torch.zeros(2, 5, 24).double()
    C, alpha = model.senses(idx), model.alpha(idx)
    for b, i, j, l in product(range(2), range(5), range(5), range(3)):
        o[b, i] += alpha[b, l, i, j] * C[b, j, l]
    assert_close([weighted_sum(alpha, C), model(idx)], [o, o @ model.wte.weight.T])


def test_the_example_in_the_docstring():
    """o of "trick sick" is (1, 0), skateboard, as worked out by hand at the top of model.py."""
    alpha, C = [[[1, 0], [0.5, 0.5]], [[1, 0], [1, 0]]], [[[1., 0], [0, 0]], [[1, 0], [0, 1]]]
    assert weighted_sum(torch.tensor([alpha]), torch.tensor([C]))[0, 1].tolist() == [1, 0]


def test_cbow_is_a_backpack():
    """Section 2.2: with one sense and equal weights the logits are E times the mean of the word vectors."""
    model, idx = lively(n_sense=1), text()
    for p in model.sense_weights.parameters():
        p.data.zero_()
    bags = model.senses(idx)[:, :, 0].cumsum(1) / torch.arange(1, 11)[:, None]  # (B, T, d), of 0 .. i
    assert_close(model(idx), bags @ model.wte.weight.T)


def test_a_single_attention_layer_is_a_backpack():
    """Section 2.3: multi-head attention is weighted_sum with its own alpha and C(x)_l = O_l V_l x."""
    attention, x = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True), torch.randn(2, 7, 12)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, alpha = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    V = attention.in_proj_weight[24:].view(3, 4, 12)  # (head, d/head, d)
    O = attention.out_proj.weight.view(12, 3, 4)  # (d, head, d/head)
    assert_close(weighted_sum(alpha, torch.einsum('elh,lhd,btd->btle', O, V, x)), expected)


def test_alpha_rows_are_the_causal_distributions_of_eq_12():
    """alpha_li is the softmax over j <= i of q_li . k_lj / sqrt(d/k), written out; exactly 0 for j > i."""
    model, idx, expected = lively(), text(), torch.zeros(2, 3, 10, 10).double()
    alpha, h = model.alpha(idx), model.contextualizer(model.wte(idx))
    q, k = model.sense_weights.c_attn(h).view(2, 10, 2, 3, 8).unbind(2)  # (B, T, k, d/k)
    for b, l, i in product(range(2), range(3), range(10)):
        odds = torch.stack([(q[b, i, l] @ k[b, j, l] / 8 ** 0.5).exp() for j in range(i + 1)])
        expected[b, l, i, :i + 1] = odds / odds.sum()
    assert_close(alpha, expected)
    assert (alpha.triu(1) == 0).all() and (alpha.tril() > 0).sum() == 2 * 3 * 55


@pytest.mark.parametrize('n_sense', [0, 3])
def test_a_later_token_changes_nothing_earlier(n_sense):
    """Logits up to a position are bit-identical whatever follows, in the Backpack and the Transformer."""
    model, idx = lively(n_sense=n_sense), text()
    a, b = model(idx), model(torch.cat([idx[:, :6], (idx[:, 6:] + 1) % 40], 1))
    assert torch.equal(a[:, :6], b[:, :6]) and not torch.allclose(a[:, 6:], b[:, 6:])


def test_logits_are_linear_in_senses_that_know_no_context():
    """Logits under 2 A - 3 B are 2 logits(A) - 3 logits(B), and an id has the same senses wherever it is."""
    model, idx, (A, B) = lively(), text(), torch.randn(2, 2, 10, 3, 24).double()
    assert_close(model(idx, C=2 * A - 3 * B), 2 * model(idx, C=A) - 3 * model(idx, C=B))
    assert_close(model.senses(idx), model.senses(torch.arange(40))[idx])


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
def test_a_model_starts_as_gpt2_and_knows_nothing(n_sense):
    """Its loss is ln V within 0.2; matrices have deviation 0.02, second layers of MLPs (those of senses too)
    and attention's that over sqrt(2 n_layer); AdamW decays matrices, embeddings only if asked."""
    torch.manual_seed(0)
    model, idx = Backpack(Config(64, 5000, n_layer=8, n_head=4, n_embd=64, n_sense=n_sense)), text(64, 4)
    assert abs(model(idx, idx.roll(1)).item() - math.log(5000)) < 0.2
    for name, p in model.named_parameters():
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(0.005 if 'c_proj' in name else 0.02, rel=0.05), name
        else:
            assert (p == ('ln_' in name and name.endswith('weight'))).all(), name
    for embeddings in (True, False):
        adamw, = model.optimizers('adamw', 1e-3, 0.1, (0.9, 0.95), decay_embeddings=embeddings)
        decay = {p: group['weight_decay'] for group in adamw.param_groups for p in group['params']}
        for name, p in model.named_parameters():
            decays = p.dim() == 2 and (embeddings or name[-10:] not in ('wte.weight', 'wpe.weight'))
            assert decay.pop(p) == 0.1 * decays, name
        assert not decay


@pytest.mark.parametrize('n_sense', [0, 3])
def test_muon_takes_all_matrices_but_the_embeddings(n_sense):
    """Every parameter has one optimizer, Muon if it is a matrix and not an embedding, else AdamW."""
    model = lively(n_sense=n_sense)
    adamw, muon = model.optimizers('muon', 1e-3, 0.1, (0.9, 0.95))
    owners = [(p, optimizer) for optimizer in (adamw, muon)
              for group in optimizer.param_groups for p in group['params']]
    assert len(owners) == len(list(model.parameters()))
    owner = dict(owners)
    for name, p in model.named_parameters():
        is_embedding = name.endswith(('wte.weight', 'wpe.weight'))
        assert owner[p] is (muon if p.dim() == 2 and not is_embedding else adamw), name


@pytest.mark.parametrize('scale', [1e-3, 1e3])
def test_a_step_of_muon_is_as_long_as_one_of_adamw(scale):
    """Whatever the size of the gradients, its root mean square is 0.2 of the rate, which is what AdamW's
    settles at; no direction of the matrix gets more than 1.3 times its share."""
    model = lively()
    _, muon = model.optimizers('muon', 1e-3, 0.0, (0.9, 0.95), muon_lr=0.02)
    matrices = muon.param_groups[0]['params']
    before = [p.detach().clone() for p in matrices]
    for p in matrices:
        p.grad = scale * torch.randn_like(p)
    muon.step()
    for p, old in zip(matrices, before):
        step = (p.detach() - old) / 0.02
        assert 0.15 < step.square().mean().sqrt() < 0.25
        assert torch.linalg.matrix_norm(step, 2) < 1.3 * 0.2 * max(step.shape) ** 0.5


# Ids (B, T): some repeat, one id alone, one token, all distinct, a larger batch, one text.
TEXTS = text(), torch.full((3, 7), 5), text(1, 1), torch.arange(12)[None], text(12, 8), text(12, 1)


def with_gradients(value: Tensor, inputs: list) -> list[Tensor | None]:
    """A value, and the gradient of a number made of it with respect to each input."""
    return [value, *torch.autograd.grad((value * value.detach().sin()).sum(), inputs, allow_unused=True)]


def plain(model: Backpack, idx: Tensor, C: Tensor | None = None) -> Tensor:
    """The Backpack as the paper defines it, the five lines at the top of model.py."""
    h = model.contextualizer(model.wte(idx))
    C = model.senses(idx) if C is None else C
    alpha = model.sense_weights(h)
    o = weighted_sum(alpha, C)
    return model.project(o)


@pytest.mark.parametrize('seed', range(6))
def test_forward_is_the_five_equations(seed):
    """model(idx) has the logits and gradients of the five lines, of its own and of given senses."""
    model, idx = lively(seed), TEXTS[seed]
    given = torch.randn(*idx.shape, 3, 24, dtype=torch.float64, requires_grad=True)
    for C in (None, given):
        logits = model(idx, C=C), plain(model, idx, C)
        assert_close(*(with_gradients(one, [*model.parameters(), given]) for one in logits))


@pytest.mark.parametrize('seed', range(6))
def test_the_loss_is_the_cross_entropy_of_the_logits(seed, monkeypatch):
    """In values and gradients, when some logits are made at a time, or the senses of distinct ids."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)  # 9 positions at a time
    idx = TEXTS[seed]
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    for model in (lively(seed), lively(seed, n_sense=0)):
        logits = plain(model, idx) if model.config.n_sense else model(idx)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        fast = model(idx, targets), DistinctIds(model)(*inputs_of(idx, targets, 'cpu'))
        with torch.no_grad():
            assert torch.equal(model(idx, targets), fast[0]) and not model(idx, targets).requires_grad
        entropy, *fast = (with_gradients(loss, [*model.parameters()]) for loss in (entropy, *fast))
        assert_close(fast, [entropy, entropy])


@pytest.mark.parametrize('size', [1, 3, 4, 10, 128])
def test_a_sum_in_blocks_is_the_sum(size):
    """Blocks of any size have the values and gradients of weighted_sum(causal_softmax(..), C)."""
    for T, S in ((10, 10), (1, 7), (4, 9)):
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True)  # query, key and C
                  for shape in ((2, 3, T, 8), (2, 3, S, 8), (2, S, 3, 24))]
        plain = weighted_sum(model_py.causal_softmax(*inputs[:2]), inputs[2])
        assert_close(*(with_gradients(o, inputs) for o in (model_py.sum_in_blocks(*inputs, size), plain)))


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
    """Token by token, texts have the same logits to 1e-4 and the same greedy continuation."""
    model, gpt, whole, cache = lively(2).float(), lively(2, n_sense=0), text(12, 3), Cache(12)
    boost = topic(model, affinities(model, [[3, 5, 8]])[0], (3.0, 2.5, 2.0, 1.0))
    edit = {'none': None, 'factor': scale_senses(list(range(20)), [0, 2], 0.3),
            'both': compose([scale_senses(None, [1], 0.5), boost])}[name]
    for start, n in ((0, 4), *((n - 1, n) for n in range(5, 13))):
        C = edited(model, whole[:, :n], edit)
        logits = model(whole[:, start:n], C=C, cache=cache)
        cache.length = n
        assert_close(logits, model(whole[:, :n], C=C)[:, start:], rtol=0, atol=1e-4)
    for one, its, T in ((model, edit, 4), (model, edit, 30), (gpt, None, 4), (gpt, None, 30)):
        made = one.generate(text(T, 3), 40, temperature=0, edit=its)
        assert torch.equal(made, uncached(one, text(T, 3), 40, its)) and len(made.unique()) > 3


def test_the_cache_reads_each_token_once():
    """Up to block_size every token goes through the contextualizer once; then half of them do again."""
    model, seen = lively(), []
    model.contextualizer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    model.generate(text(4), 12)
    assert seen == [4, 1, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1]


@torch.no_grad()
def test_a_sense_table_is_the_senses():
    """A table of the vocabulary gives the senses, logits and text of senses made anew; in bfloat16 nearly."""
    model, ids = lively(vocab_size=2100, n_vocab=2080).float(), torch.arange(2080)  # more than one chunk
    table, small, idx = SenseTable(model), SenseTable(model, torch.bfloat16), text()
    assert_close([table(ids), model(idx, C=table(idx))], [model.senses(ids), model(idx)])
    assert torch.equal(*(model.generate(idx, 9, temperature=0, senses=made) for made in (table, None)))
    assert (small.rows.dtype, small(ids).dtype, len(small.rows)) == (torch.bfloat16, torch.float32, 2080)
    assert_close(small(ids), model.senses(ids), rtol=0.005, atol=0.005)


def test_padding_is_never_sampled():
    """Ids from n_vocab on are never generated, however large their logits."""
    model = lively(n_vocab=30)
    model.wte.weight.data[30:] *= 50
    logits = model(text() % 30)[:, -1]
    assert (logits[:, 30:].amax(-1) > logits[:, :30].amax(-1)).all()
    assert all(model.generate(text(3, 8) % 30, 20, temperature).max() < 30 for temperature in (0, 1, 5))


def test_generation_ends_once_every_text_has_had_the_stop():
    """With stop the ids are those without it, up to the place where the last text first has that id."""
    def make(stop: int | None) -> Tensor:
        torch.manual_seed(3)
        return lively().generate(text(4, 3), 200, stop=stop)
    whole = make(None)
    stop = next(v for v in range(40) if (whole[:, 4:] == v).any(1).all())
    last = max((row[4:] == stop).nonzero()[0].item() for row in whole)
    assert torch.equal(make(stop), whole[:, :4 + last + 1]) and last + 1 < 200


def test_temperature_zero_is_argmax():
    """So are tiny ones and top_k = 1; else softmax(logits / temperature) is drawn, of the top_k likeliest."""
    model, logits = lively().float(), torch.tensor([[1.0, 3.0, -2.0, 2.5]])
    for options in ({'temperature': 0}, {'temperature': 1e-300}, {'top_k': 1}):
        out = model.generate(text(4), 6, **options)
        assert out.shape == (2, 10) and torch.equal(out[:, 4:], model(out[:, :-1]).argmax(-1)[:, 3:])
    for top_k, kept in ((None, 1), (9, 1), (2, torch.tensor([0, 1, 0, 1]))):
        odds = (logits / 0.7).exp() * kept
        assert_close(next_token_probs(logits, 0.7, top_k), odds / odds.sum())
    assert next_token_probs(1e38 * logits)[0].tolist() == [0, 1, 0, 0]


def test_a_transformer_has_no_senses():
    """Senses or an edit given to the baseline Transformer are an error, not ignored."""
    gpt = lively(n_sense=0)
    for wrong in (lambda: gpt(text(), C=torch.ones(1)), lambda: gpt.generate(text(), 1, edit=edited),
                  lambda: gpt.generate(text(), 1, senses=edited)):
        with pytest.raises(ValueError, match='a Transformer has no senses'):
            wrong()


def test_senses_of_another_number_of_positions_are_refused():
    """They are an AssertionError: an einsum would spread one position over all, and a slice drop the last."""
    model, idx = lively(), text()
    for C in (model.senses(idx)[:, :1], model.senses(text(12)), model.senses(idx)[:, :, :1]):
        with pytest.raises(AssertionError):
            model(idx, C=C)
