"""Claims about published weights: read as the reference reads them, written so, fetched once from the Hub."""

import copy
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, error_of
from safetensors.torch import load_file, save_file
from subjects import save
from test_model import lively, text

import sample
from model import Backpack, Config
from rucksack.common import UserError
from rucksack.data import load_tokenizer
from rucksack.gender import gender_rows
from rucksack.published import CODE, COPIES, ENGLISH, export, from_pretrained, read_tokenizer, tokenizer_files
from rucksack.table import load
from rucksack.toy import toy_tokenizer

FIXTURES, BACKPACK, GPT = ROOT / 'tests' / 'fixtures', 'backpack-gpt2-tiny', 'gpt2-tiny'


def read(folder: Path) -> tuple[dict, dict]:
    """The settings and the weights in a published folder."""
    old = folder / 'pytorch_model.bin'
    state = torch.load(old, weights_only=True) if old.exists() else load_file(folder / 'model.safetensors')
    return json.loads((folder / 'config.json').read_text()), state


def written(folder: Path, settings: dict, state: dict, safe: bool = False) -> Path:
    """A folder in the published format, its weights in a file of torch.save or a safe one."""
    (folder / 'config.json').write_text(json.dumps(settings))
    if safe:
        save_file({key: w.clone().contiguous() for key, w in state.items()}, folder / 'model.safetensors')
    else:
        torch.save(state, folder / 'pytorch_model.bin')
    return folder


def published_logits(settings: dict, w: dict, idx: torch.Tensor) -> torch.Tensor:
    """The published architecture, its sense network that of A.1, written out from a file's own weights."""
    def conv1d(x, name):
        return x @ w[f'{name}.weight'] + w[f'{name}.bias']
    def ln(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'])
    def mlp(x, name):
        return conv1d(F.gelu(conv1d(x, f'{name}.c_fc'), approximate='tanh'), f'{name}.c_proj')
    def heads(x, n):
        return x.view(*x.shape[:2], n, -1).transpose(1, 2)
    def attend(q, k, n, divisor=1):
        scores = heads(q, n) @ heads(k, n).transpose(2, 3) / (q.shape[-1] // n) ** 0.5 / divisor
        return scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -math.inf).softmax(-1)

    k = settings.get('num_senses')
    gpt = 'backpack.gpt2_model.' if k else 'transformer.'
    E = w[f'{gpt}wte.weight']
    h = E[idx] + w[f'{gpt}wpe.weight'][:idx.shape[1]]
    for i in range(settings['n_layer']):
        name, divisor = f'{gpt}h.{i}', i + 1 if settings['scale_attn_by_inverse_layer_idx'] else 1
        query, key, value = conv1d(ln(h, f'{name}.ln_1'), f'{name}.attn.c_attn').chunk(3, -1)
        y = attend(query, key, settings['n_head'], divisor) @ heads(value, settings['n_head'])
        h = h + conv1d(y.transpose(1, 2).flatten(2), f'{name}.attn.c_proj')
        h = h + mlp(ln(h, f'{name}.ln_2'), f'{name}.mlp')
    h = ln(h, f'{gpt}ln_f')
    if not k:
        return h @ E.T
    x, net = E[idx], 'backpack.sense_network'
    r = x + ln(x, f'{net}.ln')
    r = r + mlp(ln(r, f'{net}.block.ln_1'), f'{net}.block.mlp')
    C = heads(mlp(ln(r, f'{net}.block.ln_2'), f'{net}.final_mlp'), k)  # (B, k, T, d)
    qk = F.linear(h, *(w[f'backpack.sense_weight_net.c_attn.{name}'] for name in ('weight', 'bias')))
    return (attend(*qk.chunk(2, -1), k) @ C).sum(1) @ E.T


@torch.no_grad()
@pytest.mark.parametrize('safe', [False, True])
@pytest.mark.parametrize('name', [BACKPACK, GPT])
def test_reference_outputs(name, safe, tmp_path):
    """Our numbers, of files of both formats and with other keys too, and the written-out ones are the
    reference's to 1e-4."""
    (settings, state), expected = read(FIXTURES / name), np.load(FIXTURES / name / 'expected.npz')
    prefix, idx = 'backpack.gpt2_model.' * (name == BACKPACK), torch.from_numpy(expected['input_ids'])
    other = {key.removeprefix('transformer.'): w for key, w in state.items() if key != 'lm_head.weight'}
    other |= {f'{prefix}h.{i}.attn.{key}': torch.ones(1) for i in range(3) for key in ('bias', 'masked_bias')}
    model, again = from_pretrained(FIXTURES / name), from_pretrained(written(tmp_path, settings, other, safe))
    found = {'logits': [model(idx), again(idx), published_logits(settings, state, idx)]}
    if name == BACKPACK:
        found |= {'contextualization': [model.alpha(idx)], 'senses': [model.senses(idx).transpose(1, 2)]}
    for key, values in found.items():
        assert all(np.abs(value.numpy() - expected[key]).max() < 1e-4 for value in values), key
    assert model.config.dropout == 0.1 and not model.training  # that of config.json, for fine-tuning


@torch.no_grad()
@pytest.mark.parametrize('changes', [
    {}, {'n_embd': 40, 'n_head': 5, 'n_sense': 8}, {'n_layer': 5, 'n_sense': 1}, {'n_sense': 0},
    {'vocab_size': 43, 'n_vocab': 41}, {'n_sense': 0, 'n_layer': 1, 'n_embd': 30, 'n_head': 3}])
def test_exported_weights_mean_the_same_in_the_published_format(changes, tmp_path):
    """Written out they give our logits; scores divided by the layer, not, or by default: we give theirs."""
    model, idx = lively(**changes).float(), text()
    export(model, tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    pairs = [(published_logits(settings, state, idx), model(idx))]
    for scaled in (True, False, None):
        settings['scale_attn_by_inverse_layer_idx'] = bool(scaled or scaled is None and model.config.n_sense)
        theirs = published_logits(settings, state, idx)
        if scaled is None:  # the default of the published class, which GPT-2's has not
            del settings['scale_attn_by_inverse_layer_idx']
        pairs.append((theirs, from_pretrained(written(tmp_path, settings, state, safe=bool(scaled)))(idx)))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)


@pytest.mark.parametrize('n_sense', [0, 3])
def test_an_exported_model_comes_back_exactly(n_sense, tmp_path):
    """Weights, config and tokenizer do; a file has the reference's keys; a refused export leaves nothing."""
    model = lively(n_sense=n_sense, vocab_size=260, n_vocab=259, dropout=0.25).float()
    model.tokenizer = toy_tokenizer(['é nurse'])
    export(model, tmp_path / 'b')
    again, reference = from_pretrained(tmp_path / 'b'), read(FIXTURES / (BACKPACK if n_sense else GPT))[1]
    assert again.config == model.config and again.tokenizer == model.tokenizer and not again.training
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    keys = {key for key in reference if '.h.2.' not in key}  # it has 3 layers
    assert read(tmp_path / 'b')[1].keys() == keys - COPIES[n_sense > 0].keys()
    for changes, place, message in (({'sense_hidden': 24}, 'x', 'sense_hidden is 24; .* 96'),
                                    ({}, 'b', 'exists'), ({}, 'none/x', 'cannot be written')):
        with pytest.raises(UserError, match=message):
            export(lively(**changes), tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ['b']


@torch.no_grad()
def test_a_model_of_a_cut_vocabulary_comes_back_with_its_merges_in_bfloat16(tmp_path, capsys):
    """--export --dtype bfloat16 rounds weights once and writes the merges; more merges, or damaged ones, or
    none, are named."""
    model = lively(vocab_size=264, n_vocab=260, n_sense=3).float()
    model.tokenizer = {'name': 'gpt2', 'merges': ['\u0120 t', 'h e', '\u0120t he']}
    save(str(tmp_path / 'run'), model)
    sample.main(['--from', str(tmp_path / 'run'), '--export', str(tmp_path / 'out'), '--dtype', 'bfloat16'])
    capsys.readouterr()
    again, rounded, idx = from_pretrained(tmp_path / 'out'), copy.deepcopy(model).bfloat16().float(), text()
    assert again.tokenizer == model.tokenizer and again.wte.weight.equal(rounded.wte.weight)
    assert {w.dtype for w in read(tmp_path / 'out')[1].values()} == {torch.bfloat16}
    assert again(idx).equal(rounded(idx))
    file = tmp_path / 'out' / 'merges.txt'
    for content in ('#version\n\u0120 t\n', '#version\nh e\nh e\nt h\n', '#version\nhe t\n', b'\xff\n'):
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert f'{file} is neither' in error_of(sample, capsys, '--from', str(tmp_path / 'out'))
    file.unlink()  # the other file has them too
    assert from_pretrained(tmp_path / 'out').tokenizer == model.tokenizer
    file = tmp_path / 'out' / 'tokenizer.json'
    whole = json.loads(file.read_text())
    for change in ({'merges': whole['model']['merges'][:2]}, {'vocab': {}}, {'merges': 3},
                   {'ignore_merges': 1}):
        file.write_text(json.dumps({'model': whole['model'] | change}))
        assert f'{file} is neither' in error_of(sample, capsys, '--from', str(tmp_path / 'out'))
    file.unlink()
    assert 'merges.txt' in error_of(sample, capsys, '--from', str(tmp_path / 'out'))


@pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')
def test_the_box_has_the_code_that_export_writes():
    """pretrained/english runs in transformers by the same file as any other exported model."""
    assert (ENGLISH / CODE.name).read_bytes() == CODE.read_bytes()


@pytest.mark.parametrize('vocab_size, ids, name', [(50257, 50257, 'gpt2'), (50264, 50257, 'gpt2'),
                                                   (50000, 50000, None), (60000, 60000, None)])
def test_a_vocabulary_as_large_as_gpt2s_is_gpt2s(vocab_size, ids, name, tmp_path):
    """50,257 ids and a few rows of padding have its tokenizer; another size has none we know, no padding."""
    export(Backpack(Config(4, vocab_size, n_layer=1, n_head=1, n_embd=4, n_sense=2)), tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    del settings['n_vocab']
    model = from_pretrained(written(tmp_path, settings, state))
    assert model.config.n_vocab == ids and model.tokenizer == (name and {'name': name})


WPE, FC = 'backpack.gpt2_model.wpe.weight', 'backpack.gpt2_model.h.0.mlp.c_fc.'


@pytest.mark.parametrize('key, change, message', [
    (f'{FC}bias', None, f'missing weight {FC}bias'), ('x.y', torch.zeros(3), 'unexpected weight x.y'),
    (f'{FC}weight', torch.t, f'{FC}weight is no tensor of real numbers of shape (32, 128)'),
    ('lm_head.weight', lambda w: w + 1, 'lm_head.weight differs from backpack.gpt2_model.wte.weight'),
    (WPE, 3, 'other embeddings'), ('n_positions', 1 << 31, 'other embeddings'),
    (WPE, lambda w: w * 1j, 'wpe.weight is no tensor'),
    (WPE, lambda w: w * math.nan, 'wpe.weight holds numbers that are not finite'),
    ('model_type', 'llama', 'model_type is llama'), ('n_embd', None, 'n_embd'), ('n_embd', 33, 'n_embd = 33'),
    ('activation_function', 'relu', 'activation_function is relu'), ('n_positions', 'x', "'x'"),
    ('sense_intermediate_scale', 2, 'sense_intermediate_scale is 2'), ('n_layer', 10**9, 'number of layers'),
    ('num_senses', None, 'num_senses is missing'), ('vocab_size', 1 << 50, 'other embeddings')])
def test_another_architecture_is_refused_by_name(key, change, message, tmp_path):
    """A weight or a setting that is missing, foreign or no number is an error of one line that names it."""
    both = read(FIXTURES / BACKPACK)
    here = both['.' in key]  # settings or weights
    here[key] = change(here[key]) if callable(change) else change
    if change is None:
        del here[key]
    for safe in (False, True)[:1 + all(isinstance(w, torch.Tensor) for w in both[1].values())]:
        with pytest.raises(UserError) as error:
            from_pretrained(written(tmp_path, *both, safe))
        assert message in str(error.value) and '\n' not in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize('kind', ['safetensors', 'bin'])
def test_weights_in_several_files_are_those_of_one(kind, tmp_path):
    """By their index; a file that is missing, elsewhere or none of weights, and a damaged index are named."""
    (settings, state), expected = read(FIXTURES / BACKPACK), from_pretrained(FIXTURES / BACKPACK)
    name = {'safetensors': 'model', 'bin': 'pytorch_model'}[kind]
    places = {key: f'{name}-{i % 2 + 1:05d}-of-00002.{kind}' for i, key in enumerate(state)}
    for file in set(places.values()):
        part = {key: w.clone().contiguous() for key, w in state.items() if places[key] == file}
        (save_file if kind == 'safetensors' else torch.save)(part, tmp_path / file)
    (tmp_path / 'config.json').write_text(json.dumps(settings))
    index = tmp_path / f'{name}.{kind}.index.json'
    index.write_text(json.dumps({'weight_map': places}))
    assert from_pretrained(tmp_path)(text()).equal(expected(text()))
    for content, message in (
            (places | {'x': '../y.bin'}, 'no index'), (places | {'x': f'no.{kind}'}, 'no such'),
            ({'x': 'config.json'}, 'no index'), ({}, 'no index'), ([], 'no index')):
        index.write_text(json.dumps({'weight_map': content}))
        with pytest.raises(UserError, match=message):
            from_pretrained(tmp_path)


TRANSFORMERS = os.environ.get('TRANSFORMERS_PYTHON') or (
    importlib.util.find_spec('transformers') and sys.executable)
THERE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, again = sys.argv[1:]
asked = json.load(open(folder + '.json'))
model, tokenizer = (kind.from_pretrained(folder, trust_remote_code=True)
                    for kind in (AutoModelForCausalLM, AutoTokenizer))
idx, n = torch.tensor(asked['idx']), len(asked['idx'][0])
left, mask = torch.nn.functional.pad(idx, (3, 0)), torch.nn.functional.pad(torch.ones_like(idx), (3, 0))
with torch.no_grad():
    answer = {'logits': model(idx).logits.clamp(min=-1e9).tolist(),
              'padded': model(left, attention_mask=mask).logits[:, -1].clamp(min=-1e9).tolist(),
              'written': model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=4,
                                        do_sample=False).tolist(),
              'ids': [tokenizer(text)['input_ids'] for text in asked['texts']]}
model.save_pretrained(again)
tokenizer.save_pretrained(again)
json.dump(answer, open(folder + '.json', 'w'))
"""


@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS, reason='no transformers: pip install it, or set TRANSFORMERS_PYTHON')
@pytest.mark.parametrize('n_sense', [3, 0])
@pytest.mark.parametrize('words', ['toy', 'cut'])
def test_transformers_runs_what_we_export_and_we_read_what_it_saves(words, n_sense, tmp_path):
    """Our logits, text, ids and padding in transformers, offline; and back from there exactly."""
    torch.manual_seed(0)
    merges = ['\u0120 t', 'h e', '\u0120t he', 'n u', 'r s', 'nu rs']
    tokenizer = {'name': 'gpt2', 'merges': merges}
    if words == 'toy':
        tokenizer = toy_tokenizer([' a', ' nurse', ' the', 'é'])
    encoding = load_tokenizer(tokenizer)
    model = lively(vocab_size=320, n_vocab=encoding.n_vocab, n_sense=n_sense).float()
    model.tokenizer = tokenizer
    folder, idx = tmp_path / 'out', torch.randint(encoding.n_vocab, (2, 9))
    export(model, folder)
    texts = ['the nurse said', " I'm  don't\n\n1234 é 😀 x\u0301", ' a the\tnurses', 'שלום']
    Path(f'{folder}.json').write_text(json.dumps({'idx': idx.tolist(), 'texts': texts}))
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path / 'hf')}
    done = subprocess.run([TRANSFORMERS, '-c', THERE, folder, tmp_path / 'again'], capture_output=True,
                          text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(Path(f'{folder}.json').read_text())
    with torch.no_grad():
        logits = model(idx)[..., :encoding.n_vocab]
    found = torch.tensor(answer['logits'])[..., :encoding.n_vocab]
    assert torch.allclose(found, logits, rtol=0, atol=1e-4)
    if n_sense:  # GPT-2 of transformers counts padding as positions
        padded = torch.tensor(answer['padded'])[..., :encoding.n_vocab]
        assert torch.allclose(padded, logits[:, -1], rtol=0, atol=1e-4)
        assert answer['written'] == model.generate(idx, 4, temperature=0.0).tolist()
    assert answer['ids'] == [encoding.encode_ordinary(text) for text in texts]
    again = from_pretrained(tmp_path / 'again')
    assert again.tokenizer == tokenizer and again.config == model.config
    assert all(torch.equal(w, again.state_dict()[key]) for key, w in model.state_dict().items())


def test_safe_weights_cut_short_are_one_line(tmp_path):
    """Whatever is left of the file: its name, and what to do."""
    settings, state = read(FIXTURES / BACKPACK)
    file = written(tmp_path, settings, state, safe=True) / 'model.safetensors'
    whole = file.read_bytes()
    for n in (0, 5, 1000, len(whole) - 1):
        file.write_bytes(whole[:n])
        with pytest.raises(UserError, match=f'^{file} is damaged or holds no weights .*fetch it again$'):
            from_pretrained(tmp_path)


class Hub(SimpleHTTPRequestHandler):
    """A stand-in for the Hub: a server of files with its headers."""

    def end_headers(self):
        """Two more headers."""
        self.send_header('ETag', f'"{Path(self.path).name}"')  # the client makes a path of it
        self.send_header('X-Repo-Commit', 40 * '1')
        super().end_headers()


@pytest.fixture
def hub(tmp_path):
    """Address of a Hub that has owner/tiny and owner/empty, which has no weights."""
    model = lively(vocab_size=264, n_vocab=258).float()
    model.tokenizer = toy_tokenizer(['a nurse'])
    for name in ('tiny', 'empty'):
        files, api = tmp_path / 'owner' / name / 'resolve' / (40 * '1'), tmp_path / 'api/models/owner' / name
        for folder in (files.parent, api / 'tree', api / 'revision'):
            folder.mkdir(parents=True)
        export(model, files)
        entries = [{'type': 'file', 'path': path.name, 'oid': path.name, 'size': path.stat().st_size}
                   for path in sorted(files.iterdir()) if name == 'tiny' or 'model' not in path.name]
        (api / 'tree' / (40 * '1')).write_text(json.dumps(entries))
        for path in (api / 'index.html', api / 'revision' / 'main'):
            path.write_text(json.dumps({'id': f'owner/{name}', 'sha': 40 * '1', 'siblings': [
                {'rfilename': entry['path']} for entry in entries]}))
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Hub, directory=tmp_path))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


@pytest.mark.slow
def test_a_hub_name_is_fetched_once_or_refused_in_one_line(hub, tmp_path):
    """Without a network, an answer, such a name or weights an error takes 40 seconds at most."""
    def ask(name: str, endpoint: str) -> subprocess.CompletedProcess:  # which the client reads on import
        env = {'HF_ENDPOINT': endpoint, 'HF_HOME': f'{tmp_path}/hf', 'HF_HUB_DISABLE_PROGRESS_BARS': '1',
               'HF_HUB_OFFLINE': '0'}
        argv = [sys.executable, ROOT / 'sample.py', '--from', name, '--export', tmp_path / 'out']
        return subprocess.run(argv, capture_output=True, text=True, env=os.environ | env, timeout=90)

    nowhere, fetched = 'http://127.0.0.1:9', 'cannot be fetched'
    with socket.create_server(('127.0.0.1', 0)) as silent:
        for name, endpoint, why in (
                ('owner/tiny', nowhere, fetched), ('owner/none', hub, fetched),
                ('owner/empty', hub, 'model.safetensors'),
                ('gpt2', 'http://127.0.0.1:{1}'.format(*silent.getsockname()), fetched)):
            start, done = time.time(), ask(name, endpoint)
            assert done.returncode == 2 and done.stderr.count('\n') == 1 and time.time() - start < 40
            assert why in done.stderr and not (tmp_path / 'out').exists()
    for endpoint in (hub, nowhere):
        done = ask('owner/tiny', endpoint)
        assert done.returncode == 0, done.stderr
        theirs, ours = read(tmp_path / 'owner/tiny/resolve' / (40 * '1')), read(tmp_path / 'out')
        assert theirs[0] == ours[0] and all(torch.equal(w, ours[1][key]) for key, w in theirs[1].items())
        shutil.rmtree(tmp_path / 'out')


@pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')
def test_english_shows_its_gender_sense_right_after_the_installation(tmp_path):
    """With no vocabulary at hand, no network and no run: nurse:10 off lowers she and raises he."""
    argv = [sys.executable, ROOT / 'sample.py', '--senses-off', 'nurse:10', '--json', 'x.json']
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {
        'HF_HUB_OFFLINE': '1', 'TIKTOKEN_CACHE_DIR': str(tmp_path), 'https_proxy': 'http://127.0.0.1:9'})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / 'x.json').read_text())['tables']['next words']['rows']
    (she, less), (he, more) = next(row[1:3] for row in rows if row[0] == "' she'"), next(
        row[1:3] for row in rows if row[0] == "' he'")
    assert she / he > 1.5 * less / more and more > he and 'Backpack english' in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')
def test_sense_10_of_english_is_the_one_that_holds_most_of_the_bias():
    """eval.py gender chooses it by the paper's other prompts; and the files are as small as promised."""
    s, sizes = load('english', 'cpu'), {path.name: path.stat().st_size for path in ENGLISH.iterdir()}
    assert (ENGLISH / CODE.name).read_bytes() == CODE.read_bytes()
    assert sizes['model.safetensors'] < 26e6 and sizes['merges.txt'] < 300e3
    rows = gender_rows(s)
    assert rows[1].change == 'without sense 10'
    assert rows[1].ratio < 0.85 * rows[0].ratio
    again = read_tokenizer(ENGLISH, s.model.config.n_vocab)
    assert again == s.model.tokenizer and tokenizer_files(again)['tokenizer.json'] == json.loads(
        (ENGLISH / 'tokenizer.json').read_text())
