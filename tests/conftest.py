"""What several tests share: a toy model, trained once; tiny runs; how a script is called."""

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
from rucksack import toy as toy_py

ROOT = Path(__file__).parent.parent
VOCABULARY = ROOT.parent / 'shared' / 'data' / 'tiktoken'
if VOCABULARY.is_dir():
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(VOCABULARY))


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
    assert stop.value.code == 2 and text.count('\n') == 1 and text.startswith(f'{script.__name__}.py: ')
    assert shown.count('\n') <= printed
    return text


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    """A folder with data/toy and out/toy: config/train_toy.py in fewer steps, steps x weight decay as there.

    TOY_SEED and TOY_STEPS in the environment change it.
    """
    folder, before = tmp_path_factory.mktemp('toy'), Path.cwd()
    seed = int(os.environ.get('TOY_SEED', 1337))
    steps = int(os.environ.get('TOY_STEPS', 1600))
    os.chdir(folder)
    try:
        prepare.main(['toy'])
        train.main([str(ROOT / 'config' / 'train_toy.py'), f'--seed={seed}', f'--max_iters={steps}',
                    f'--weight_decay={1200 / steps}', '--device=cpu'])
    finally:
        os.chdir(before)
    return folder


# -----------------------------------------------------------------------------
# Tiny runs.

SMALL = ['--dataset=tiny', '--n_layer=2', '--n_head=2', '--n_embd=16', '--n_sense=4', '--block_size=8',
         '--batch_size=4', '--warmup_iters=2', '--eval_iters=2', '--log_interval=1', '--device=cpu',
         '--out_dir=out/run', '--lr_decay_iters=20', '--learning_rate=0.01']


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with data/tiny, 40 of 257 words, 800 training tokens; the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    make_data(np.random.default_rng(0).integers(0, 40, 800), np.random.default_rng(1).integers(0, 40, 200))
    return tmp_path


def make_data(train_ids, val_ids, **changes) -> None:
    """Write data/tiny as prepare.py would."""
    folder = Path('data/tiny')
    folder.mkdir(parents=True, exist_ok=True)
    meta = {'tokenizer': toy_py.toy_tokenizer(['']), 'vocab_size': 257, 'dtype': 'uint16', 'tokens': {},
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
        return [{k: v for k, v in row.items() if k not in ('tokens_per_second', 'seconds_left')}
                for row in csv.DictReader(file)]


def same(a: dict, b: dict) -> None:
    """Two nested states are equal bit for bit."""
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            same(a[key], b[key])
        else:
            assert torch.equal(a[key], b[key]) if torch.is_tensor(a[key]) else a[key] == b[key], key
