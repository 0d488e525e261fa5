"""Claims about rucksack/fast.py and DistinctIds: each equals its plain version in model.py."""

import pytest
import torch
from helpers import lively, some_targets, text
from torch import Tensor, nn
from torch.testing import assert_close

from rucksack.fast import Cached
from rucksack.senses import compose, scale_senses, topic
from rucksack.training import DistinctIds, distinct_ids
from rucksack.vocabulary import scores_of_bags

# Ids (B, T): some repeat, one id alone, one token, all distinct, a larger batch, one text.
TEXTS = [text(), torch.full((3, 7), 5), text(1, 1), torch.arange(12)[None], text(12, 8),
         text(12, 1)]


def loss_and_gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Compute the loss of a model, and the gradient of each parameter."""
    loss = model(*inputs)
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize('n_sense', [0, 3])
@pytest.mark.parametrize('seed', range(6))
def test_distinct_ids_change_no_loss_and_no_gradient(seed, n_sense):
    """DistinctIds gives the same loss and gradients as the model itself."""
    model = lively(seed, n_sense=n_sense)
    idx = TEXTS[seed]
    targets = some_targets(idx)
    found = loss_and_gradients(DistinctIds(model), idx, targets, *distinct_ids(idx))
    assert_close(found, loss_and_gradients(model, idx, targets))


@pytest.mark.parametrize('is_compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_a_frequent_id_are_summed_in_float32(is_compiled):
    """Under autocast, 2,000 gradients sum to within 2%; bfloat16 would stop at 256 of them."""
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


@pytest.mark.slow
@pytest.mark.parametrize('n_sense', [4, 0])
def test_a_model_is_compiled_once_for_any_distinct_ids(n_sense):
    """Batches with 1 to 300 distinct ids run the same compiled graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = lively(vocab_size=400, block_size=40, n_sense=n_sense)
    torch._dynamo.reset()
    compiled = torch.compile(DistinctIds(model), fullgraph=True, backend=backend)
    for n_ids in (1, 2, 20, 100, 300):
        idx = torch.randint(n_ids, (8, 40))
        ids, places = distinct_ids(idx)
        torch._dynamo.mark_dynamic(ids, 0)
        compiled(idx, idx, ids, places).backward()
    assert len(graphs) == 1


MODEL = lively(2).requires_grad_(False)
BOOST = topic(MODEL, scores_of_bags(MODEL, [[3, 5, 8]])[0], (3.0, 2.5, 2.0, 1.0))
EDITS = {
    'none': None, 'both': compose([scale_senses(None, [1], 0.5), BOOST]),
    'in place': lambda idx, C: C.mul_(0.5)}  # an edit should not do this; it gets a copy


@pytest.mark.parametrize('temperature, batch', [(0, 1), (0, 3), (1.3, 1), (1.3, 3)])
@pytest.mark.parametrize('n_prompt', [4, 11, 12, 13, 30])
@pytest.mark.parametrize('n_sense, name', [(3, 'none'), (3, 'both'), (3, 'in place'), (0, 'none')])
def test_the_cache_changes_no_text(n_sense, name, n_prompt, temperature, batch):
    """With the cache, ids equal model.generate's below, at and past block_size."""
    model = lively(2, n_sense=n_sense).requires_grad_(False)
    prompt = text(n_prompt, batch)
    texts = []
    for generate in (model.generate, Cached(model).generate):
        torch.manual_seed(0)
        texts.append(generate(prompt, 40, temperature, edit=EDITS[name]))
    plain, cached = texts
    assert torch.equal(cached, plain)
    assert len(plain.unique()) > 3


@pytest.mark.parametrize('kind', ['register_forward_hook', 'register_forward_pre_hook', 'forward'])
def test_a_cache_changes_no_text_of_a_model_with_hooks(kind):
    """A hook on any module, or a forward of its own, has its effect with the cache too."""
    model = lively()
    attn = model.contextualizer.blocks[0].attn
    if kind == 'forward':
        attn.forward = lambda x: -3 * x
    else:
        getattr(attn, kind)(lambda *call: -3 * call[1][0])  # call: module, (x,)
    plain = model.generate(text(3), 8, 0)
    assert torch.equal(Cached(model).generate(text(3), 8, 0), plain)


def test_a_cache_forgets_texts_that_do_not_go_on():
    """One cache can continue its own text, other texts, several at once and edited ones in turn."""
    model = lively()
    cached = Cached(model)
    own = cached.generate(text(3), 5, 0)
    edit = scale_senses(None, [0], 0.2)
    grown = torch.cat([own, text(3)], dim=1)  # three tokens longer, so it is read again
    prompts = [(grown, None), (text(9, seed=2), None), (text(6, 5), edit), (own, None),
               (text(), edit)]
    for prompt, one in prompts:
        plain = model.generate(prompt, 5, 0, edit=one)
        assert torch.equal(cached.generate(prompt, 5, 0, edit=one), plain)
