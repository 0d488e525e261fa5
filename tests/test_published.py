"""Claims about published weights: read as the reference reads them, written so, fetched once from the Hub."""

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
from conftest import ROOT
from test_model import lively, text

from model import Backpack, Config, from_pretrained
from rucksack.common import UserError
from rucksack.published import export
from rucksack.toy import toy_tokenizer

FIXTURES = ROOT / 'tests' / 'fixtures'
BACKPACK, GPT = 'backpack-gpt2-tiny', 'gpt2-tiny'


def fixture(name: str) -> tuple[dict, dict, dict]:
    """Config, weights and expected outputs of a reference checkpoint."""
    folder = FIXTURES / name
    state = torch.load(folder / 'pytorch_model.bin', weights_only=True)
    return json.loads((folder / 'config.json').read_text()), state, np.load(folder / 'expected.npz')


def written(folder: Path, settings: dict, state: dict) -> Path:
    """A folder in the published format."""
    (folder / 'config.json').write_text(json.dumps(settings))
    torch.save(state, folder / 'pytorch_model.bin')
    return folder


def published_logits(settings: dict, w: dict, idx: torch.Tensor) -> torch.Tensor:
    """The published architecture written out from a published file's own weights: logits (B, T, V)."""
    gpt, T = 'backpack.gpt2_model.' if 'num_senses' in settings else 'transformer.', idx.shape[1]

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
        a = attend(q, k, settings['n_head'], i + 1 if settings['scale_attn_by_inverse_layer_idx'] else 1)
        v = v.view(*v.shape[:2], settings['n_head'], -1).transpose(1, 2)
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


@torch.no_grad()
@pytest.mark.parametrize('name', [BACKPACK, GPT])
def test_reference_outputs(name, tmp_path):
    """Logits, alpha and senses equal those of the reference implementation to 1e-4; so do the logits of the
    written-out architecture, and ours of a file without copies and "transformer.", with GPT-2's masks."""
    settings, state, expected = fixture(name)
    model, idx = from_pretrained(FIXTURES / name), torch.from_numpy(expected['input_ids'])
    masks = {f'h.{i}.attn.{key}': torch.ones(1) for i in range(3) for key in ('bias', 'masked_bias')}
    prefix = 'backpack.gpt2_model.' if name == BACKPACK else ''
    other = {key.removeprefix('transformer.'): weight for key, weight in state.items()
             if key not in ('lm_head.weight', 'backpack.word_embeddings.weight')}
    again = from_pretrained(written(tmp_path, settings, other | {prefix + k: v for k, v in masks.items()}))
    found = {'logits': [model(idx), again(idx), published_logits(settings, state, idx)]}
    if name == BACKPACK:
        found |= {'contextualization': [model.alpha(idx)], 'senses': [model.senses(idx).transpose(1, 2)]}
    for key, values in found.items():
        assert all(np.abs(value.numpy() - expected[key]).max() < 1e-4 for value in values), key
    assert model.config.dropout == 0.1 and not model.training  # that of config.json, for fine-tuning


@torch.no_grad()
@pytest.mark.parametrize('scaled', [True, False])
@pytest.mark.parametrize('changes', [
    {}, {'n_embd': 40, 'n_head': 5, 'n_sense': 8}, {'n_layer': 5, 'n_sense': 1}, {'n_sense': 0},
    {'vocab_size': 43, 'n_vocab': 41}, {'n_sense': 0, 'n_layer': 1, 'n_embd': 30, 'n_head': 3}])
def test_exported_weights_mean_the_same_in_the_published_format(changes, scaled, tmp_path):
    """Of any width, depth, sense count and padding, an exported file gives our logits in the written-out
    published architecture; and, with scale_attn_by_inverse_layer_idx or without, its logits in ours."""
    model, idx = lively(**changes).float(), text()
    export(model, tmp_path / 'out')
    settings = json.loads((tmp_path / 'out' / 'config.json').read_text())
    state = torch.load(tmp_path / 'out' / 'pytorch_model.bin', weights_only=True)
    found = [published_logits(settings, state, idx)]
    settings['scale_attn_by_inverse_layer_idx'] = scaled
    again = from_pretrained(written(tmp_path, settings, state))
    found.append(published_logits(settings, state, idx))
    torch.testing.assert_close(found, [model(idx), again(idx)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('n_sense', [0, 3])
def test_an_exported_model_comes_back_exactly(n_sense, tmp_path):
    """Weights, config (dropout and padding too) and tokenizer are the same after export and from_pretrained;
    the file has the keys of the reference's."""
    model = lively(n_sense=n_sense, n_vocab=37, dropout=0.25).float()
    model.tokenizer = toy_tokenizer(['é nurse'])
    export(model, tmp_path / 'b')
    again = from_pretrained(tmp_path / 'b')
    assert again.config == model.config and again.tokenizer == model.tokenizer and not again.training
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ['b']
    ours = torch.load(tmp_path / 'b' / 'pytorch_model.bin', weights_only=True)
    assert ours.keys() == {k for k in fixture(BACKPACK if n_sense else GPT)[1] if '.h.2.' not in k}  # has 3


@pytest.mark.parametrize('changes, place, message', [
    ({'sense_hidden': 24}, 'x', 'sense_hidden is 24; the published code can only load 4 .* = 96'),
    ({}, '.', 'exists'), ({}, 'file/x', 'cannot be written'), ({}, 'nowhere/x', 'cannot be written')])
def test_export_refuses_what_it_cannot_write(changes, place, message, tmp_path):
    """A model that the published code cannot load, a folder that exists or that cannot be made: errors that
    leave nothing behind."""
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=message):
        export(lively(**changes), tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ['file']


@pytest.mark.parametrize('vocab_size, ids, name', [(50257, 50257, 'gpt2'), (50264, 50257, 'gpt2'),
                                                   (50000, 50000, None), (60000, 60000, None)])
def test_a_vocabulary_as_large_as_gpt2s_is_gpt2s(vocab_size, ids, name, tmp_path):
    """Published weights with GPT-2's 50,257 ids and a few rows of padding have its tokenizer; a vocabulary of
    another size has none that we know, and no padding."""
    export(Backpack(Config(4, vocab_size, n_layer=1, n_head=1, n_embd=4, n_sense=2)), tmp_path / 'out')
    config = tmp_path / 'out' / 'config.json'
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != 'n_vocab'}))
    model = from_pretrained(tmp_path / 'out')
    assert model.config.n_vocab == ids and model.tokenizer == (name and {'name': name})


WPE, FC = 'backpack.gpt2_model.wpe.weight', 'backpack.gpt2_model.h.0.mlp.c_fc.weight'


@pytest.mark.parametrize('key, change, message', [
    ('backpack.gpt2_model.h.1.mlp.c_fc.bias', None, r'missing weight backpack\.gpt2_model\.h\.1\.mlp\.c_fc'),
    ('backpack.rotary', lambda _: torch.zeros(3), r'unexpected weight backpack\.rotary'),
    (FC, torch.t, r'h\.0\.mlp\.c_fc\.weight is no tensor of real numbers of shape \(32, 128\)'),
    ('lm_head.weight', lambda w: w + 1, r'lm_head\.weight differs from backpack\.gpt2_model\.wte\.weight'),
    (WPE, lambda w: 3, r'wpe\.weight is no tensor of real numbers'),
    (WPE, lambda w: w * 1j, r'wpe\.weight is no tensor of real numbers'),
    (WPE, lambda w: w * math.nan, r'wpe\.weight holds numbers that are not finite')])
def test_a_published_file_with_a_wrong_weight_is_refused_by_name(key, change, message, tmp_path):
    """A missing, unexpected, misshapen, untied or unreal weight is an error with its name in the file."""
    settings, state, _ = fixture(BACKPACK)
    weight = state.pop(key, None)
    with pytest.raises(UserError, match=message):
        from_pretrained(written(tmp_path, settings, state | ({key: change(weight)} if change else {})))


@pytest.mark.parametrize('change, message', [
    ({'model_type': 'llama'}, 'its model_type is llama'), ({'n_embd': None}, "'n_embd' is missing"),
    ({'activation_function': 'relu'}, 'its activation_function is relu'), ({'n_embd': 33}, 'n_embd = 33'),
    ({'sense_intermediate_scale': 2}, 'its sense_intermediate_scale is 2'), ({'n_positions': 'x'}, "'x'"),
    ({'num_senses': None}, 'num_senses is missing'), ({'vocab_size': 1 << 50}, 'other embeddings'),
    ({'n_layer': 10**9}, 'another number of layers'), ([], 'describes no GPT-2 and no Backpack')])
def test_a_config_of_another_architecture_is_refused(change, message, tmp_path):
    """config.json with a missing or foreign setting, or with none, is an error of one line that names it."""
    settings, state, _ = fixture(BACKPACK)
    settings = {k: v for k, v in {**settings, **change}.items() if v is not None} if change else change
    with pytest.raises(UserError, match=message) as error:
        from_pretrained(written(tmp_path, settings, state))
    assert '\n' not in str(error.value)


class Bomb:
    """A pickle that would make a folder."""

    def __reduce__(self):
        return os.mkdir, ('boom',)


@pytest.mark.parametrize('content', [Bomb(), b'hello', b'', None])
def test_a_bad_file_of_weights_is_refused_and_runs_no_code(content, tmp_path, monkeypatch):
    """A pickle with code, a text, an empty and a truncated file are errors of one line; nothing is run."""
    monkeypatch.chdir(tmp_path)
    settings, state, _ = fixture(GPT)
    path = written(tmp_path, settings, state if content is None else content) / 'pytorch_model.bin'
    if not isinstance(content, Bomb):
        path.write_bytes(path.read_bytes()[:20_000] if content is None else content)
    with pytest.raises(UserError, match='pytorch_model.bin is damaged or holds no weights') as error:
        from_pretrained(tmp_path)
    assert '\n' not in str(error.value) and not Path('boom').exists()


# -----------------------------------------------------------------------------
# The Hub. A server on this machine stands in for it; the client reads its address when it is imported, so
# each test asks from a process of its own.


@pytest.fixture
def hub(tmp_path):
    """Address of a Hub with owner/tiny, served from tmp_path/tiny, and owner/empty, without weights; under
    /silent it never answers."""
    model = lively(vocab_size=264, n_vocab=258).float()
    model.tokenizer = toy_tokenizer(['a nurse'])
    export(model, tmp_path / 'tiny')

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            path, body, headers = self.path.split('?')[0], None, {}
            if path.startswith('/silent'):
                time.sleep(60)
            if path.startswith(('/api/models/owner/tiny', '/api/models/owner/empty')):
                names = sorted(p.name for p in (tmp_path / 'tiny').iterdir())[:3 if 'tiny' in path else 1]
                files = [{'type': 'file', 'path': name, 'oid': name, 'size': 9} for name in names]
                body = json.dumps(files if '/tree/' in path else {'id': path[12:], 'sha': 40 * '1'}).encode()
            if path.startswith('/owner/'):
                body = (tmp_path / 'tiny' / path.rsplit('/', 1)[1]).read_bytes()
                headers = {'ETag': f'"{path[-9:]}"', 'X-Repo-Commit': 40 * '1'}
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


def ask_the_hub(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess:
    """sample.py --from NAME --export out, with a Hub and a cache of its own."""
    settings = {'HF_ENDPOINT': endpoint, 'HF_HOME': str(home / 'hf'), 'HF_HUB_DISABLE_PROGRESS_BARS': '1'}
    return subprocess.run([sys.executable, ROOT / 'sample.py', '--from', name, '--export', home / 'out'],
                          capture_output=True, text=True, cwd=home, env=os.environ | settings)


@pytest.mark.slow
def test_a_hub_name_is_fetched_once(hub, tmp_path):
    """A name on the Hub gives the weights it has there; then they come from the cache, without a network."""
    for endpoint in (hub, 'http://127.0.0.1:9'):
        done = ask_the_hub('owner/tiny', endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        theirs, ours = from_pretrained(tmp_path / 'tiny'), from_pretrained(tmp_path / 'out')
        assert all(torch.equal(v, ours.state_dict()[k]) for k, v in theirs.state_dict().items())
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.slow
@pytest.mark.parametrize('name, endpoint', [('owner/tiny', 'http://127.0.0.1:9'), ('owner/none', ''),
                                            ('gpt2', '/silent'), ('owner/empty', '')])
def test_what_the_hub_does_not_give_is_one_line(name, endpoint, hub, tmp_path):
    """Without a network, without an answer, for an unknown name, and for a repository without weights: exit
    code 2 and one line within 40 seconds, and nothing is written."""
    start = time.time()
    done = ask_the_hub(name, endpoint if ':' in endpoint else hub + endpoint, tmp_path)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and time.time() - start < 40
    why = 'no such file: ' if name == 'owner/empty' else f'{name} is nothing local and cannot be fetched'
    assert f'sample.py: {why}' in done.stderr and not (tmp_path / 'out').exists()
