"""Claims about published weights: read and written as the reference does, fetched from the Hub."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, TRANSFORMERS, error_of, lively, same
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from rucksack import sample
from rucksack.hub.export import CODE, export, settings_of
from rucksack.hub.find import BUNDLED
from rucksack.hub.published import COPIES, from_published
from rucksack.loaded import from_pretrained, load_model
from rucksack.paper.gender import gender_rows
from rucksack.tokenizer import ENGLISH, GPT2, load_tokenizer, tokenizer_files

BACKPACK = ROOT / 'tests' / 'fixtures' / 'backpack-gpt2-tiny'  # made by the published code
GPT = ROOT / 'tests' / 'fixtures' / 'gpt2-tiny'  # made by transformers
BYTES = GPT2 | {'merges': []}  # with end-of-text, 257 ids
LEVANTER = ROOT / 'tests' / 'fixtures' / 'levanter-tiny'  # made by Levanter, which divides o by k


def read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Read the settings and the weights in a published folder."""
    settings = json.loads((folder / 'config.json').read_text())
    file, = [path for path in folder.iterdir() if path.stem in ('model', 'pytorch_model')]
    load = torch.load if file.suffix == '.bin' else load_file
    return settings, load(file)


def write(folder: Path, settings: dict, state: dict) -> Path:
    """Write a folder in the published format."""
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(settings))
    torch.save(state, folder / 'pytorch_model.bin')
    return folder


NEAR = {'rtol': 0, 'atol': 1e-4}
BY_DEFAULT = {'scale_attn_by_inverse_layer_idx': None}  # None: the setting is absent


@torch.no_grad()
@pytest.mark.parametrize('folder, changes', [
    (BACKPACK, {}), (BACKPACK, BY_DEFAULT), (GPT, {}), (GPT, BY_DEFAULT),
    (LEVANTER, {}), (LEVANTER, BY_DEFAULT), (LEVANTER, {'auto_map': {}}),
    (LEVANTER, {'architectures': ['BackpackLMHeadModel']})])
def test_our_logits_are_those_of_the_reference(folder, changes, tmp_path):
    """Our logits match, whatever divides the scores and whatever marks a model as Levanter's."""
    settings, state = read(folder)
    settings = {name: x for name, x in (settings | changes).items() if x is not None}
    model = from_published(write(tmp_path / 'published', settings, state), 64)
    expected = np.load(folder / 'expected.npz')  # what the reference computes
    logits = model(torch.from_numpy(expected['input_ids']))
    assert_close(logits, torch.from_numpy(expected['logits']), **NEAR)


@torch.no_grad()
@pytest.mark.parametrize('folder', [BACKPACK, GPT], ids=lambda folder: folder.name)
def test_files_with_other_keys_are_the_same_model(folder, tmp_path):
    """Files without lm_head or "transformer.", but with masks, give the same weights."""
    settings, state = read(folder)
    prefix = 'backpack.gpt2_model.' if folder == BACKPACK else ''
    del state['lm_head.weight']
    other = {name.removeprefix('transformer.'): weight for name, weight in state.items()}
    for i in range(3):
        other[f'{prefix}h.{i}.attn.bias'] = torch.ones(1)
        other[f'{prefix}h.{i}.attn.masked_bias'] = torch.ones(1)
    found = from_published(write(tmp_path / 'other', settings, other), 64)
    model = from_published(folder, 64)
    same(found.state_dict(), model.state_dict())


@pytest.mark.parametrize('folder', [BACKPACK, GPT], ids=lambda folder: folder.name)
def test_export_writes_the_references_weights_under_its_names(folder, tmp_path):
    """An export leaves out only copies of tied weights, and divides queries, not scores."""
    model = from_published(folder, 64)
    export(model, BYTES, tmp_path / 'out')
    settings, state = read(tmp_path / 'out')
    assert not settings['scale_attn_by_inverse_layer_idx']
    _, published = read(folder)
    for name in COPIES.keys() & published.keys():
        del published[name]
    for name, weight in published.items():
        if folder == BACKPACK and '.attn.c_attn.' in name:
            i = int(name.split('.h.')[1][0])
            weight[..., :model.config.n_embd] /= i + 1
    same(state, published)


@pytest.mark.parametrize('name', BUNDLED)
def test_english_has_the_settings_that_export_writes(name):
    """The bundled files equal what export writes for the same merges and sizes, code included."""
    folder = BUNDLED[name]
    model, tokenizer = from_pretrained(name)
    settings = settings_of(model.config, load_tokenizer(tokenizer).eot_token)
    files = tokenizer_files(tokenizer, model.config.block_size) | {'config.json': settings}
    for file, content in files.items():
        assert json.loads((folder / file).read_text(encoding='utf-8')) == content
    assert (ENGLISH / CODE.name).read_bytes() == CODE.read_bytes()


@pytest.mark.slow
def test_sense_10_of_english_holds_nearly_half_of_the_bias():
    """eval gender chooses sense 10 on the paper's other prompts; the numbers are README's."""
    *_, as_it_is, without, _ = gender_rows(load_model('english', 'cpu'), None)
    assert without['change'] == 'without sense 10'
    assert as_it_is['bias ratio'] == pytest.approx(5.81, abs=0.02)
    assert without['bias ratio'] == pytest.approx(3.51, rel=0.02)
    assert without['reduction %'] == pytest.approx(48, rel=0.02)


CHANGES = {  # the name of a weight or setting, and its new value (None: absent)
    'h.0.mlp.c_fc.bias': None, 'x.y': torch.zeros(3),
    'lm_head.weight': torch.zeros(64, 32),  # no copy of wte.weight
    'activation_function': 'relu'}


@pytest.mark.parametrize('name', CHANGES)
def test_another_architecture_is_refused_by_name(name, tmp_path, capsys):
    """A one-line error names a missing or foreign weight or setting."""
    settings, state = read(GPT)
    changed = settings if name in settings else state
    changed[f'transformer.{name}' if name.startswith('h.') else name] = CHANGES[name]
    state = {key: weight for key, weight in state.items() if weight is not None}
    folder = write(tmp_path / 'published', settings, state)
    tokenizer = tokenizer_files(BYTES)['tokenizer.json']
    (folder / 'tokenizer.json').write_text(json.dumps(tokenizer))
    line = error_of(sample, capsys, '--from', str(folder))
    assert str(folder) in line
    assert name.removeprefix('h.0.') in line


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
    greedy = {'attention_mask': ones, 'max_new_tokens': 4, 'do_sample': False}
    written = [model.generate(idx, **greedy, **options).tolist() for options in (
        {}, {'use_cache': True}, {'use_cache': False})]
    more = {'attention_mask': ones[:1], 'max_new_tokens': 3, 'do_sample': False}
    cache = model(idx[:1, :4], use_cache=True)[1]
    reused = [model.generate(idx[:1], **more, **options).tolist() for options in (
        {}, {'past_key_values': cache}, {'prefill_chunk_size': 4}, {'assistant_model': model})]
    three = {'attention_mask': pad(ones, (3, 0)), 'num_beams': 3, 'max_new_tokens': 4}
    beams = [model.generate(pad(idx, (3, 0)), **three, use_cache=is_cached).tolist()
             for is_cached in (True, False)]
    labels = idx.clone()
    labels[:, 3] = -100
    loss = model(idx, labels=labels, inputs_embeds=None).loss  # as PEFT gives it
    model.train()
    parts = [getattr(model, name) for name in ('alpha', 'senses') if hasattr(model, name)]
    has_dropout = [not torch.equal(part(idx), part(idx)) for part in parts]
    model.eval()
    refused = []
    for function, options in [
            (model, {'position_ids': idx}), (model, {'attention_masks': ones}),
            (model, {'output_hidden_states': True}), (model, {'attention_mask': 2 * ones}),
            (model, {'attention_mask': ones[:, :1]}),
            (lambda ids: model(ids.repeat(1, 2)), {}),  # 18 tokens
            (model.generate, {'position_ids': idx}), (model.generate, {'output_hidden_states': 1})]:
        try:
            function(idx, **options)
            refused.append(False)
        except Exception as error:
            refused.append(isinstance(error, (TypeError, ValueError)))
answer = {'logits': logits.tolist(), 'padded': padded.tolist(), 'loss': loss.item(),
          'written': written, 'reused': reused, 'beams': beams,
          'refused': refused, 'has_dropout': has_dropout,
          'max_length': tokenizer.model_max_length,
          'ids': [tokenizer(text)['input_ids'] for text in asked['texts']]}
model.save_pretrained(again)
tokenizer.save_pretrained(again)
json.dump(answer, open(folder + '.json', 'w'))
"""
ASKED = ['the nurse said', " I'm  don't\n\n1234 é 😀 x\u0301", ' a the\tnurses', 'שלום']
MERGES = ['\u0120 t', 'h e', '\u0120t he', 'n u', 'r s', 'nu rs']
VOCABULARIES = {
    'merges': {'name': 'gpt2', 'merges': MERGES},
    'special': {'name': 'gpt2', 'merges': MERGES,
                'special': {'<|endoftext|>': 0, '[PAD]': 265}}}


def run_there(home: Path, *argv: str) -> str:
    """Return what a Python with transformers prints offline; home is its cache."""
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(home)}
    done = subprocess.run([TRANSFORMERS, '-c', *argv], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS, reason='no transformers; TRANSFORMERS_PYTHON can name it')
@pytest.mark.parametrize('n_sense, hidden', [(3, 96), (3, 40), (0, 96)])
@pytest.mark.parametrize('words', VOCABULARIES)
def test_transformers_runs_what_we_export(words, n_sense, hidden, tmp_path):
    """An export has our logits, loss, ids, errors, dropout and text, and it can be saved again."""
    tokenizer = VOCABULARIES[words]
    encoding = load_tokenizer(tokenizer)
    n_vocab = encoding.n_vocab
    shape = {'vocab_size': 320, 'n_vocab': n_vocab, 'n_sense': n_sense, 'sense_hidden': hidden}
    model = lively(**shape, dropout=0.5).float()
    export(model, tokenizer, tmp_path / 'out')
    torch.manual_seed(0)
    idx = torch.randint(n_vocab, (2, 9))
    file = tmp_path / 'out.json'
    file.write_text(json.dumps({'idx': idx.tolist(), 'texts': ASKED}))
    run_there(tmp_path / 'hf', THERE, tmp_path / 'out', tmp_path / 'again')
    answer = json.loads(file.read_text())
    logits = model(idx)[..., :n_vocab]
    theirs = torch.tensor(answer['logits'])
    assert_close(theirs[..., :n_vocab], logits, **NEAR)
    assert answer['ids'] == [encoding.encode_ordinary(text) for text in ASKED]
    assert answer['max_length'] == model.config.block_size
    if n_sense:  # transformers' GPT-2 counts padding as positions, and unused rows as ids
        assert theirs.shape == logits.shape
        assert answer['refused'] == 8 * [True]
        assert answer['has_dropout'] == [True, False]  # weights, senses
        targets = idx[:, 1:].clone()
        targets[:, 2] = -100  # the label at position 3
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        assert answer['loss'] == pytest.approx(loss.item(), abs=1e-4)
        assert_close(torch.tensor(answer['padded']), logits[:, -1], **NEAR)
        assert answer['written'] == 3 * [model.generate(idx, 4, temperature=0.0).tolist()]
        assert answer['reused'] == 4 * [answer['reused'][0]]
        assert answer['beams'][0] == answer['beams'][1]
    again, found = from_pretrained(tmp_path / 'again')
    assert found == tokenizer
    assert again.config == model.config
    same(again.state_dict(), model.state_dict())


EDIT_THERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).float().eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
nurse, she, he = (tokenizer(f' {word}')['input_ids'][0] for word in ('nurse', 'she', 'he'))
idx = torch.tensor([tokenizer('The nurse said that')['input_ids']])
with torch.no_grad():
    C = model.senses(idx)
    for factor in (1, 0):
        C[idx == nurse, 10] *= factor
        probs = model(idx, C=C).logits[0, -1].softmax(-1)
        print(f'she {probs[she]:.3f}, he {probs[he]:.3f}')
    print(model(idx, alpha=0 * model.alpha(idx)).logits.any())
    model.resize_token_embeddings(len(tokenizer) + 1)
    print(model(idx).logits.shape[-1], model.config.n_vocab, model(idx).logits.isfinite().all())
"""


@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS, reason='no transformers')
def test_the_edit_of_readme_runs_in_transformers_alone(tmp_path):
    """README's edit prints the same numbers in transformers; alpha and added rows work too."""
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    *edit, alpha, resized = run_there(tmp_path, EDIT_THERE, ENGLISH).splitlines()
    assert '\n'.join(edit) in readme
    assert alpha == 'tensor(False)'
    assert resized == '16642 16642 tensor(True)'


@pytest.mark.parametrize('file', ['model.safetensors', 'pytorch_model.bin'])
def test_a_hub_name_is_fetched_with_one_file_of_weights(file, tmp_path, monkeypatch):
    """For a Hub name, the config, the tokenizer and one file of weights are downloaded."""
    model = lively(vocab_size=264, n_vocab=258).float()
    tokenizer = GPT2 | {'merges': ['\u0120 t']}
    there = tmp_path / 'there'
    cache = tmp_path / 'cache'
    export(model, tokenizer, there)
    torch.save(load_file(there / 'model.safetensors'), there / 'pytorch_model.bin')
    if file == 'pytorch_model.bin':
        (there / 'model.safetensors').unlink()

    def snapshot_download(name, allow_patterns):
        assert name == 'owner/tiny'
        hidden = [path.name for path in there.iterdir() if path.name not in allow_patterns]
        shutil.copytree(there, cache, dirs_exist_ok=True, ignore=lambda *_: hidden)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    found, description = from_pretrained('owner/tiny')
    assert description == tokenizer
    same(found.state_dict(), model.state_dict())
    assert {path.name for path in cache.iterdir()} == {
        'config.json', 'tokenizer.json', 'tokenizer_config.json', file}


def test_few_ids_without_a_tokenizer_are_not_taken_for_gpt2s(tmp_path):
    """Weights without a tokenizer and with few ids are refused."""
    export(lively(vocab_size=264, n_vocab=257).float(), BYTES, tmp_path / 'out')
    (tmp_path / 'out' / 'tokenizer.json').unlink()
    with pytest.raises(ValueError, match='no tokenizer'):
        from_pretrained(tmp_path / 'out')
