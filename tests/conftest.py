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
