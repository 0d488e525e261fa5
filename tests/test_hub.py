"""Claims about published weights: read as the reference does, written so, fetched from the Hub."""

import copy
import csv
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
from helpers import ROOT, error_of, lively, same, save, text
from safetensors.torch import load_file, save_file
from torch import Tensor

from rucksack import sample
from rucksack.hub import BUNDLED, CODE, export, from_pretrained, settings_of
from rucksack.loaded import load_subject
from rucksack.model import Backpack, Config
from rucksack.paper.gender import gender_rows
from rucksack.tokenizer import (
    CHARACTER_OF,
    END_OF_TEXT,
    ENGLISH,
    GPT2,
    load_tokenizer,
    pre_tokenizers_of,
    spelled_vocab,
    tokenizer_files,
    words_tokenizer,
)

BACKPACK = ROOT / 'tests' / 'fixtures' / 'backpack-gpt2-tiny'  # made by the published code
GPT = ROOT / 'tests' / 'fixtures' / 'gpt2-tiny'  # made by transformers
CUTS = pre_tokenizers_of(False)[0]
needs_english = pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """The settings and the weights in a published folder."""
    settings = json.loads((folder / 'config.json').read_text())
    old = folder / 'pytorch_model.bin'
    if old.exists():
        return settings, torch.load(old, weights_only=True)
    return settings, load_file(folder / 'model.safetensors')


def write(folder: Path, settings: dict, state: dict, safe: bool = False) -> Path:
    """A folder in the published format, its weights in a file of torch.save or a safe one."""
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(settings))
    if safe:
        whole = {name: weight.clone().contiguous() for name, weight in state.items()}
        save_file(whole, folder / 'model.safetensors')
    else:
        torch.save(state, folder / 'pytorch_model.bin')
    return folder


# -----------------------------------------------------------------------------
# The published architecture, its sense network that of A.1, from a file's own weights.


def conv1d(w: dict, name: str, x: Tensor) -> Tensor:
    """A linear layer whose weight is stored (inputs, outputs)."""
    return x @ w[f'{name}.weight'] + w[f'{name}.bias']


def norm(w: dict, name: str, x: Tensor) -> Tensor:
    """A layer norm."""
    return F.layer_norm(x, x.shape[-1:], w[f'{name}.weight'], w[f'{name}.bias'])


def mlp(w: dict, name: str, x: Tensor) -> Tensor:
    """Two linear layers with GPT-2's GELU between them."""
    hidden = F.gelu(conv1d(w, f'{name}.c_fc', x), approximate='tanh')
    return conv1d(w, f'{name}.c_proj', hidden)


def heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n * m) -> (B, n, T, m)."""
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


def attention(query: Tensor, key: Tensor, n: int, divisor: int) -> Tensor:
    """Causal weights (B, n, T, T) of n heads."""
    query = heads(query, n)
    key = heads(key, n)
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 / divisor
    is_future = torch.ones(scores.shape[2:]).triu(1).bool()
    return scores.masked_fill(is_future, -math.inf).softmax(-1)


def gpt2_hidden(settings: dict, w: dict, prefix: str, idx: Tensor) -> Tensor:
    """GPT-2's last hidden states (B, T, d)."""
    n = settings['n_head']
    h = w[f'{prefix}wte.weight'][idx] + w[f'{prefix}wpe.weight'][:idx.shape[1]]
    for i in range(settings['n_layer']):
        name = f'{prefix}h.{i}'
        divisor = i + 1 if settings['scale_attn_by_inverse_layer_idx'] else 1
        qkv = conv1d(w, f'{name}.attn.c_attn', norm(w, f'{name}.ln_1', h))
        query, key, value = qkv.chunk(3, -1)
        y = attention(query, key, n, divisor) @ heads(value, n)  # (B, n, T, d/n)
        y = y.transpose(1, 2).flatten(2)
        h = h + conv1d(w, f'{name}.attn.c_proj', y)
        h = h + mlp(w, f'{name}.mlp', norm(w, f'{name}.ln_2', h))
    return norm(w, f'{prefix}ln_f', h)


def sense_vectors(w: dict, k: int, e: Tensor) -> Tensor:
    """Embeddings (B, T, d) -> senses (B, k, T, d)."""
    net = 'backpack.sense_network'
    r = e + norm(w, f'{net}.ln', e)
    r = r + mlp(w, f'{net}.block.mlp', norm(w, f'{net}.block.ln_1', r))
    return heads(mlp(w, f'{net}.final_mlp', norm(w, f'{net}.block.ln_2', r)), k)


def published_logits(settings: dict, w: dict, idx: Tensor) -> Tensor:
    """The logits (B, T, V) of a published Backpack or GPT-2."""
    k = settings.get('num_senses')
    if not k:
        return gpt2_hidden(settings, w, 'transformer.', idx) @ w['transformer.wte.weight'].T
    prefix = 'backpack.gpt2_model.'
    h = gpt2_hidden(settings, w, prefix, idx)
    c_attn = 'backpack.sense_weight_net.c_attn'
    qk = F.linear(h, w[f'{c_attn}.weight'], w[f'{c_attn}.bias'])
    query, key = qk.chunk(2, -1)
    alpha = attention(query, key, k, divisor=1)  # (B, k, T, T)
    E = w[f'{prefix}wte.weight']
    C = sense_vectors(w, k, E[idx])  # (B, k, T, d)
    return (alpha @ C).sum(1) @ E.T


# -----------------------------------------------------------------------------
# Reading: the fixtures hold what the reference computes.


def reference(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids (B, T), and what the reference computes for them."""
    arrays = np.load(folder / 'expected.npz')
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return found.pop('input_ids'), found


def assert_near(a: Tensor, b: Tensor) -> None:
    """Assert that no two numbers differ by 1e-4 or more."""
    assert a.shape == b.shape
    assert (a - b).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize('folder', [BACKPACK, GPT], ids=lambda folder: folder.name)
def test_our_logits_are_those_of_the_reference(folder):
    """To 1e-4, and so are those of the architecture written out above."""
    idx, expected = reference(folder)
    model, _ = from_pretrained(folder)
    assert_near(model(idx), expected['logits'])
    assert_near(published_logits(*read(folder), idx), expected['logits'])


@torch.no_grad()
def test_our_alpha_and_senses_are_those_of_the_reference():
    """To 1e-4; the reference has the senses of all tokens side by side, (B, k, T, d)."""
    idx, expected = reference(BACKPACK)
    model, _ = from_pretrained(BACKPACK)
    assert_near(model.alpha(idx), expected['contextualization'])
    assert_near(model.senses(idx).transpose(1, 2), expected['senses'])


@torch.no_grad()
@pytest.mark.parametrize('safe', [False, True], ids=['torch.save', 'safetensors'])
@pytest.mark.parametrize('folder', [BACKPACK, GPT], ids=lambda folder: folder.name)
def test_files_with_other_keys_are_the_same_model(folder, safe, tmp_path):
    """Without lm_head, without "transformer.", with masks, in both formats: weights are equal."""
    settings, state = read(folder)
    prefix = 'backpack.gpt2_model.' if folder == BACKPACK else ''
    del state['lm_head.weight']
    other = {name.removeprefix('transformer.'): weight for name, weight in state.items()}
    for i in range(3):
        other[f'{prefix}h.{i}.attn.bias'] = torch.ones(1)
        other[f'{prefix}h.{i}.attn.masked_bias'] = torch.ones(1)
    found, _ = from_pretrained(write(tmp_path / 'other', settings, other, safe))
    model, _ = from_pretrained(folder)
    same(found.state_dict(), model.state_dict())


@pytest.mark.parametrize('vocab_size, ids, tokenizer', [
    (50257, 50257, GPT2), (50264, 50257, GPT2), (50000, 50000, None), (60000, 60000, None)])
def test_a_vocabulary_as_large_as_gpt2s_is_gpt2s(vocab_size, ids, tokenizer, tmp_path):
    """50,257 ids and a few rows of padding are; another size has no tokenizer, no padding."""
    config = Config(block_size=4, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=4, n_sense=2)
    export(Backpack(config), None, tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    del settings['n_vocab']
    model, found = from_pretrained(write(tmp_path / 'published', settings, state))
    assert model.config.n_vocab == ids
    assert found == tokenizer


# -----------------------------------------------------------------------------
# Writing.

SHAPES = [
    {'n_embd': 40, 'n_head': 5, 'n_sense': 8}, {'vocab_size': 43, 'n_vocab': 41, 'n_sense': 1},
    {'n_sense': 0, 'n_layer': 3}]


@torch.no_grad()
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_exported_weights_mean_the_same_there(shape, tmp_path):
    """The published architecture computes our logits from our file."""
    model = lively(**shape).float()
    export(model, None, tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    theirs = published_logits(settings, state, text())
    assert torch.allclose(theirs, model(text()), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize('scaled', [True, False, None], ids=['scaled', 'plain', 'by default'])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_scores_can_be_divided_by_the_layer(shape, scaled, tmp_path):
    """As config.json says; by default they are in a Backpack and are not in GPT-2."""
    export(lively(**shape).float(), None, tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    name = 'scale_attn_by_inverse_layer_idx'
    settings[name] = 'num_senses' in settings if scaled is None else scaled
    theirs = published_logits(settings, state, text())
    if scaled is None:
        del settings[name]
    model, _ = from_pretrained(write(tmp_path / 'published', settings, state))
    assert torch.allclose(theirs, model(text()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('n_sense', [0, 3])
def test_an_exported_model_comes_back_exactly(n_sense, tmp_path):
    """Its weights, config and tokenizer, for evaluation."""
    model = lively(n_sense=n_sense, vocab_size=260, n_vocab=259, dropout=0.25).float()
    export(model, words_tokenizer(['é nurse']), tmp_path / 'out')
    again, tokenizer = from_pretrained(tmp_path / 'out')
    same(model.state_dict(), again.state_dict())
    assert again.config == model.config
    assert tokenizer == words_tokenizer(['é nurse'])
    assert not again.training


def export_of_merges(folder: Path, n: int, capsys) -> Backpack:
    """A model of a vocabulary of n merges, which sample.py exports to a folder in bfloat16."""
    merges = ['\u0120 t', 'h e', '\u0120t he']
    model = lively(vocab_size=264, n_vocab=257 + n, n_sense=3).float()
    save(f'{folder}-run', model, {'name': 'gpt2', 'merges': merges[:n]})
    sample.main(['--from', f'{folder}-run', '--export', str(folder), '--dtype', 'bfloat16'])
    capsys.readouterr()
    return model


def test_what_a_killed_export_left_is_removed(tmp_path):
    """The next export to the same folder does it."""
    (tmp_path / '.out.partial').mkdir()
    (tmp_path / '.out.partial' / 'model.safetensors').touch()
    export(lively(n_sense=2).float(), None, tmp_path / 'out')
    assert list(tmp_path.iterdir()) == [tmp_path / 'out']


def test_an_export_in_bfloat16_is_rounded_once(tmp_path, capsys):
    """--export --dtype bfloat16 writes our weights rounded; they come back, and the merges."""
    model = export_of_merges(tmp_path / 'out', 3, capsys)
    _, state = read(tmp_path / 'out')
    assert {weight.dtype for weight in state.values()} == {torch.bfloat16}
    rounded = copy.deepcopy(model).bfloat16().float()
    again, tokenizer = from_pretrained(tmp_path / 'out')
    same(again.state_dict(), rounded.state_dict())
    assert again(text()).equal(rounded(text()))
    assert tokenizer == {'name': 'gpt2', 'merges': ['\u0120 t', 'h e', '\u0120t he']}


# -----------------------------------------------------------------------------
# Tokenizers.


@pytest.mark.parametrize('last', ['\u0120g azed', '\u0120g azes'])
def test_a_tokenizer_as_large_as_gpt2s_is_its_own_or_gpt2s(last, tmp_path, capsys):
    """It is GPT-2's if the last token is GPT-2's; the end-of-text is a token, as published."""
    merges = [f'{CHARACTER_OF[a]} {CHARACTER_OF[b]}' for a in range(256) for b in range(196)]
    description = GPT2 | {'merges': [*merges[:49_999], last]}
    config = Config(block_size=4, vocab_size=50257, n_layer=1, n_head=1, n_embd=4, n_sense=2)
    export(Backpack(config), None, tmp_path / 'out')
    bpe = {'merges': description['merges'], 'vocab': spelled_vocab(description)}
    bpe['vocab'][END_OF_TEXT] = 50256
    tokenizer = {'model': bpe, 'pre_tokenizer': CUTS}
    (tmp_path / 'out' / 'tokenizer.json').write_text(json.dumps(tokenizer))
    wanted = GPT2 if last.endswith('azed') else description
    _, tokenizer = from_pretrained(tmp_path / 'out')
    assert tokenizer == wanted
    assert capsys.readouterr().err == ''


def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys):
    """One line has both numbers of ids."""
    export_of_merges(tmp_path / 'out', 3, capsys)
    export_of_merges(tmp_path / 'other', 2, capsys)
    shutil.copy(tmp_path / 'other' / 'tokenizer.json', tmp_path / 'out')
    line = error_of(sample, capsys, '--from', str(tmp_path / 'out'))
    assert '259' in line
    assert '260' in line


# -----------------------------------------------------------------------------
# The model that comes with the code.


@needs_english
def test_english_has_the_code_that_export_writes():
    """It runs in transformers by the same file as any other exported model."""
    assert (ENGLISH / CODE.name).read_bytes() == CODE.read_bytes()


@needs_english
@pytest.mark.parametrize('name', BUNDLED)
def test_english_has_the_settings_that_export_writes(name):
    """Made anew from its merges and its shape they are the same, with no merges.txt beside them."""
    folder = BUNDLED[name]
    model, tokenizer = from_pretrained(name)
    files = tokenizer_files(tokenizer) | {'config.json': settings_of(model.config)}
    for file, content in files.items():
        assert json.loads((folder / file).read_text(encoding='utf-8')) == content
    assert not (folder / 'merges.txt').exists()


@needs_english
def test_english_loses_her_right_after_the_installation(tmp_path):
    """With no vocabulary, no network and no run: nurse:10 off lowers she and raises he."""
    argv = [sys.executable, ROOT / 'sample.py', '--senses-off', 'nurse:10', '--csv', 'x.csv']
    nothing = {'HF_HUB_OFFLINE': '1', 'TIKTOKEN_CACHE_DIR': str(tmp_path),
               'https_proxy': 'http://127.0.0.1:9'}
    done = subprocess.run(argv, cwd=tmp_path, env=os.environ | nothing, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert 'Backpack english' in done.stdout
    with open(tmp_path / 'x.csv', newline='') as file:
        rows = {row['next word']: row for row in csv.DictReader(file)}
    she_before, she_after = (float(rows['she'][name]) for name in ('before', 'after'))
    he_before, he_after = (float(rows['he'][name]) for name in ('before', 'after'))
    assert he_after > he_before
    assert she_before / he_before > 1.5 * she_after / he_after


@pytest.mark.slow
@needs_english
def test_sense_10_of_english_holds_nearly_half_of_the_bias():
    """eval.py gender chooses it by the paper's other prompts; the numbers are README's."""
    as_it_is, without, _ = gender_rows(load_subject('english', 'cpu'))
    assert without.change == 'without sense 10'
    assert as_it_is.ratio_single == pytest.approx(5.34, abs=0.02)
    assert without.ratio_single == pytest.approx(3.35, abs=0.02)
    assert without.reduction_single == pytest.approx(46, abs=1)


# -----------------------------------------------------------------------------
# Other architectures and damaged weights.

BIAS = 'backpack.gpt2_model.h.0.mlp.c_fc.bias'
CHANGES = {  # what is changed, and how (None: it is gone)
    'mlp.c_fc.bias': (BIAS, None),
    'x.y': ('x.y', lambda w: torch.zeros(3)),
    'lm_head.weight': ('lm_head.weight', lambda w: w + 1),
    'llama': ('model_type', lambda name: 'llama'),
    'relu': ('activation_function', lambda name: 'relu')}


@pytest.mark.parametrize('named', CHANGES)
def test_another_architecture_is_refused_by_name(named, tmp_path, capsys):
    """A weight or a setting that is missing or foreign is named in one line."""
    key, change = CHANGES[named]
    settings, state = read(BACKPACK)
    changed = state if '.' in key else settings
    if change is None:
        del changed[key]
    else:
        changed[key] = change(changed.get(key))
    folder = write(tmp_path / 'published', settings, state)
    line = error_of(sample, capsys, '--from', str(folder))
    assert str(folder) in line
    assert named in line


def test_safetensors_cut_short_are_named(tmp_path, capsys):
    """The file is named in one line."""
    folder = write(tmp_path / 'published', *read(BACKPACK), safe=True)
    file = folder / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])
    assert str(file) in error_of(sample, capsys, '--from', str(folder))


# -----------------------------------------------------------------------------
# Hugging Face transformers.

TRANSFORMERS = os.environ.get('TRANSFORMERS_PYTHON')  # a Python that has it
if not TRANSFORMERS and importlib.util.find_spec('transformers'):
    TRANSFORMERS = sys.executable
THERE = """
import json, sys, torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, again = sys.argv[1:]
asked = json.load(open(folder + '.json'))
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
idx = torch.tensor(asked['idx'])
ones = torch.ones_like(idx)
with torch.no_grad():
    logits = model(idx).logits
    padded = model(pad(idx, (3, 0)), attention_mask=pad(ones, (3, 0))).logits[:, -1]
    written = []
    for cache in (None, True, False):
        options = {} if cache is None else {'use_cache': cache}
        written.append(model.generate(
            idx, attention_mask=ones, max_new_tokens=4, do_sample=False, **options).tolist())
    labels = idx.clone()
    labels[:, 3] = -100
    loss = model(idx, labels=labels).loss
answer = {'logits': logits.clamp(min=-1e9).tolist(),
          'padded': padded.clamp(min=-1e9).tolist(),
          'written': written,
          'loss': loss.item(),
          'ids': [tokenizer(text)['input_ids'] for text in asked['texts']]}
model.save_pretrained(again)
tokenizer.save_pretrained(again)
json.dump(answer, open(folder + '.json', 'w'))
"""
ASKED = ['the nurse said', " I'm  don't\n\n1234 é 😀 x\u0301", ' a the\tnurses', 'שלום']
VOCABULARIES = {
    'words': words_tokenizer([' a', ' nurse', ' the', 'é']),
    'merges': {'name': 'gpt2',
               'merges': ['\u0120 t', 'h e', '\u0120t he', 'n u', 'r s', 'nu rs']}}


def ask_transformers(folder: Path, again: Path, idx: Tensor) -> dict:
    """What transformers, offline, computes from a folder, whose model it then saves in another."""
    file = Path(f'{folder}.json')
    file.write_text(json.dumps({'idx': idx.tolist(), 'texts': ASKED}))
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': f'{folder}-hf'}
    argv = [TRANSFORMERS, '-c', THERE, folder, again]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS, reason='no transformers; TRANSFORMERS_PYTHON can name it')
@pytest.mark.parametrize('n_sense', [3, 0])
@pytest.mark.parametrize('words', VOCABULARIES)
def test_transformers_runs_what_we_export(words, n_sense, tmp_path):
    """Our logits, loss, ids, text and padding, offline; what it saves is our model exactly."""
    tokenizer = VOCABULARIES[words]
    encoding = load_tokenizer(tokenizer)
    n_vocab = encoding.n_vocab
    model = lively(vocab_size=320, n_vocab=n_vocab, n_sense=n_sense).float()
    export(model, tokenizer, tmp_path / 'out')
    torch.manual_seed(0)
    idx = torch.randint(n_vocab, (2, 9))
    answer = ask_transformers(tmp_path / 'out', tmp_path / 'again', idx)
    logits = model(idx)[..., :n_vocab]
    theirs = torch.tensor(answer['logits'])[..., :n_vocab]
    assert torch.allclose(theirs, logits, rtol=0, atol=1e-4)
    assert answer['ids'] == [encoding.encode_ordinary(text) for text in ASKED]
    if n_sense:  # GPT-2 of transformers counts padding as positions, and unused rows as ids
        targets = idx[:, 1:].clone()
        targets[:, 2] = -100  # the label at position 3
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        assert answer['loss'] == pytest.approx(loss.item(), abs=1e-4)
        padded = torch.tensor(answer['padded'])[..., :n_vocab]
        assert torch.allclose(padded, logits[:, -1], rtol=0, atol=1e-4)
        assert answer['written'] == 3 * [model.generate(idx, 4, temperature=0.0).tolist()]
    again, found = from_pretrained(tmp_path / 'again')
    assert found == tokenizer
    assert again.config == model.config
    same(again.state_dict(), model.state_dict())


# -----------------------------------------------------------------------------
# The Hugging Face Hub.

COMMIT = 40 * '1'


class Hub(SimpleHTTPRequestHandler):
    """A stand-in for the Hub: a server of files with its headers."""

    def end_headers(self):
        """Two more headers."""
        self.send_header('ETag', f'"{Path(self.path).name}"')  # the client makes a path of it
        self.send_header('X-Repo-Commit', COMMIT)
        super().end_headers()


@pytest.fixture
def hub(tmp_path):
    """The address of a Hub with one model, owner/tiny."""
    files = tmp_path / 'owner/tiny/resolve' / COMMIT
    api = tmp_path / 'api/models/owner/tiny'
    files.parent.mkdir(parents=True)
    export(lively(vocab_size=264, n_vocab=258).float(), words_tokenizer(['a nurse']), files)
    entries = [{'type': 'file', 'path': path.name, 'oid': path.name, 'size': path.stat().st_size}
               for path in files.iterdir()]
    siblings = [{'rfilename': entry['path']} for entry in entries]
    about = json.dumps({'id': 'owner/tiny', 'sha': COMMIT, 'siblings': siblings})
    for path, content in (('tree/' + COMMIT, json.dumps(entries)), ('revision/main', about),
                          ('index.html', about)):
        (api / path).parent.mkdir(parents=True, exist_ok=True)
        (api / path).write_text(content)
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Hub, directory=tmp_path))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


def ask_hub(endpoint: str, folder: Path) -> subprocess.CompletedProcess:
    """Export owner/tiny to folder/out, in a process: the Hub's client reads these on import."""
    env = {'HF_ENDPOINT': endpoint, 'HF_HOME': str(folder / 'hf'), 'HF_HUB_OFFLINE': '0',
           'HF_HUB_DISABLE_PROGRESS_BARS': '1'}
    argv = [sys.executable, ROOT / 'sample.py', '--from', 'owner/tiny', '--export', folder / 'out']
    return subprocess.run(argv, capture_output=True, text=True, env=os.environ | env, timeout=90)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line_within_40_s(tmp_path):
    """As behind a firewall: the name is said, and nothing is written."""
    with socket.create_server(('127.0.0.1', 0)) as silent:
        start = time.time()
        done = ask_hub(f'http://127.0.0.1:{silent.getsockname()[1]}', tmp_path)
    assert time.time() - start < 40
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1
    assert 'owner/tiny' in done.stderr
    assert not (tmp_path / 'out').exists()


@pytest.mark.slow
def test_a_hub_name_is_fetched_once(hub, tmp_path):
    """The second time needs no network, and gives the same weights and settings."""
    theirs = tmp_path / 'owner/tiny/resolve' / COMMIT
    for endpoint in (hub, 'http://127.0.0.1:9'):
        done = ask_hub(endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        settings, state = read(tmp_path / 'out')
        their_settings, their_state = read(theirs)
        assert settings == their_settings
        same(state, their_state)
        shutil.rmtree(tmp_path / 'out')
