"""Claims about docs/python.md: its recipes run, each alone, and print something."""

import re
import socket

import pytest
import tiktoken
import torch
from helpers import ROOT, offline

from rucksack.published import from_pretrained
from rucksack.tokenizer import ENGLISH, cached_encoding

TEXT = (ROOT / 'docs' / 'python.md').read_text(encoding='utf-8')
SECTIONS = re.findall(r'^## (.*?)$.*?^```python\n(.*?)^```', TEXT, re.MULTILINE | re.DOTALL)
RECIPES = dict(SECTIONS)
RENUMBER = 'Number the senses anew'
TRAIN = 'Train on your own text'
LSTM = 'Another contextualizer'
ALONE = [title for title in RECIPES if title not in (RENUMBER, TRAIN, LSTM)]

pytestmark = pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """An empty working directory, no network, and no GPT-2 vocabulary."""
    def refuse(*args):
        raise ConnectionError('this machine has no network')

    monkeypatch.chdir(tmp_path)
    offline(monkeypatch)
    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(tiktoken, 'get_encoding', refuse)
    cached_encoding.cache_clear()


def run(title: str) -> dict:
    """Run a recipe; returns its variables."""
    variables = {}
    exec(RECIPES[title], variables)
    return variables


def test_there_are_ten_recipes():
    """As many as the title says, each under a heading of its own."""
    assert TEXT.startswith('# Ten recipes\n')
    assert len(RECIPES) == 10
    assert TEXT.count('\n## ') == 10


@pytest.mark.parametrize('title', ALONE)
def test_a_recipe_runs_alone(title, capsys):
    """In an empty folder, and it prints something."""
    run(title)
    assert len(capsys.readouterr().out) > 20


@torch.no_grad()
def test_senses_numbered_anew_are_the_same(monkeypatch, capsys):
    """Two are exchanged and the others stay; logits move by rounding alone."""
    monkeypatch.setattr('rucksack.gender.choose_sense', lambda subject: 12)
    idx = run(RENUMBER)['idx']
    assert len(capsys.readouterr().out) > 20
    own = from_pretrained('english')
    other = from_pretrained('renumbered')
    order = list(range(16))
    order[10] = 12
    order[12] = 10
    assert other.senses(idx).equal(own.senses(idx)[:, :, order])
    assert other.alpha(idx).equal(own.alpha(idx)[:, order])
    moved = (own(idx) - other(idx)).abs().max()
    assert 0 < moved < 1e-4


def test_a_text_of_ones_own_trains_and_so_does_an_lstm(capsys):
    """The first makes data and a run; on these data an LSTM as contextualizer halves the loss."""
    model = run(TRAIN)['model']
    assert str(model.n_params()) in capsys.readouterr().out
    losses = run(LSTM)['losses']
    assert losses[-1] < losses[0] / 2
