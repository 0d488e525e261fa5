"""What several tests share: a toy model, trained once a run; tiny data; how a script is called."""

import csv
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
import train
from rucksack.toy import toy_tokenizer

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / 'shared' / 'data'  # real data, where it is at hand
VOCABULARY = SHARED / 'tiktoken'
if VOCABULARY.is_dir():
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(VOCABULARY))

# Settings of a tiny run, on data/tiny.
SMALL = ['--dataset=tiny', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_sense=4', '--block_size=8',
         '--batch_size=4', '--warmup_iters=2', '--eval_iters=2', '--log_interval=1', '--device=cpu',
         '--compile=False', '--dtype=float32', '--out_dir=out/run', '--lr_decay_iters=20',
         '--learning_rate=0.01']


def say(script, capsys, *argv: str) -> str:
    """What a script prints, on the CPU."""
    capsys.readouterr()
    script.main([*argv, '--device', 'cpu'])
    return capsys.readouterr().out


def error_of(script, capsys, *argv: str, printed: int = 99) -> str:
    """What a script says on standard error, in one line, as it leaves with exit code 2; at most so many lines
    are on standard output by then."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(list(argv))
    shown, text = capsys.readouterr()
    assert stop.value.code == 2 and text.count('\n') == 1 and text.startswith(f'{script.__name__}.py: '), text
    assert shown.count('\n') <= printed
    return text


def train_toy(folder: Path, steps: int) -> Path:
    """A folder with data/toy and out/toy: config/train_toy.py in so many steps, steps x decay as there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare.main(['toy'])
        train.main([str(ROOT / 'config' / 'train_toy.py'), f'--seed={os.environ.get("TOY_SEED", 1337)}',
                    f'--max_iters={steps}', f'--weight_decay={855 / steps}', '--eval_interval=10000',
                    '--device=cpu'])
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    """A toy model that has learned a little, for tests of what one can do with any model."""
    return train_toy(tmp_path_factory.mktemp('toy'), 400)


@pytest.fixture(scope='session')
def trained_toy(tmp_path_factory):
    """The toy model as config/train_toy.py trains it; TOY_SEED and TOY_STEPS in the environment change it."""
    return train_toy(tmp_path_factory.mktemp('trained'), int(os.environ.get('TOY_STEPS', 1900)))


@pytest.fixture
def out(toy, tmp_path, monkeypatch):
    """The working directory of the test, with out/toy."""
    monkeypatch.chdir(tmp_path)
    Path('out').mkdir()
    Path('out/toy').symlink_to(toy / 'out' / 'toy')
    return tmp_path


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The working directory of the test, with data/tiny: 800 training tokens, 40 distinct ids of 257."""
    monkeypatch.chdir(tmp_path)
    make_data(np.random.default_rng(0).integers(0, 40, 800), np.random.default_rng(1).integers(0, 40, 200))
    return tmp_path


def make_data(train_ids, val_ids, **changes) -> None:
    """Write data/tiny as prepare.py would."""
    folder = Path('data/tiny')
    folder.mkdir(parents=True, exist_ok=True)
    meta = {'tokenizer': toy_tokenizer(['']), 'vocab_size': 257, 'dtype': 'uint16', 'tokens': {},
            'sha256': {}}
    for name, ids in (('train', train_ids), ('val', val_ids)):
        data = np.asarray(ids, dtype='<u2').tobytes()
        (folder / f'{name}.bin').write_bytes(data)
        meta['tokens'][name], meta['sha256'][name] = len(ids), hashlib.sha256(data).hexdigest()
    (folder / 'meta.json').write_text(json.dumps({**meta, **changes}))


def checkpoint(folder: str = 'out/run') -> dict:
    """The latest state of a run."""
    return torch.load(Path(folder) / 'ckpt.pt', weights_only=True)


def log(folder: str = 'out/run') -> list[dict]:
    """The rows of a run's log, without the clock."""
    with open(Path(folder) / 'log.csv', newline='') as file:
        return [{k: v for k, v in row.items() if k not in ('tokens_per_second', 'seconds')}
                for row in csv.DictReader(file)]


def same(a: dict, b: dict) -> None:
    """Two nested states are equal bit for bit."""
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            same(a[key], b[key])
        else:
            assert torch.equal(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key], key
