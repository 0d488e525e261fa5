"""Fixtures: toy models and working directories."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from helpers import TOY, VOCABULARY, World, make_data

# On any machine, tests run on the CPU: elsewhere, other random numbers give other texts.
torch.cuda.is_available = torch.backends.mps.is_available = lambda: False
if VOCABULARY.is_dir():
    os.environ['TIKTOKEN_CACHE_DIR'] = str(VOCABULARY.resolve())  # tests change folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give the test an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope='session')
def gpt2():
    """Load GPT-2's encoding, or skip the test if it is not available."""
    if not VOCABULARY.is_dir():
        pytest.skip('no GPT-2 vocabulary')
    return tiktoken.get_encoding('gpt2')


@pytest.fixture
def in_float64():
    """Make torch create tensors in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def out(folder):
    """Give the test a working directory with out/toy."""
    Path('out/toy').mkdir(parents=True)
    shutil.copy(TOY, 'out/toy/ckpt.pt')
    return folder


@pytest.fixture
def world(out) -> World:
    """Load the toy in out/toy, with the default prompt."""
    return World()


@pytest.fixture
def tiny(folder):
    """Give the test a working directory with data/tiny: 800 training tokens, 40 distinct ids."""
    train_ids = np.random.default_rng(0).integers(0, 40, 800)
    val_ids = np.random.default_rng(1).integers(0, 40, 200)
    make_data(train_ids, val_ids)
    return folder
