"""Claims about the architecture."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_py
from model import SIZES, Backpack, Cache, Config, SenseTable, causal_softmax, sum_in_blocks, weighted_sum
from rucksack import data as data_py
from rucksack.common import UserError
from rucksack.data import distinct_words
from rucksack.published import export, from_pretrained
from senses import affinity, compose, scale_senses, topic

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / 'tests' / 'fixtures'
TINY = dict(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)


def lively(seed: int = 0, **changes) -> Backpack:
    """A small model with large random weights, biases and norms, in float64, so that nothing is zero by
    accident."""
    torch.manual_seed(seed)
    model = Backpack(Config(**{**TINY, **changes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def text(n: int = 10, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Random ids (batch, n)."""
    return torch.randint(TINY['vocab_size'], (batch, n), generator=torch.Generator().manual_seed(seed))


def test_o_is_the_quadruple_loop_of_eq_2():
    """The logits are E^T o with o_i = sum_j sum_l alpha_lij C(x_j)_l, summed one term at a time."""
    model, idx = lively(), text(5)
    with torch.no_grad():
        C, alpha = model.senses(idx), model.alpha(idx)
        o = torch.zeros(2, 5, 24, dtype=torch.float64)
        for b in range(2):
            for i in range(5):
                for j in range(5):
                    for l in range(3):
                        o[b, i] += alpha[b, l, i, j] * C[b, j, l]
        torch.testing.assert_close(weighted_sum(alpha, C), o)
        torch.testing.assert_close(model(idx)[0], o @ model.wte.weight.T)


def test_alpha_rows_are_causal_distributions():
    """Every row of alpha is >= 0, sums to one, and gives later positions exactly zero."""
    alpha = lively().alpha(text())
    assert alpha.shape == (2, 3, 10, 10) and (alpha >= 0).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]))
    assert (alpha.triu(1) == 0).all() and (alpha.tril() > 0).sum() == 2 * 3 * 55


def test_alpha_divides_by_the_root_of_the_head_size():
    """alpha_l = softmax(q_l k_l^T / sqrt(d/k)), written out for one sense and position (Eq. 12)."""
    model, idx = lively(), text()
    h = model.contextualizer(model.wte(idx))
    q, k = model.sense_weights.c_attn(h).split(24, dim=-1)
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
    r = r + mlp(net.mlp, ln(net.ln_1, r))
    torch.testing.assert_close(model.senses(torch.tensor([7]))[0].flatten(),
                               mlp(net.final_mlp, ln(net.ln_2, r)))


@pytest.mark.parametrize('n_sense', [0, 3])
def test_a_later_token_changes_nothing_earlier(n_sense):
    """Logits up to a position are bit-identical whatever comes after it, in the Backpack and in the
    Transformer."""
    model, idx = lively(n_sense=n_sense), text()
    other = idx.clone()
    other[:, 6] = (other[:, 6] + 1) % 40
    a, b = model(idx)[0], model(other)[0]
    assert torch.equal(a[:, :6], b[:, :6]) and not torch.allclose(a[:, 6:], b[:, 6:])


def test_logits_are_linear_in_the_senses():
    """Logits under senses 2 A - 3 B are 2 logits(A) - 3 logits(B)."""
    model, idx = lively(), text()
    A, B = torch.randn(2, 2, 10, 3, 24, dtype=torch.float64)
    logits = [model(idx, edit=lambda idx, C, S=S: S)[0] for S in (A, B, 2 * A - 3 * B)]
    torch.testing.assert_close(logits[2], 2 * logits[0] - 3 * logits[1])


def test_senses_do_not_depend_on_the_context():
    """A word has the same sense vectors at every position of every text."""
    model, idx = lively(), text()
    table = model.senses(torch.arange(40))  # (V, k, d)
    torch.testing.assert_close(model.senses(idx), table[idx])


def test_cbow_is_a_backpack():
    """Section 2.2: with one sense and equal weights the logits are those of CBOW, E times the mean of
    the word vectors."""
    model, idx = lively(n_sense=1), text()
    with torch.no_grad():
        for p in model.sense_weights.parameters():
            p.zero_()
    vectors = model.senses(torch.arange(40))[:, 0]  # (V, d)
    for i in range(10):
        bag = torch.stack([vectors[w] for w in idx[0, :i + 1]]).mean(0)
        torch.testing.assert_close(model(idx)[0][0, i], model.wte.weight @ bag)


def test_a_single_attention_layer_is_a_backpack():
    """Section 2.3: multi-head attention is weighted_sum with its own alpha and C(x)_l = O_l V_l x."""
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(12, 3, bias=False, batch_first=True).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, alpha = attention(x, x, x, attn_mask=mask, average_attn_weights=False)
    V = attention.in_proj_weight[24:].view(3, 4, 12)  # (head, d/head, d)
    O = attention.out_proj.weight.view(12, 3, 4)  # (d, head, d/head)
    C = torch.einsum('elh,lhd,btd->btle', O, V, x)  # (B, T, head, d)
    torch.testing.assert_close(weighted_sum(alpha, C), expected)


def test_that_trick_was_sick():
    """The lecture's example: features positive, negative, skateboard, health; o of "That trick was
    sick" is (1, 0, 1, 0)."""
    C = torch.zeros(1, 4, 2, 4)  # that, trick, was, sick; two senses; four features
    C[0, 1, 0] = torch.tensor([0., 0, 1, 0])
    C[0, 3, 0] = torch.tensor([1., 0, 1, 0])
    C[0, 3, 1] = torch.tensor([0., 1, 0, 1])
    rest = C[0, :3].sum((0, 1))  # the features in the rest of the context
    alpha = torch.zeros(1, 2, 4, 4)
    alpha[0, :, 3,
          3] = rest[[2, 3]] / rest[[2, 3]].sum()  # sense 0 by the share of skateboard, sense 1 by health
    assert weighted_sum(alpha, C)[0, 3].tolist() == [1, 0, 1, 0]


def test_the_example_in_the_docstring():
    """o of "trick sick" is (1, 0), skateboard, as worked out by hand at the top of model.py."""
    C = torch.tensor([[[[1., 0], [0, 0]], [[1, 0], [0, 1]]]])  # (1, 2, 2, 2)
    alpha = torch.tensor([[[[1, 0], [0.5, 0.5]], [[1, 0], [1, 0]]]])  # (1, 2, 2, 2)
    assert weighted_sum(alpha, C)[0, 1].tolist() == [1, 0]


@pytest.mark.parametrize('size, n_sense, hidden, total, contextual', [
    ('micro', 16, 0, 41.7, 30.4), ('mini', 16, 0, 103.9, 72.7), ('small', 16, 0, 170.1, 125.2),
    ('mini', 1, 640, 74.3, 72.7), ('mini', 4, 640, 75.6, 72.7), ('mini', 16, 640, 80.5, 72.7),
    ('mini', 64, 640, 100.2, 72.7),
    ('small', 0, 0, 124.0, 124.0)])
def test_parameter_counts(size, n_sense, hidden, total, contextual):
    """Parameters in millions are those of the paper's sizes and of its Table 8, vocabulary 50,257,
    length 512."""
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
    assert abs(model(idx[:, :-1], idx[:, 1:])[1].item() - math.log(5000)) < 0.2


def test_weights_start_as_in_gpt2():
    """Matrices have deviation 0.02, residual projections that over sqrt(2 n_layer); biases are zero."""
    torch.manual_seed(0)
    model = Backpack(Config(block_size=64, vocab_size=500, n_layer=8, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            residual = name.startswith('contextualizer.h.') and 'c_proj' in name
            assert p.std().item() == pytest.approx(0.005 if residual else 0.02, rel=0.05), name
        elif name.endswith('bias'):
            assert (p == 0).all(), name


def test_weight_decay_is_on_matrices_alone():
    """AdamW decays every parameter with two or more axes, no other, and holds each of them once."""
    model = lively()
    decayed, free = model.adamw(1e-3, 0.1, (0.9, 0.95)).param_groups
    assert decayed['weight_decay'] == 0.1 and all(p.dim() >= 2 for p in decayed['params'])
    assert free['weight_decay'] == 0 and all(p.dim() == 1 for p in free['params'])
    assert len(decayed['params'] + free['params']) == len(list(model.parameters()))


# -----------------------------------------------------------------------------
# Published weights.


def written(folder: Path, settings: dict, state: dict) -> Path:
    """A folder in the published format."""
    (folder / 'config.json').write_text(json.dumps(settings))
    torch.save(state, folder / 'pytorch_model.bin')
    return folder


def fixture(name: str) -> tuple[dict, dict, dict]:
    """Config, weights and expected outputs of a reference checkpoint."""
    folder = FIXTURES / name
    state = torch.load(folder / 'pytorch_model.bin', weights_only=True)
    return json.loads((folder / 'config.json').read_text()), state, np.load(folder / 'expected.npz')


@pytest.mark.parametrize('name', ['backpack-gpt2-tiny', 'gpt2-tiny'])
def test_reference_outputs(name):
    """Logits, alpha and senses equal those of the reference implementation to 1e-4."""
    model, expected = from_pretrained(FIXTURES / name), fixture(name)[2]
    idx = torch.from_numpy(expected['input_ids'])
    with torch.no_grad():
        assert np.abs(model(idx)[0].numpy() - expected['logits']).max() < 1e-4
        if model.config.n_sense:
            assert np.abs(model.alpha(idx).numpy() - expected['contextualization']).max() < 1e-4
            assert np.abs(model.senses(idx).transpose(1, 2).numpy() - expected['senses']).max() < 1e-4


@pytest.mark.parametrize('name', ['backpack-gpt2-tiny', 'gpt2-tiny'])
def test_published_keys_may_vary(name, tmp_path):
    """A file without lm_head and "transformer.", and with GPT-2's causal masks, gives the same model."""
    settings, state, expected = fixture(name)
    state = {key.removeprefix('transformer.'): value for key,
             value in state.items() if key != 'lm_head.weight'}
    prefix = 'backpack.gpt2_model.' if 'backpack' in name else ''
    for i in range(settings['n_layer']):
        state[f'{prefix}h.{i}.attn.bias'] = torch.ones(1, 1, 16, 16).tril()
        state[f'{prefix}h.{i}.attn.masked_bias'] = torch.tensor(-1e4)
    model = from_pretrained(written(tmp_path, settings, state))
    with torch.no_grad():
        logits = model(torch.from_numpy(expected['input_ids']))[0].numpy()
    assert np.abs(logits - expected['logits']).max() < 1e-4


def published_logits(settings: dict, w: dict, idx: torch.Tensor) -> torch.Tensor:
    """The published architecture written out from a published file's own weights: logits (B, T, V)."""
    gpt = 'backpack.gpt2_model.' if 'num_senses' in settings else 'transformer.'
    heads, T = settings['n_head'], idx.shape[1]

    def conv1d(x, name):
        return x @ w[f'{name}.weight'] + w[f'{name}.bias']

    def ln(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'])

    def mlp(x, name):
        return conv1d(F.gelu(conv1d(x, f'{name}.c_fc'), approximate='tanh'), f'{name}.c_proj')

    def attend(q, k, n, divisor):
        q, k = (t.view(*t.shape[:2], n, -1).transpose(1, 2) for t in (q, k))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 / divisor
        return scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)  # (B, n, T, T)

    E = w[f'{gpt}wte.weight']
    h = E[idx] + w[f'{gpt}wpe.weight'][:T]
    for i in range(settings['n_layer']):
        name = f'{gpt}h.{i}'
        q, k, v = conv1d(ln(h, f'{name}.ln_1'), f'{name}.attn.c_attn').chunk(3, -1)
        a = attend(q, k, heads, i + 1 if settings['scale_attn_by_inverse_layer_idx'] else 1)
        v = v.view(*v.shape[:2], heads, -1).transpose(1, 2)
        h = h + conv1d((a @ v).transpose(1, 2).flatten(2), f'{name}.attn.c_proj')
        h = h + mlp(ln(h, f'{name}.ln_2'), f'{name}.mlp')
    h = ln(h, f'{gpt}ln_f')
    if 'num_senses' not in settings:
        return h @ E.T
    r = E[idx] + ln(E[idx], 'backpack.sense_network.ln')
    r = r + mlp(ln(r, 'backpack.sense_network.block.ln_1'), 'backpack.sense_network.block.mlp')
    C = mlp(ln(r, 'backpack.sense_network.block.ln_2'), 'backpack.sense_network.final_mlp')
    C = C.view(*idx.shape, settings['num_senses'], -1).transpose(1, 2)  # (B, k, T, d)
    net = 'backpack.sense_weight_net.c_attn'
    q, k = (h @ w[f'{net}.weight'].T + w[f'{net}.bias']).chunk(2, -1)
    return (attend(q, k, settings['num_senses'], 1) @ C).sum(1) @ E.T


@pytest.mark.parametrize('name', ['backpack-gpt2-tiny', 'gpt2-tiny'])
def test_the_written_out_architecture_is_the_reference(name):
    """published_logits gives the logits of the reference implementation on its own files."""
    settings, state, expected = fixture(name)
    logits = published_logits(settings, state, torch.from_numpy(expected['input_ids']))
    assert np.abs(logits.numpy() - expected['logits']).max() < 1e-4


@pytest.mark.parametrize('scaled', [True, False])
@pytest.mark.parametrize('changes', [
    {}, {'n_embd': 40, 'n_head': 5, 'n_sense': 8}, {'n_layer': 5, 'n_sense': 1},
    {'vocab_size': 43, 'n_vocab': 41}, {'n_sense': 0},
    {'n_sense': 0, 'n_layer': 1, 'n_embd': 30, 'n_head': 3}])
def test_exported_weights_mean_the_same_in_the_published_format(changes, scaled, tmp_path):
    """Of any width, depth, sense count and padding, an exported file gives our logits in the written-out
    published architecture; and, with scale_attn_by_inverse_layer_idx or without, its logits in ours."""
    model, idx, near = lively(**changes).float(), text(), dict(atol=1e-4, rtol=1e-4)
    export(model, tmp_path / 'out')
    settings = json.loads((tmp_path / 'out' / 'config.json').read_text())
    state = torch.load(tmp_path / 'out' / 'pytorch_model.bin', weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(published_logits(settings, state, idx), model(idx)[0], **near)
        settings['scale_attn_by_inverse_layer_idx'] = scaled
        again = from_pretrained(written(tmp_path, settings, state))
        torch.testing.assert_close(published_logits(settings, state, idx), again(idx)[0], **near)


@pytest.mark.parametrize('n_sense', [0, 3])
def test_an_exported_model_comes_back_exactly(n_sense, tmp_path):
    """Weights, config (dropout and padding too) and tokenizer are the same after export and from_pretrained;
    the file has the keys and shapes of the reference's."""
    model = lively(n_sense=n_sense, n_vocab=37, dropout=0.25).float()
    model.tokenizer = {'name': 'toy', 'pattern': r'\w+|\s', 'pieces': ['é', 'nurse']}
    (tmp_path / 'a').mkdir()
    export(model, tmp_path / 'a' / 'b')
    again = from_pretrained(tmp_path / 'a' / 'b')
    assert again.config == model.config and again.tokenizer == model.tokenizer and not again.training
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert sorted(p.name for p in (tmp_path / 'a').iterdir()) == ['b']
    _, reference, _ = fixture('backpack-gpt2-tiny' if n_sense else 'gpt2-tiny')
    ours = torch.load(tmp_path / 'a' / 'b' / 'pytorch_model.bin', weights_only=True)
    assert ours.keys() == {k for k in reference if '.h.2.' not in k}  # the reference has a layer more


def test_export_refuses_what_it_cannot_write(tmp_path):
    """A model with small sense MLPs, which the published code cannot load, and a folder that exists are
    errors that leave nothing behind."""
    with pytest.raises(UserError, match='sense_hidden is 24, but the published code has 96'):
        export(lively(sense_hidden=24), tmp_path / 'x')
    with pytest.raises(UserError, match='exists'):
        export(lively(), tmp_path)
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot be written'):
        export(lively(), tmp_path / 'file' / 'x')
    with pytest.raises(UserError, match='cannot be written'):
        export(lively(), tmp_path / 'nowhere' / 'x')
    assert [p.name for p in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('vocab_size, words, name', [(50257, 50257, 'gpt2'), (50264, 50257, 'gpt2'),
                                                     (50000, 50000, None), (60000, 60000, None)])
def test_a_vocabulary_as_large_as_gpt2s_is_gpt2s(vocab_size, words, name, tmp_path):
    """Published weights with GPT-2's 50,257 words and a few rows of padding read with its tokenizer; a
    vocabulary of another size has no tokenizer that we know, and no padding."""
    config = Config(block_size=4, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=4, n_sense=2)
    export(Backpack(config), tmp_path / 'out')
    settings = json.loads((tmp_path / 'out' / 'config.json').read_text())
    del settings['n_vocab']
    (tmp_path / 'out' / 'config.json').write_text(json.dumps(settings))
    model = from_pretrained(tmp_path / 'out')
    assert model.config.n_vocab == words and model.tokenizer == (name and {'name': name})


def test_dropout_of_the_published_config_is_kept():
    """Fine-tuning has the dropout that config.json has; evaluation has none."""
    model = from_pretrained(FIXTURES / 'backpack-gpt2-tiny')
    assert model.config.dropout == 0.1 and not model.training and model.contextualizer.drop.p == 0.1


@pytest.mark.parametrize('change, message', [
    ('missing', r'backpack\.gpt2_model\.h\.1\.mlp\.c_fc\.bias is missing'),
    ('shape', r'backpack\.sense_weight_net\.c_attn\.weight is \(3, 4\), not \(64, 32\)'),
    ('conv1d', r'backpack\.gpt2_model\.h\.0\.mlp\.c_fc\.weight is \(128, 32\), not \(32, 128\)'),
    ('unknown', r'backpack\.rotary is no weight of this architecture'),
    ('untied', r'lm_head\.weight is no copy of backpack\.gpt2_model\.wte\.weight'),
    ('number', r'backpack\.gpt2_model\.wpe\.weight is no dense tensor'),
    ('sparse', r'backpack\.gpt2_model\.wpe\.weight is no dense tensor'),
    ('complex', r'backpack\.gpt2_model\.wpe\.weight is no dense tensor'),
    ('nan', r'backpack\.gpt2_model\.wpe\.weight holds numbers that are not finite')])
def test_a_published_file_with_a_wrong_weight_is_refused_by_name(change, message, tmp_path):
    """A missing, misshapen, unknown or untied weight is an error that names it as the file does."""
    settings, state, _ = fixture('backpack-gpt2-tiny')
    if change == 'missing':
        del state['backpack.gpt2_model.h.1.mlp.c_fc.bias']
    key, wpe = 'backpack.gpt2_model.h.0.mlp.c_fc.weight', 'backpack.gpt2_model.wpe.weight'
    state |= {'shape': {'backpack.sense_weight_net.c_attn.weight': torch.zeros(3, 4)},
              'conv1d': {key: state[key].t()}, 'unknown': {'backpack.rotary': torch.zeros(3)},
              'untied': {'lm_head.weight': state['lm_head.weight'] + 1}, 'missing': {},
              'number': {wpe: 3}, 'sparse': {wpe: state[wpe].to_sparse()},
              'complex': {wpe: state[wpe] * 1j}, 'nan': {wpe: state[wpe] * math.nan}}[change]
    with pytest.raises(UserError, match=message):
        from_pretrained(written(tmp_path, settings, state))


@pytest.mark.parametrize('change, message', [
    ({'model_type': 'llama'}, 'model_type is llama'), ({'n_embd': None}, 'n_embd'),
    ({'activation_function': 'relu'}, 'activation_function is relu'),
    ({'sense_intermediate_scale': 2}, 'sense_intermediate_scale is 2'),
    ({'scale_attn_weights': False}, 'scale_attn_weights is False'), ({'n_embd': 33}, 'n_embd = 33'),
    ({'n_positions': 'x'}, 'n_positions is x'), ({'n_layer': 1.0}, 'n_layer is 1.0'),
    ({'num_senses': None}, 'num_senses is missing'), ({'vocab_size': 1 << 50}, r'wte\.weight is'),
    ({'n_layer': 10**9}, 'at most 1000'), ({'n_embd': 1 << 60}, 'config.json')])
def test_a_config_of_another_architecture_is_refused(change, message, tmp_path):
    """config.json with a missing or foreign setting is an error that names it."""
    settings, state, _ = fixture('backpack-gpt2-tiny')
    settings |= change
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(UserError, match=message) as error:
        from_pretrained(written(tmp_path, settings, state))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('config', ['[]', '{', '"gpt2"', ''])
def test_a_config_that_is_none_is_refused(config, tmp_path):
    """A config.json that holds no settings is a one-line error."""
    settings, state, _ = fixture('gpt2-tiny')
    written(tmp_path, settings, state)
    (tmp_path / 'config.json').write_text(config)
    with pytest.raises(UserError, match='describes no GPT-2 and no Backpack'):
        from_pretrained(tmp_path)
    (tmp_path / 'config.json').unlink()
    with pytest.raises(UserError, match='config.json does not exist'):
        from_pretrained(tmp_path)


# -----------------------------------------------------------------------------
# The Hub. A server on this machine stands in for it; the client reads its address when it is imported, so
# each test asks from a process of its own.


@pytest.fixture
def hub():
    """Address of a Hub that has owner/tiny, the Backpack fixture, and owner/empty, which has no weights."""
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path, body, headers = self.path.split('?')[0], None, {}
            if path in ('/api/models/owner/tiny', '/api/models/owner/empty'):
                names = ['config.json'] + ['pytorch_model.bin'] * path.endswith('tiny')
                body = json.dumps({'id': path[12:], 'siblings': [{'rfilename': n} for n in names]}).encode()
            if path.startswith('/owner/tiny/resolve/main/'):
                name = path.rsplit('/', 1)[1]
                body = (FIXTURES / 'backpack-gpt2-tiny' / name).read_bytes()
                headers = {'ETag': f'"{name}"', 'X-Repo-Commit': 40 * '1'}
            self.send_response(404 if body is None else 200)
            for key, value in {'Content-Length': len(body or b''), **headers}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if body and self.command == 'GET':
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


def test_loading_weights_imports_no_compiler():
    """A fresh process that loads weights does without torch._dynamo, which takes seconds to import."""
    code = 'import sys, model; model.from_pretrained(sys.argv[1]); sys.exit("torch._dynamo" in sys.modules)'
    subprocess.run([sys.executable, '-c', code, FIXTURES / 'backpack-gpt2-tiny'], cwd=ROOT, check=True)


def ask_the_hub(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess:
    """sample.py --from NAME --export out, with a Hub and a cache of its own."""
    return subprocess.run([sys.executable, ROOT / 'sample.py', '--from', name, '--export', home / 'out'],
                          capture_output=True, text=True, cwd=home,
                          env={**os.environ, 'HF_ENDPOINT': endpoint, 'HF_HOME': str(home / 'hf')})


def test_a_hub_name_is_fetched_once(hub, tmp_path):
    """A name on the Hub gives the weights it has there; a second time they come from the cache, without a
    network."""
    for endpoint in (hub, 'http://127.0.0.1:9'):
        done = ask_the_hub('owner/tiny', endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        theirs = from_pretrained(FIXTURES / 'backpack-gpt2-tiny')
        ours = from_pretrained(tmp_path / 'out')
        assert all(torch.equal(v, ours.state_dict()[k]) for k, v in theirs.state_dict().items())
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.parametrize('name, reachable', [('owner/tiny', False), ('gpt2', False), ('owner/none', True),
                                             ('owner/empty', True)])
def test_what_the_hub_does_not_give_is_one_line(name, reachable, hub, tmp_path):
    """Without a network, for an unknown name, and for a repository without weights: exit code 2 and one line
    within 40 seconds, and nothing is written."""
    start = time.time()
    done = ask_the_hub(name, hub if reachable else 'http://127.0.0.1:9', tmp_path)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and time.time() - start < 40
    assert f'sample.py: {name} is nothing local and cannot be fetched' in done.stderr
    assert name != 'owner/empty' or 'it has no pytorch_model.bin' in done.stderr
    assert not (tmp_path / 'out').exists()


class Bomb:
    """A pickle that would make a folder."""

    def __reduce__(self):
        return os.mkdir, ('boom',)


@pytest.mark.parametrize('content', ['pickle', 'truncated', 'text', 'empty'])
def test_a_bad_file_of_weights_is_refused_and_runs_no_code(content, tmp_path, monkeypatch):
    """A pickle with code, a truncated checkpoint, a text and an empty file are one-line errors; nothing
    is executed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'ckpt.pt'
    torch.save(Bomb() if content == 'pickle' else {'model': torch.zeros(1000)}, path)
    if content == 'truncated':
        path.write_bytes(path.read_bytes()[:2000])
    if content in ('text', 'empty'):
        path.write_text('hello' if content == 'text' else '')
    with pytest.raises(UserError) as error:
        from_pretrained(path)
    assert '\n' not in str(error.value) and not Path('boom').exists()


# -----------------------------------------------------------------------------
# Edits and generation.


def test_an_edit_that_changes_nothing_gives_identical_logits():
    """Multiplying senses by one, or returning them, leaves every bit of the logits as it was."""
    model, idx = lively().float(), text()
    plain = model(idx)[0]
    for edit in (lambda idx, C: C, scale_senses(list(range(40)), [0, 1, 2], 1.0)):
        assert torch.equal(model(idx, edit=edit)[0], plain)


def test_a_sense_turned_off_takes_its_contribution_with_it():
    """Turning sense 1 of a word off lowers the logits by alpha_1 C(word)_1 . E wherever the word
    stands, nothing else."""
    model, idx = lively(), text()
    word = idx[0, 2].item()
    C, alpha = model.senses(idx), model.alpha(idx)
    lost = torch.zeros_like(C)
    lost[:, :, 1][idx == word] = C[:, :, 1][idx == word]
    before, after = model(idx)[0], model(idx, edit=scale_senses([word], [1], 0.0))[0]
    torch.testing.assert_close(before - after, model.project(weighted_sum(alpha, lost)))
    assert (before - after).abs().max() > 0.1


def test_a_transformer_has_no_senses_to_edit():
    """An edit given to the baseline Transformer is an error, not ignored."""
    with pytest.raises(ValueError, match='no senses'):
        lively(n_sense=0)(text(), edit=lambda idx, C: C)


def test_padding_is_never_sampled():
    """Ids from n_vocab on are never generated, however large their logits."""
    model = lively(n_vocab=30)
    with torch.no_grad():
        model.wte.weight[30:] *= 50
    logits = model(text() % 30)[0][:, -1]
    assert (logits[:, 30:].max(-1).values > logits[:, :30].max(-1).values).all()
    for temperature in (0, 1, 5):
        assert model.generate(text(3, 8) % 30, 20, temperature=temperature).max() < 30


def test_generation_ends_once_every_text_has_had_the_stop():
    """With stop the ids are those without it, up to the place where the last text first has that id."""
    model = lively()
    torch.manual_seed(3)
    whole = model.generate(text(4, 3), 200)
    stop = next(w for w in range(model.config.n_vocab) if (whole[:, 4:] == w).any(1).all())
    last = max((row[4:] == stop).nonzero()[0].item() for row in whole)
    torch.manual_seed(3)
    assert torch.equal(model.generate(text(4, 3), 200, stop=stop), whole[:, :4 + last + 1])
    assert last + 1 < 200


def test_temperature_zero_is_argmax():
    """Each generated id at temperature 0, at one too small for float32, and with top_k = 1, is the argmax of
    the logits before it."""
    model, idx = lively().float(), text(4)
    for options in ({'temperature': 0}, {'temperature': 1e-300}, {'top_k': 1}):
        out = model.generate(idx, 6, **options)
        assert out.shape == (2, 10) and torch.equal(out[:, :4], idx)
        assert torch.equal(out[:, 4:], model(out[:, :-1])[0].argmax(-1)[:, 3:])


def test_generation_uses_the_edit_and_goes_on_past_block_size():
    """Every step applies the edit; past block_size the text goes on from its last block_size // 2 tokens."""
    model, idx = lively(), text(12)
    edit = scale_senses(list(range(20)), [0, 2], 0.0)
    out = model.generate(idx, 5, temperature=0, edit=edit)
    assert torch.equal(out[:, 12], model(idx, edit=edit)[0][:, -1].argmax(-1))
    for n in (13, 14, 15):
        assert torch.equal(out[:, n], model(out[:, 7:n], edit=edit)[0][:, -1].argmax(-1))
    assert not torch.equal(out, model.generate(idx, 5, temperature=0))


# -----------------------------------------------------------------------------
# The fast forms, each beside its plain one.

TEXTS = {  # seed -> ids (B, T): words that repeat, one word alone, one token, all distinct, a larger batch
    0: text(), 1: torch.full((3, 7), 5), 2: torch.zeros(1, 1, dtype=torch.long), 3: torch.arange(12)[None],
    4: text(12, 8), 5: text(12, 1)}


def loss_and_gradients(model: Backpack, loss: torch.Tensor) -> list[torch.Tensor]:
    """A loss, and the gradient of every weight."""
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def plain_loss(model: Backpack, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss with the senses of every token, all of alpha, and all logits."""
    o = weighted_sum(model.alpha(idx), model.sense_network(model.wte(idx)))
    return F.cross_entropy(model.project(o).flatten(0, 1), targets.flatten(), ignore_index=-1)


@pytest.mark.parametrize('seed', TEXTS)
def test_the_fast_loss_and_its_gradients_are_those_of_the_plain_form(seed, monkeypatch):
    """With distinct words, blocks of positions and no logits, loss and gradients are as without, in float32
    to 1e-5; positions without a target count nothing; the words that fill up the list get no gradient."""
    monkeypatch.setattr(model_py, 'LOGITS_IN_MEMORY', 40 * 9)  # 9 positions at a time
    model, idx = lively(seed).float(), TEXTS[seed]
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    fast = loss_and_gradients(model, model(idx, targets, distinct=distinct_words(idx), loss_only=True)[1] / 2)
    plain = loss_and_gradients(model, plain_loss(model, idx, targets) / 2)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(idx, targets)[1] / 2, plain[0])
    gpt = lively(seed, n_sense=0).float()
    torch.testing.assert_close(loss_and_gradients(gpt, gpt(idx, targets, loss_only=True)[1]),
                               loss_and_gradients(gpt, gpt(idx, targets)[1]), rtol=1e-5, atol=1e-5)


def test_the_fast_loss_makes_no_logits_and_needs_no_gradient():
    """loss_only returns None for the logits, and under no_grad the loss alone."""
    model, idx = lively(), text()
    with torch.no_grad():
        logits, loss = model(idx, idx, loss_only=True)
    assert logits is None and not loss.requires_grad
    torch.testing.assert_close(loss, model(idx, idx)[1])


def test_the_fast_loss_in_bfloat16_is_no_less_exact_than_the_plain_one():
    """Under autocast loss and gradients are in float32, and no farther from exact ones than with all logits,
    by more than a half."""
    model, idx = lively().float(), text()
    exact = loss_and_gradients(model, model(idx, idx)[1])
    far = []
    for fast in (True, False):
        with torch.autocast('cpu', torch.bfloat16):
            loss = model(idx, idx, loss_only=fast)[1]
        found = loss_and_gradients(model, loss)
        assert all(a.dtype == torch.float32 for a in found)
        far.append(sum((a - b).square().sum() for a, b in zip(found, exact)).sqrt())
    assert 0 < far[0] < 1.5 * far[1]


@pytest.mark.parametrize('size', [1, 3, 4, 10, 128])
def test_a_sum_in_blocks_is_the_sum(size):
    """sum_in_blocks gives the values and gradients of weighted_sum(causal_softmax(..), C), whatever the size
    of the blocks, for the last positions of a text too."""
    torch.manual_seed(size)
    for T, S in ((10, 10), (1, 7), (4, 9)):
        inputs = [torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (T, S)]
        C = torch.randn(2, S, 3, 24, dtype=torch.float64, requires_grad=True)
        results = []
        for o in (sum_in_blocks(*inputs, C, size), weighted_sum(causal_softmax(*inputs), C)):
            results.append([o, *torch.autograd.grad((o * o.detach().sin()).sum(), (*inputs, C))])
        torch.testing.assert_close(*results)


def test_distinct_words_and_places_are_the_text():
    """words[place] is the text, each word is there once, and the list is a multiple of 64 long."""
    for idx in TEXTS.values():
        words, place = distinct_words(idx)
        assert torch.equal(words[place], idx) and len(words) % 64 == 0
        assert len(words[:place.max() + 1].unique()) == place.max() + 1 == len(idx.unique())


def test_a_compiled_model_is_compiled_once_whatever_the_number_of_words():
    """20 batches of 1 to 320 distinct words make one graph without a break, with the plain loss and
    gradients."""
    graphs, config = [], {**TINY, 'vocab_size': 400, 'block_size': 40}
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Backpack(Config(**config))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for i in range(20):
        idx = torch.randint(1 + 21 * i, (8, 40))
        inputs = data_py.inputs_of(idx, idx, 'cpu')
        fast = loss_and_gradients(model, compiled(**inputs)[1])
        if i % 5 == 0:
            torch.testing.assert_close(fast, loss_and_gradients(model, plain_loss(model, idx, idx)),
                                       rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1
    with torch.autocast('cpu', torch.bfloat16):
        losses = [run(**inputs)[1] for run in (compiled, model)]
    assert abs(losses[0] - losses[1]) < 1e-3 and len(graphs) == 2


def test_a_compiled_model_takes_a_last_batch_of_fewer_texts():
    """Batches of 4, 3 and 2 texts, as at the end of validation, give the plain loss without a graph break."""
    for model in (lively(), lively(n_sense=0)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend='eager', fullgraph=True)
        with torch.no_grad():
            for n in (4, 3, 2):
                inputs = data_py.inputs_of(text(batch=n), text(batch=n, seed=2), 'cpu')
                torch.testing.assert_close(compiled(**inputs)[1], model(**inputs)[1])


def edits_of(model: Backpack) -> dict:
    """No edit, a factor, and the annealed control of a topic after it."""
    weights = topic(model, affinity(model, [3, 5, 8]), (3.0, 2.5, 2.0, 1.0))
    return {'none': None, 'factor': scale_senses(list(range(20)), [0, 2], 0.3),
            'both': compose([scale_senses(None, [1], 0.5), weights])}


@pytest.mark.parametrize('edit', ['none', 'factor', 'both'])
def test_the_cache_changes_no_logit_and_no_text(edit):
    """Read word by word with a cache, a batch of texts has the logits of being read whole, to 1e-4 in
    float32; greedy text is the same far beyond block_size, where what is kept of it is read anew."""
    model, idx = lively(2).float(), text(4, 3)
    edit = edits_of(model)[edit]
    cache, whole = Cache(12), text(12, 3)
    for n in range(4, 13):
        o = model.represent(whole[:, :n], edit, cache=cache)
        assert o.shape[1] == (4 if n == 4 else 1) and cache.length == n
        torch.testing.assert_close(o[:, -1], model.represent(whole[:, :n], edit)[:, -1], rtol=0, atol=1e-4)
    out = [model.generate(idx, 40, temperature=0, edit=edit, use_cache=kept) for kept in (True, False)]
    assert torch.equal(*out) and len(out[0].unique()) > 3
    gpt = lively(2, n_sense=0)
    assert torch.equal(*(gpt.generate(idx, 40, temperature=0, use_cache=kept) for kept in (True, False)))


def test_the_cache_reads_each_word_once(monkeypatch):
    """Up to block_size every word goes through the contextualizer once; then half of them are read again."""
    model, seen = lively(), []
    forward = model.contextualizer.forward
    monkeypatch.setattr(model.contextualizer, 'forward',
                        lambda x, cache: seen.append(x.shape[1]) or forward(x, cache))
    model.generate(text(4), 12)
    assert seen == [4, 1, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1]


def test_a_cache_takes_one_word_after_the_first_text():
    """Two new words at once, the first of which attention would let see the second, are an error."""
    model, cache = lively(), Cache(12)
    model.represent(text(5), cache=cache)
    with pytest.raises(AssertionError):
        model.represent(text(7), cache=cache)


def test_a_sense_table_is_the_senses():
    """A table of the vocabulary, or of the words of a text, gives the logits and the text of the senses made
    anew; in bfloat16 nearly; a word that it lacks makes them NaN."""
    model, idx = lively().float(), text()
    for words in (None, idx):
        table = SenseTable(model, words)
        torch.testing.assert_close(model(idx, table=table)[0], model(idx)[0])
    assert len(SenseTable(model, idx).senses) == len(idx.unique()) + 1
    assert torch.equal(*(model.generate(idx, 9, temperature=0, table=t) for t in (SenseTable(model), None)))
    small = SenseTable(model, dtype=torch.bfloat16)
    assert small.senses.dtype == torch.bfloat16
    torch.testing.assert_close(model(idx, table=small)[0], model(idx)[0], rtol=0.05, atol=0.05)
    large = lively(vocab_size=2100).float()  # more words than are computed at a time
    torch.testing.assert_close(SenseTable(large)(torch.arange(2100)), large.senses(torch.arange(2100)))
    idx[1, 4] = (idx[1, 4] + 1) % 40
    lacking = SenseTable(model, idx[idx != idx[1, 4]])
    assert model(idx, table=lacking)[0][1].isnan().all()


# -----------------------------------------------------------------------------


@pytest.mark.parametrize('change, message', [
    ({'n_head': 5}, 'n_embd = 24 is not divisible by n_head = 5'),
    ({'n_sense': 7}, 'not divisible by n_sense = 7'),
    ({'n_layer': 0}, 'n_layer is 0'), ({'dropout': 1.5}, 'dropout is 1.5'),
    ({'n_vocab': 41}, 'n_vocab is 41')])
def test_numbers_that_do_not_fit_are_refused(change, message):
    """A config that no model can have says which number is wrong."""
    with pytest.raises(ValueError, match=message):
        Config(**{**TINY, **change})
