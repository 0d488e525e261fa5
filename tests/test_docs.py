"""Claims about README.md and docs/: their code runs, and commands print what is shown."""

import json
import lzma
import re
import runpy
import shlex
import socket
from pathlib import Path
from unittest.mock import Mock

import pandas
import pytest
import tiktoken
import torch
from helpers import ROOT, SHARED, not_printed, offline, posix

from rucksack import sample
from rucksack.__main__ import main
from rucksack.loaded import from_pretrained
from rucksack.table import Table, write_csv

TEXT = (ROOT / 'docs' / 'python.md').read_text(encoding='utf-8')
RECIPES = dict(re.findall(r'^## (.*?)$.*?^```python\n(.*?)^```', TEXT, re.MULTILINE | re.DOTALL))
OTHERS = ('Renumber the senses', 'Train on your own text', 'Another contextualizer', 'Draw losses',
          'Hooks of TransformerLens', 'Trace with nnsight', 'Lend to a model of transformers')
SAID = {
    'Special cases of a Backpack': ('[1.0, 0.0, 1.0, 0.0]', '2.25e-05'),
    'Senses are a table': ('True',), 'Are the senses of a word independent?': ('0.35',)}
ALONE = [title for title in RECIPES if title not in OTHERS]


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """Take away the files, the network and the GPT-2 vocabulary."""
    refuse = Mock(side_effect=ConnectionError)
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch)
    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(tiktoken, 'get_encoding', refuse)


def run(title: str) -> dict:
    """Run a recipe and return its variables."""
    variables = {}
    exec(RECIPES[title], variables)
    return variables


@pytest.mark.parametrize('title', ALONE)
def test_a_recipe_runs_alone(title, capsys):
    """Each recipe runs in an empty folder and prints what the page says, or at least something."""
    run(title)
    printed = capsys.readouterr().out
    assert len(printed) > 20
    assert [said for said in SAID.get(title, ()) if said not in printed] == []


def test_an_edit_is_lent_to_a_model_of_transformers(capsys):
    """The recipe prints the odds before and after the edit, and they differ."""
    pytest.importorskip('transformers')
    run('Lend to a model of transformers')
    before, after, _ = capsys.readouterr().out.splitlines()
    assert before != after


@pytest.mark.parametrize('library, title', [
    ('transformer_lens', 'Hooks of TransformerLens'), ('nnsight', 'Trace with nnsight')])
def test_a_library_of_hooks_has_our_numbers(library, title, capsys):
    """Logits, alpha and C equal ours, and a sense that a hook or trace sets to 0 is turned off."""
    pytest.importorskip(library)
    Path('recipe.py').write_text(RECIPES[title])  # nnsight reads the source of a trace
    runpy.run_path('recipe.py')
    assert capsys.readouterr().out.split() == ['True', 'True', 'True', 'she', '0.132']


@torch.no_grad()
def test_senses_numbered_anew_are_the_same(monkeypatch, capsys):
    """Renumbering swaps two senses and keeps the others; logits differ only by rounding."""
    monkeypatch.setattr('rucksack.paper.gender.choose_sense', lambda loaded: 12)
    idx = run('Renumber the senses')['idx']
    assert len(capsys.readouterr().out) > 20
    own, _ = from_pretrained('english')
    other, _ = from_pretrained('renumbered')
    order = list(range(16))
    order[10] = 12
    order[12] = 10
    assert other.senses(idx).equal(own.senses(idx)[:, :, order])
    assert other.alpha(idx).equal(own.alpha(idx)[:, order])
    moved = (own(idx) - other(idx)).abs().max()
    assert 0 < moved < 1e-4


@posix
def test_losses_are_drawn(tmp_path):
    """In the clone, the recipe plots the logs of the bundled models."""
    pytest.importorskip('matplotlib')
    (tmp_path / 'docs').symlink_to(ROOT / 'docs')
    run('Draw losses')
    assert '</svg>' in (tmp_path / 'loss.svg').read_text()


def test_a_text_of_ones_own_trains_and_so_does_an_lstm(capsys):
    """The recipe makes data and a run; an LSTM contextualizer halves the loss on that data."""
    run('Train on your own text')
    assert 'A backpack' in capsys.readouterr().out
    variables = run('Another contextualizer')
    losses = variables['losses']
    assert losses[-1] < losses[0] / 2
    idx = variables['idx']
    assert torch.equal(variables['again'](idx), variables['model'](idx))


README = (ROOT / 'README.md').read_text(encoding='utf-8')


def anchors(path) -> set[str]:
    """List the anchors of a page's headings, as links spell them."""
    headings = re.findall(r'^#+ (.*)$', path.read_text(encoding='utf-8'), re.MULTILINE)
    return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/**/*.md'), *ROOT.glob('pretrained/**/*.md')])


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Each link leads to a file in this repository, and each anchor to a heading in that file."""
    for link in re.findall(r'\]\((?!https:)([^)]+)\)', page.read_text(encoding='utf-8')):
        path, _, anchor = link.partition('#')
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_python_of_readme_prints_what_it_shows(capsys):
    """README's code runs unchanged and prints the block that follows it."""
    blocks = r'^## In Python\n+```python\n(.*?)^```\n+```\n(.*?)^```'
    code, shown = re.search(blocks, README, re.MULTILINE | re.DOTALL).groups()
    exec(code, {})
    assert not_printed(shown.splitlines(), capsys.readouterr().out) == []


RESULTS = pandas.read_csv(ROOT / 'docs' / 'results.csv', dtype=str, keep_default_na=False)


@pytest.mark.parametrize('result', RESULTS.to_dict('records'), ids=lambda row: row['measure'])
def test_results_of_readme_are_those_of_results_csv(result):
    """README's table shows every number in a row of results.csv, rounded."""
    row, = [line for line in README.splitlines() if line.startswith(f'| {result["measure"]} |')]
    shown = re.findall(r'[\d.]+', row.removeprefix(f'| {result["measure"]} |'))
    for name, value in result.items():
        if name != 'measure' and value:
            rounded = [f'{float(value):.{len(text.partition(".")[2])}f}' for text in shown]
            assert any(text == near for text, near in zip(shown, rounded)), name


@pytest.mark.parametrize('flags', ['--explain she/he', '--senses-off nurse:she/he --seed 4'])
def test_readme_shows_what_is_printed(flags, capsys):
    """The block after each quick-start command shows the tables and texts that it prints."""
    command = f'sample.py --from english {flags}\n'
    shown = README.split(command)[1].split('```\n')[2].splitlines()
    sample.main(['--from', 'english', *flags.split()])
    assert not_printed(shown, capsys.readouterr().out) == []


RESULTS_PAGE = (ROOT / 'docs' / 'results.md').read_text(encoding='utf-8')
AGREES = {  # whether numbers agree with claims of docs/results.md that begin so
    lambda a, b: a < b: (
        'LAMBADA is better', 'WikiText is better', 'BLiMP is worse', 'p(*they*)',
        'the Transformer is more biased', 'topic control grows'),
    lambda a, b: a > b: (
        'one sense is worse', 'a sense beats', 'there, it beats', 'there, the minimum',
        'its best fraction cuts more', 'a forward pass takes longer'),
    lambda a, b: a <= b: ('perplexity is at or below',),
    lambda a, b: a > 1.01 * b: ('16 senses are worse',),
    lambda a: a >= 40: ('removing one sense',),
    lambda a: a <= 10: ("projecting the Transformer's nouns",)}
CLAIMS = RESULTS_PAGE.split('reproduced? |\n')[1].split('\n\n')[0].splitlines()[1:]


@pytest.mark.parametrize('line', CLAIMS, ids=lambda line: line[2:20])
def test_each_word_on_a_claim_follows_from_its_numbers(line):
    """A claim's word is yes or no if all our numbers agree, else mixed; one model is named so."""
    claim, _, *cells, verdict = [cell.strip() for cell in line.strip('|').split('|')]
    agrees, = [agrees for agrees, begins in AGREES.items() if claim.startswith(begins)]
    number = r'(\d[\d,]*(?:\.\d+)?)%?'
    form = number if agrees.__code__.co_argcount == 1 else f'{number}; {number}'
    found = set()
    for cell in cells:
        for match in re.finditer(form, re.sub(r'[\d.]+M tokens', '', cell)):
            found.add(agrees(*(float(text.replace(',', '')) for text in match.groups())))
    words = {(True,): 'yes', (False,): 'no', (False, True): 'mixed'}
    assert verdict.split(',')[0] == words[tuple(sorted(found))]
    assert verdict.endswith('one model') == ('' in cells)


def test_a_csv_is_read_as_it_was_written(tmp_path):
    """The page's call reads tokens as text, even digits and null, and numbers as numbers."""
    text = (ROOT / 'docs' / 'senses.md').read_text(encoding='utf-8')
    call, = re.findall(r'`(pandas\.read_csv\(FILE[^`]*)`', text)
    rows = [[' 1', 0.5], [' 2', 1.0], ['null', 2.5]]
    write_csv(tmp_path / 'a.csv', {'explain': Table('', {'token': repr, 'weight': '.2f'}, rows)})
    frame = eval(call, {'pandas': pandas, 'FILE': tmp_path / 'a.csv'})
    assert frame[['token', 'weight']].to_numpy().tolist() == rows


ARTICLES = SHARED / 'text' / 'enwiki2018.jsonl.xz'
NOUNS = 'doctor teacher nurse king queen soldier secretary servant actor singer'.split()


def day() -> list[tuple[list[str], list[str]]]:
    """List the verbs, split as a shell splits them, each with the lines that the page shows."""
    text = (ROOT / 'docs' / 'senses.md').read_text(encoding='utf-8')
    block = re.search(r"^## A day's work$.*?^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    steps = []
    for part in block.replace('\\\n', '').split('$ python ')[1:]:
        command, *shown = part.splitlines()
        words = command.removeprefix('-m rucksack ').replace('.py', '', 1)
        steps.append((shlex.split(words), shown))
    return steps


@pytest.mark.slow
@pytest.mark.skipif(not ARTICLES.exists(), reason='no articles')
def test_a_days_work_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    """Nine commands run on the page's text, if it is available."""
    text = ''
    with lzma.open(ARTICLES, 'rt', encoding='utf-8') as lines:
        while len(text) <= 90_000:
            text += json.loads(next(lines))['text'].strip() + '\n\n'
    (tmp_path / 'wiki.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'nouns.txt').write_text('\n'.join(NOUNS), encoding='utf-8')
    monkeypatch.setenv('COLUMNS', '110')  # tables are cut to the width of the terminal
    steps = day()
    assert len(steps) == 9
    for command, shown in steps:
        capsys.readouterr()
        main(command)
        printed = capsys.readouterr().out
        assert not_printed(shown, printed) == [], printed
