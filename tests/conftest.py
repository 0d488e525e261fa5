"""Fixtures: toy models and working directories."""

import os
import shutil

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, make_data, train_toy
from make_toy import FIXTURE

torch.backends.mps.is_available = lambda: False  # on a Mac, too, tests run on the CPU
if VOCABULARY.is_dir():
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(VOCABULARY))


@pytest.fixture(autouse=True, scope='session')
def without_accelerators():
    """Make the CPU the automatic device: elsewhere, other random numbers give other texts."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in (torch.cuda, torch.backends.mps):
            patch.setattr(backend, 'is_available', lambda: False)
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give the test an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    """Make a folder with a briefly trained toy in out/toy, for tests that any model can pass."""
    folder = tmp_path_factory.mktemp('toy')
    (folder / 'out' / 'toy').mkdir(parents=True)
    shutil.copy(FIXTURE, folder / 'out' / 'toy' / 'ckpt.pt')
    return folder


@pytest.fixture(scope='session')
def trained_toy(tmp_path_factory):
    """Train the toy with config/train_toy.py; TOY_SEED and TOY_STEPS override seed and steps."""
    return train_toy(tmp_path_factory.mktemp('trained'), int(os.environ.get('TOY_STEPS', 3000)))


@pytest.fixture
def in_float64():
    """Make torch create tensors in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def out(toy, folder):
    """Give the test a working directory with out/toy."""
    shutil.copytree(toy / 'out', 'out')
    return folder


@pytest.fixture
def tiny(folder):
    """Give the test a working directory with data/tiny: 800 training tokens, 40 distinct ids."""
    train_ids = np.random.default_rng(0).integers(0, 40, 800)
    val_ids = np.random.default_rng(1).integers(0, 40, 200)
    make_data(train_ids, val_ids)
    return folder
