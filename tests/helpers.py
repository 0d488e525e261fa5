"""Helpers that test files share: tiny data, random models, benchmarks, and calls to scripts."""

import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tarfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

from rucksack import prepare, train
from rucksack.checkpoint import make_model
from rucksack.loaded import LoadedModel, from_pretrained
from rucksack.model import GPT, Backpack, Config
from rucksack.senses import compose, senses_after
from rucksack.tokenizer import GPT2, load_tokenizer, words_tokenizer
from rucksack.words import PROMPT, token_texts, word_id

SIZES = {  # the paper's sizes (section 4.1, Table 9)
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768)}

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / 'shared' / 'data'  # real data, if available
VOCABULARY = SHARED / 'tiktoken'
TOY = ROOT / 'tests' / 'fixtures' / 'toy.pt'  # a briefly trained toy (make_toy.py)

posix = pytest.mark.skipif(os.name == 'nt', reason='Windows has no such pipe, link or signal')

TRANSFORMERS = os.environ.get('TRANSFORMERS_PYTHON')  # a Python with transformers
if not TRANSFORMERS and importlib.util.find_spec('transformers'):
    TRANSFORMERS = sys.executable

# Settings of a tiny run on data/tiny. The rate never decays, so a larger max_iters changes no step.
SMALL = [
    '--dataset=tiny', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_sense=4', '--block_size=8',
    '--batch_size=4', '--warmup_iters=2', '--eval_iters=2', '--log_interval=1', '--device=cpu',
    '--compile=False', '--dtype=float32', '--out_dir=out/run',
    '--learning_rate=0.01', '--min_lr=0.01', '--optimizer=adamw']


def say(script, capsys, *argv: str) -> str:
    """Run a script on the CPU and return what it prints."""
    capsys.readouterr()
    script.main([*argv, '--device', 'cpu'])
    return capsys.readouterr().out


def error_of(script, capsys, *argv: str) -> str:
    """Return the one line that a script prints on standard error before it exits with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(list(argv))
    text = capsys.readouterr().err
    assert stop.value.code == 2
    assert text.count('\n') == 1, text
    *_, name = script.__name__.split('.')
    assert text.startswith((f'{name}.py: ', f'rucksack {name}: ')), text
    return text.replace(os.sep, '/')


def offline(monkeypatch) -> None:
    """Keep the Hub's client and the datasets library from using the network."""
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)


def train_toy(folder: Path, steps: int) -> Path:
    """Make data/toy; train out/toy with config/train_toy.py, decaying over `steps` steps."""
    seed = os.environ.get('TOY_SEED', 1337)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare.main(['toy'])
        train.main([str(ROOT / 'config' / 'train_toy.py'), f'--seed={seed}', f'--max_iters={steps}',
                    f'--weight_decay={1710 / steps}', '--eval_interval=10000', '--device=cpu'])
    return folder


def make_data(train_ids, val_ids, **changes) -> None:
    """Write data/tiny as prepare.py would."""
    folder = Path('data/tiny')
    folder.mkdir(parents=True, exist_ok=True)
    bins = {'train': folder / 'train.bin', 'val': folder / 'val.bin'}
    ids = np.concatenate([train_ids, val_ids]).astype('<u2')
    sizes = [2 * len(train_ids), 2 * len(val_ids)]  # in bytes
    facts = prepare.write_bins(bins, io.BytesIO(ids.tobytes()), sizes, np.array([False, True]))
    meta = {'tokenizer': GPT2 | {'merges': []}, 'vocab_size': 257, **facts, **changes}
    (folder / 'meta.json').write_text(json.dumps(meta))


def tar(members: dict[str, bytes]) -> bytes:
    """Make a tar of files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w') as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def checkpoint(folder: str = 'out/run') -> dict:
    """Load the latest state of a run."""
    return torch.load(Path(folder) / 'ckpt.pt', weights_only=True)


def log(folder: str = 'out/run') -> list[dict]:
    """Read the rows of a run's log, without timings."""
    rows = pandas.read_csv(f'{folder}/log.csv', dtype=str, keep_default_na=False)
    return rows.drop(columns='tokens_per_second').to_dict('records')


def same(a: dict, b: dict) -> None:
    """Assert that two nested states are equal bit for bit."""
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            same(a[key], b[key])
        elif torch.is_tensor(a[key]):
            assert torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key], key


def assert_same_run(a: str, b: str) -> None:
    """Assert that two runs have equal bits, except for settings, and equal complete logs."""
    for name in ('ckpt.pt', 'best.pt'):
        one, other = (torch.load(Path(run, name), weights_only=True) for run in (a, b))
        same(one | {'log': None, 'settings': None}, other | {'log': None, 'settings': None})
    assert log(a) == log(b)
    assert Path(b, 'log.csv').read_text().count('\n') == 1 + len(log(b))


RUN = [*SMALL, '--eval_interval=2', '--max_iters=6', '--dropout=0.2']

# New processes are forked from one that has imported torch but never used it.
if os.name == 'nt':
    PROCESSES = multiprocessing.get_context('spawn')
else:
    PROCESSES = multiprocessing.get_context('forkserver')
    PROCESSES.set_forkserver_preload(['helpers', 'torch._dynamo'])


def work(folder: Path, prepared, env: dict, argv: tuple[str, ...]) -> None:
    """In a new process, call prepared(), then run train.py; its output goes to said.txt."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open('said.txt', 'a')
    torch.set_default_dtype(getattr(torch, env.get('DTYPE', 'float32')))
    torch.set_num_threads(1)
    if prepared:
        prepared()
    train.main(list(argv))


def start(*argv: str, prepared=None, **env: str):
    """Start train.py in a new process."""
    os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
    process = PROCESSES.Process(target=work, args=(Path.cwd(), prepared, env, argv))
    process.start()
    return process


def finish(process) -> int | None:
    """Wait for a process; return its exit code (negative for a signal), or None if it hangs."""
    process.join(120)
    return process.exitcode


def at_change(n: int, act) -> None:
    """Call act() right before this process changes a file under out/ for the n-th time."""
    changes = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        is_change = event in ('os.rename', 'os.remove', 'os.mkdir')
        if event == 'open':
            _, _, flags = args
            is_change = (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        if is_change and 'out/' in str(args[0]).replace(os.sep, '/') and next(changes) == n:
            act()

    sys.addaudithook(hook)


def ranks(n: int, *argv: str, **more: str) -> list[int | None]:
    """Run train.py as torchrun does; return n exit codes (77: a rank above 0 changed a file)."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        _, port = s.getsockname()
    env = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'WORLD_SIZE': str(n), **more}
    leave_at_change = partial(at_change, 1, partial(os._exit, 77))
    processes = [start(*argv, RANK='0', **env)]
    for rank in range(1, n):
        processes.append(start(*argv, prepared=leave_at_change, RANK=str(rank), **env))
    return [finish(process) for process in processes]


def lively(seed: int = 0, **changes) -> Backpack | GPT:
    """Make a small model in float64 with large random weights: nothing is zero by accident."""
    torch.manual_seed(seed)
    tiny = dict(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)
    model = make_model(Config(**{**tiny, **changes})).double().eval()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def text(n: int = 10, batch: int = 2, seed: int = 1) -> Tensor:
    """Draw random ids (batch, n)."""
    return torch.randint(40, (batch, n), generator=torch.Generator().manual_seed(seed))


def some_targets(idx: Tensor) -> Tensor:
    """Draw targets for ids (B, T); about a fifth are -1 and do not count."""
    targets = idx.roll(1, 1).where(torch.rand(idx.shape) < 0.8, -1)
    targets[0, 0] = 3
    return targets


class Averages(nn.Linear):
    """A contextualizer: h is a projection of the mean of the embeddings so far."""

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(1, x.shape[1] + 1)
        return super().forward(x.cumsum(1) / n[:, None])


WORDS = """the nurse said that she he they was music guitar song . table chair food dining sports
    fashion style film tv video travel adventure gaming fitness health"""


def toy_loaded(k: int = 4, padding: int = 0, seed: int = 0, name='toy', **shape) -> LoadedModel:
    """Make a random model with clear preferences; its vocabulary is WORDS, plus padding."""
    tokenizer = words_tokenizer([f' {word}' for word in WORDS.split()])
    encoding = load_tokenizer(tokenizer)
    n_vocab = encoding.n_vocab
    shape = dict(block_size=24, n_layer=1, n_head=2, n_embd=16, n_vocab=n_vocab) | shape
    torch.manual_seed(seed)
    model = make_model(Config(n_sense=k, vocab_size=n_vocab + padding, **shape))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return LoadedModel(name, model.eval(), tokenizer, dataset='tiny')


def save(folder: str, model: Backpack | GPT, tokenizer: dict, dataset: str = 'tiny') -> None:
    """Write a checkpoint with everything that rucksack eval reads."""
    Path(folder).mkdir(parents=True)
    settings = {'dataset': dataset, 'compile': False}
    state = {'model': model.state_dict(), 'model_config': asdict(model.config),
             'settings': settings, 'step': 10, 'tokenizer': tokenizer}
    torch.save(state, f'{folder}/ckpt.pt')


class World:
    """A model, its words, and the prompt to continue."""

    def __init__(self, source: str | Path = 'out/toy', prompt: str = PROMPT):
        model, self.tokenizer = from_pretrained(source)
        self.model = model.requires_grad_(False)
        self.encoding = load_tokenizer(self.tokenizer)
        self.idx = LoadedModel('', model, self.tokenizer).read_prompt(prompt)  # (1, T)
        self.ids = self.idx[0].tolist()
        self.E = self.model.wte.weight[:self.encoding.n_vocab]
        self.id = partial(word_id, self.encoding)
        self.word = lambda v: token_texts(self.encoding, [v])[0]

    def probs(self, *edits) -> Tensor:
        """Compute the probabilities (V,) of the next word under edits applied in order."""
        C = senses_after(self.model, self.idx, compose(list(edits)))
        return self.model(self.idx, C=C)[0, -1, :len(self.E)].double().softmax(-1)

    def top(self, scores: Tensor, n: int) -> list[tuple[str, float]]:
        """List the words with the n largest scores (V,), each with its score."""
        return [(self.word(v), scores[v].item()) for v in scores.topk(n).indices.tolist()]

    def next_words(self, *columns: Tensor) -> list:
        """List the twelve words likeliest in any column, with their probability in each column."""
        ids = sorted(range(len(self.E)), key=lambda v: -max(p[v].item() for p in columns))
        return [[self.word(v), *(p[v].item() for p in columns)] for v in ids[:12]]

PASSAGES = [{'text': 'He took the ball and threw the ball'}, {'text': ' A song\n'},
            {'text': 'It was sick'}]
PAIRS = [
    {'UID': 'one', 'linguistics_term': 'agreement',
     'sentence_good': 'The cats sleep.', 'sentence_bad': 'The cats sleeps.'},
    {'UID': 'two', 'linguistics_term': 'islands',
     'sentence_good': 'I ran.', 'sentence_bad': 'Me ran.'},
    {'UID': 'two', 'linguistics_term': 'islands',
     'sentence_good': 'Who left?', 'sentence_bad': 'Left who?'}]
PAGES = [{'page': ' = One = \n \n 1 @,@ 000 km , " so far " . \n'
                  ' = = Deeper = = \n one ( so @-@ called ) . '},
         {'page': ' = Two = \n end . \n'}]


def write_benchmarks(folder: Path) -> Path:
    """Write the three benchmarks of Table 2 to a folder, with Windows line endings."""
    (folder / 'pairs').mkdir(parents=True)
    files = {'lambada_test': PASSAGES, 'pairs/one': PAIRS[:1], 'pairs/two': PAIRS[1:]}
    for name, rows in files.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\r\n' for row in rows))
    pages = '\n'.join(['\ufeff ', *(page['page'] for page in PAGES)])
    (folder / 'wiki.test.raw').write_bytes(pages.replace('\n', '\r\n').encode())
    return folder


def is_close(shown: str, printed: str) -> bool:
    """Tell whether two words are equal, or two numbers nearly equal."""
    shown = shown.strip(',;')
    digits = len(shown.partition('.')[2])
    try:
        number = float(printed.strip(',;'))
        near = min(0.003, 2 * 10 ** -digits)
        return float(shown) == pytest.approx(number, rel=0.02, abs=near)
    except ValueError:
        return shown == printed.strip(',;')


def not_printed(shown: list[str], text: str) -> list[str]:
    """List the shown lines that start no line of the text, up to rounding; ... marks a cut."""
    missing = []
    for line in shown:
        words = line.removesuffix('...').split()
        starts = [printed.split()[:len(words)] for printed in text.splitlines()]
        if not any(len(s) == len(words) and all(map(is_close, words, s)) for s in starts):
            missing.append(line)
    return missing
