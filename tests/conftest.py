"""What several tests share: one toy model, trained once."""

import os
from pathlib import Path

import pytest

import prepare
import train

ROOT = Path(__file__).parent.parent
VOCABULARY = ROOT.parent / 'shared' / 'data' / 'tiktoken'
if VOCABULARY.is_dir():
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(VOCABULARY))


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    """A folder with data/toy and out/toy: config/train_toy.py with fewer steps. TOY_SEED and TOY_STEPS
    change it."""
    folder, before = tmp_path_factory.mktemp('toy'), Path.cwd()
    os.chdir(folder)
    try:
        prepare.main(['toy'])
        train.main([str(ROOT / 'config' / 'train_toy.py'), f'--seed={os.environ.get("TOY_SEED", 1337)}',
                    f'--max_iters={os.environ.get("TOY_STEPS", 1200)}', '--device=cpu'])
    finally:
        os.chdir(before)
    return folder
