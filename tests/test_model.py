"""Claims about model.py: equations, size, start, fast forms beside plain ones, generation."""

import shutil
import subprocess
import sys
from itertools import product

import pytest
import torch
from helpers import ROOT, lively, text
from torch import Tensor, nn
from torch.testing import assert_close

from rucksack.loaded import count_parameters
from rucksack.model import GPT, Backpack, Config, DistinctIds, distinct_ids, draw, weighted_sum
from rucksack.paper.timing import SIZES
from rucksack.senses import compose, next_word_probs, scale_senses, topic
from rucksack.training.checkpoint import make_model
from rucksack.words import scores_of_bags

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


@pytest.mark.parametrize('change', [
    {'block_size': 0}, {'n_head': 2.0}, {'n_layer': 0}, {'dropout': float('nan')}, {'dropout': 1.0},
    {'n_vocab': 50258}, {'n_embd': 770}, {'n_sense': 5}, {'n_sense': -1}], ids=str)
def test_a_config_with_impossible_numbers_is_refused(change):
    """Of a config.json, say: it would fail later, or mean something else."""
    with pytest.raises(ValueError):
        Config(**change)


def test_alpha_sums_to_1_under_autocast_on_a_cpu():
    """Each row sums to 1 within 1e-6, though the scores are in bfloat16."""
    model = lively().float()
    with torch.autocast('cpu', torch.bfloat16):
        sums = model.alpha(text()).sum(-1)
    assert (sums - 1).abs().max() < 1e-6


@pytest.mark.parametrize('shape', [(1, 10, 3, 24), (2, 1, 3, 24), (2, 10, 1, 24)])
def test_senses_of_another_shape_are_refused(shape):
    """An einsum would spread one text, position or sense over all, and drop nothing else."""
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
        model = make_model(Config(**SIZES[size], n_sense=n_sense, sense_hidden=hidden))
    n = count_parameters(model)
    assert round(n['total'] / 1e6, 1) == total
    assert round(n['contextualizer'] / 1e6, 1) == contextual


@pytest.mark.parametrize('n_sense', [0, 1, 16])
def test_a_new_model_has_the_deviations_of_gpt2(n_sense):
    """Matrices have 0.02; that over sqrt(2 n_layer) have second layers of MLPs, and attention's."""
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
    """In training alpha varies and senses do not; in evaluation nothing does."""
    model = lively(dropout=0.5).train()
    idx = text()
    assert not torch.equal(model.alpha(idx), model.alpha(idx))
    assert torch.equal(model.senses(idx), model.senses(idx))
    model.eval()
    assert torch.equal(model.alpha(idx), model.alpha(idx))


def some_targets(idx: Tensor) -> Tensor:
    """Targets of the ids (B, T); about a fifth of them is -1, and does not count."""
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    return targets


@pytest.mark.parametrize('n_sense', [0, 3])
def test_the_loss_is_the_mean_over_targets_that_count(n_sense):
    """-log p of each target that is not -1, by a loop."""
    model = lively(n_sense=n_sense)
    idx = text()
    targets = some_targets(idx)
    logp = model(idx).log_softmax(-1)
    places = [(b, i) for b, i in product(range(2), range(10)) if targets[b, i] != -1]
    nats = [-logp[b, i, targets[b, i]].item() for b, i in places]
    assert model(idx, targets).item() == pytest.approx(sum(nats) / len(nats))


def test_model_py_runs_alone(tmp_path):
    """Copied into an empty folder, with torch and nothing else, it trains a step and generates."""
    shutil.copy(ROOT / 'model.py', tmp_path)
    script = """
import torch, model
m = model.Backpack(model.Config(8, 40, n_layer=1, n_head=1, n_embd=8, n_sense=2))
idx = torch.randint(40, (2, 8))
m(idx, idx).backward()
print(list(m.generate(idx, 3).shape))
"""
    argv = [sys.executable, '-I', '-c', f'import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{script}']
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == '[2, 11]\n', done.stderr


class Averages(nn.Linear):
    """A contextualizer: h is a projection of the mean of the embeddings so far."""

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(1, x.shape[1] + 1)
        return super().forward(x.cumsum(1) / n[:, None])


def test_another_contextualizer_keeps_its_weights_and_generates():
    """The likeliest text is that of whole passes over the text so far, without a cache."""
    contextualizer = Averages(24, 24)
    nn.init.constant_(contextualizer.bias, 7.0)
    config = Config(12, 40, n_layer=2, n_head=2, n_embd=24, n_sense=3)
    model = Backpack(config, contextualizer).double()
    assert (contextualizer.bias == 7).all()
    edit = scale_senses(None, [0], 0.2)
    made = model.generate(text(4), 30, temperature=0, edit=edit)
    assert torch.equal(made, uncached(model, text(4), 30, edit))


# -----------------------------------------------------------------------------
# Distinct ids.

# Ids (B, T): some repeat, one id alone, one token, all distinct, a larger batch, one text.
TEXTS = [text(), torch.full((3, 7), 5), text(1, 1), torch.arange(12)[None], text(12, 8),
         text(12, 1)]


def loss_and_gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The loss of a model, and the gradient of each parameter."""
    loss = model(*inputs)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize('n_sense', [0, 3])
@pytest.mark.parametrize('seed', range(6))
def test_distinct_ids_change_no_loss_and_no_gradient(seed, n_sense):
    """DistinctIds has the loss and the gradients of the plain form."""
    model = lively(seed, n_sense=n_sense)
    idx = TEXTS[seed]
    targets = some_targets(idx)
    found = loss_and_gradients(DistinctIds(model), idx, targets, *distinct_ids(idx))
    assert_close(found, loss_and_gradients(model, idx, targets))


@pytest.mark.parametrize('is_compiled', [
    False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_a_frequent_id_are_summed_in_float32(is_compiled):
    """In bfloat16, 2,000 gradients of an id add up to those in float32, to 2%.

    Summed in bfloat16, they would stop at 256 times the first.
    """
    model = lively(block_size=2000, n_layer=1).float()
    idx = torch.full((1, 2000), 7)
    distinct = DistinctIds(model)
    bias = model.sense_network.final_mlp.c_proj.bias
    exact, = torch.autograd.grad(distinct(idx, idx * 0 + 3, *distinct_ids(idx)), bias)
    if is_compiled:
        torch._dynamo.reset()
        distinct = torch.compile(distinct)
    with torch.autocast('cpu', torch.bfloat16):
        loss = distinct(idx, idx * 0 + 3, *distinct_ids(idx))
    found, = torch.autograd.grad(loss, bias)
    assert_close(found, exact, rtol=0, atol=0.02 * exact.abs().max().item())


# -----------------------------------------------------------------------------
# Generation.


def edit_of(name: str, model: Backpack):
    """An edit of a model, or None."""
    if name == 'none':
        return None
    if name == 'factor':
        return scale_senses(list(range(20)), [0, 2], 0.3)
    scores = scores_of_bags(model, [[3, 5, 8]])[..., 0]
    boost = topic(model, scores, (3.0, 2.5, 2.0, 1.0))
    return compose([scale_senses(None, [1], 0.5), boost])


def uncached(model: Backpack | GPT, idx: Tensor, n: int, edit) -> Tensor:
    """Greedy text without a cache: of a prompt the last 12 tokens, past 12 tokens the last 6."""
    kept = idx[:, -12:]
    for _ in range(n):
        if kept.shape[1] > 12:
            kept = kept[:, -6:]
        likeliest = next_word_probs(model, kept, edit).argmax(-1, keepdim=True)
        kept = torch.cat([kept, likeliest], dim=1)
        idx = torch.cat([idx, likeliest], dim=1)
    return idx


@torch.no_grad()
@pytest.mark.parametrize('n_prompt', [4, 12, 13, 30])
@pytest.mark.parametrize('n_sense, name', [(3, 'none'), (3, 'factor'), (3, 'both'), (0, 'none')])
def test_the_cache_changes_no_text(n_sense, name, n_prompt):
    """The likeliest text is the same without it, for prompts shorter and longer than block_size."""
    model = lively(2, n_sense=n_sense).float()
    edit = edit_of(name, model)
    prompt = text(n_prompt, 3)
    made = model.generate(prompt, 40, temperature=0, edit=edit)
    assert torch.equal(made, uncached(model, prompt, 40, edit))
    assert len(made.unique()) > 3


def test_a_gpt_is_not_generated_from_under_an_edit():
    """It has no senses, so the edit is an error and not ignored."""
    with pytest.raises(AssertionError):
        lively(n_sense=0).generate(text(4), 2, edit=scale_senses(None, [0], 0.0))


@pytest.mark.parametrize('setting', [{'top_k': 0}, {'temperature': -0.5}])
def test_settings_out_of_range_are_refused(setting):
    """top_k = 0 and a negative temperature are errors."""
    with pytest.raises(ValueError):
        lively().generate(text(4), 2, **setting)


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


@pytest.mark.parametrize('top_k, kept', [
    (None, [1, 1, 1, 1]), (9, [1, 1, 1, 1]), (2, [0, 1, 0, 1])])
def test_ids_are_drawn_by_softmax_of_the_top_k(top_k, kept):
    """Of 40,000, shares are in proportion to exp(logit / temperature) of the top_k likeliest."""
    logits = torch.tensor([[1.0, 3.0, -2.0, 2.5]])
    odds = (logits[0] / 0.7).exp() * torch.tensor(kept)
    torch.manual_seed(0)
    drawn = draw(logits.expand(40_000, -1), 0.7, top_k)
    shares = drawn.flatten().bincount(minlength=4) / 40_000
    assert_close(shares, odds / odds.sum(), rtol=0, atol=0.01)
    assert (shares[odds == 0] == 0).all()


@pytest.mark.parametrize('setting', ['temperature', 'top_k'])
def test_generate_draws_as_it_is_asked_to(setting):
    """A high temperature draws other ids than the likeliest; so does a top_k of 2, of the top 2."""
    model = lively().float()
    options = {'temperature': {'temperature': 50.0}, 'top_k': {'temperature': 50.0, 'top_k': 2}}
    torch.manual_seed(0)
    out = model.generate(text(4, 50), 5, **options[setting])
    logits = model(out[:, :-1])[:, 3:]  # (50, 5, V)
    drawn = out[:, 4:, None]
    rank = (logits > logits.gather(-1, drawn)).sum(-1)  # (50, 5)
    assert rank.max() > 0
    assert (rank.max() > 1) == (setting == 'temperature')


def test_a_backpack_without_senses_is_refused():
    """n_sense = 0 is for a GPT, which has no senses whatever its config says."""
    with pytest.raises(ValueError, match='n_sense'):
        Backpack(Config(n_embd=24, n_head=2, n_sense=0))
    assert GPT(Config(n_layer=1, n_embd=24, n_head=2, n_sense=3)).config.n_sense == 0
