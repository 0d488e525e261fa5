"""Claims about docs/: its recipes run, each alone; a day's work prints what the page shows."""

import json
import lzma
import re
import shlex
import socket

import pytest
import tiktoken
import torch
from helpers import ROOT, SHARED, offline

import eval as evaluation
import prepare
import sample
import train
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


# -----------------------------------------------------------------------------
# A day's work, in docs/senses.md.

SCRIPTS = {'prepare.py': prepare, 'train.py': train, 'sample.py': sample, 'eval.py': evaluation}
ARTICLES = SHARED / 'text' / 'enwiki2018.jsonl.xz'
NOUNS = 'doctor teacher nurse king queen soldier secretary servant actor singer'.split()
ABOUT_THE_TEXT = {'mine', '--dataset=mine', 'out/mine'}  # commands whose numbers depend on it


def day() -> list[tuple[list[str], list[str]]]:
    """The commands, split as a shell does, each with the lines that the page shows."""
    text = (ROOT / 'docs' / 'senses.md').read_text(encoding='utf-8')
    block = re.search(r"^## A day's work$.*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    steps = []
    for part in block.replace('\\\n', '').split('$ python ')[1:]:
        command, *shown = part.splitlines()
        steps.append((shlex.split(command), shown))
    return steps


def is_close(shown: str, printed: str) -> bool:
    """Two words are equal, or two numbers nearly so."""
    try:
        return float(shown) == pytest.approx(float(printed), rel=0.02, abs=0.003)
    except ValueError:
        return shown == printed


def is_printed(shown: str, text: str) -> bool:
    """A line of the text begins with what is shown, but for rounding."""
    words = shown.removesuffix('...').split()
    for line in text.splitlines():
        printed = line.split()[:len(words)]
        if len(printed) == len(words) and all(map(is_close, words, printed)):
            return True
    return False


@pytest.mark.slow
def test_a_days_work_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    """Ten commands, on a text like the page's where there is one, else on any other."""
    text = 'The nurse and the doctor work in a hospital near the river. They like it.\n\n' * 900
    if ARTICLES.exists():
        text = ''
        with lzma.open(ARTICLES, 'rt', encoding='utf-8') as lines:
            while len(text) <= 90_000:
                text += json.loads(next(lines))['text'].strip() + '\n\n'
    (tmp_path / 'mine.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'nouns.txt').write_text('\n'.join(NOUNS), encoding='utf-8')
    steps = day()
    assert len(steps) == 10
    for (script, *argv), shown in steps:
        capsys.readouterr()
        SCRIPTS[script].main(argv)
        printed = capsys.readouterr().out
        if ARTICLES.exists() or not ABOUT_THE_TEXT & set(argv):
            missing = [line for line in shown if not is_printed(line, printed)]
            assert missing == [], printed
