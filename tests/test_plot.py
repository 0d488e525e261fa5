"""Claims about rucksack/plot.py: lines go where the numbers are."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import error_of, save, toy_subject

import eval as tables
from rucksack.plot import plot

NAME = 'a <b>&"'  # of a folder
NAMES = [f'Backpack {NAME}', 'Transformer gpt']


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The working directory of the test, with the logs of a Backpack and of a Transformer."""
    monkeypatch.chdir(tmp_path)
    logs = {NAME: ['0,,6.7', '64,4.5,', '128,3.5,4.1'], 'gpt': ['64,4,5.5', '300,,2.9', '500,,3.0']}
    for folder, n_sense in ((NAME, 4), ('gpt', 0)):
        save(folder, toy_subject(n_sense).model, {})
        log = '\n'.join(['tokens,loss,val_loss', *logs[folder]])
        Path(folder, 'log.csv').write_text(f'{log}\n')


@pytest.fixture
def axes(runs, monkeypatch):
    """What is drawn of both runs into loss.svg."""
    pyplot = pytest.importorskip('matplotlib.pyplot')
    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, 'close', figures.append)
        plot([NAME, 'gpt'], Path('loss.svg'))
    figure, = figures
    yield figure.axes[0]
    pyplot.close(figure)


def test_losses_are_drawn_where_the_log_has_them(axes):
    """Lines go through (million tokens, held-out loss); the scale of losses is logarithmic."""
    ours, other = axes.lines
    assert list(ours.get_xdata()) == [0, 128 / 1e6]
    assert list(ours.get_ydata()) == [6.7, 4.1]
    assert list(other.get_xdata()) == [64 / 1e6, 300 / 1e6, 500 / 1e6]
    assert list(other.get_ydata()) == [5.5, 2.9, 3.0]
    assert axes.get_xscale() == 'linear'
    assert axes.get_yscale() == 'log'


def test_lines_are_named_and_a_transformer_is_dashed(axes):
    """The legend has the kind of each model and its folder, whatever characters are in it."""
    ours, other = axes.lines
    assert [text.get_text() for text in axes.get_legend().get_texts()] == NAMES
    assert ours.get_linestyle() == '-'
    assert other.get_linestyle() == '--'


def test_the_picture_is_a_file_that_needs_nothing_else(axes):
    """It is an SVG whose links are to parts of itself."""
    text = Path('loss.svg').read_text()
    links = re.findall(r'href="(.)|src="(.)|url\((.)', text)
    assert ElementTree.fromstring(text).tag == '{http://www.w3.org/2000/svg}svg'
    assert {''.join(link) for link in links} == {'#'}


def test_the_table_has_the_last_and_the_lowest_loss(runs):
    """Beside a picture, each run has a row: its million tokens, and two losses."""
    pytest.importorskip('matplotlib')
    rows = plot([NAME, 'gpt'], Path('loss.svg')).rows
    assert rows == [[NAMES[0], 128 / 1e6, 4.1, 4.1], [NAMES[1], 500 / 1e6, 3.0, 2.9]]


@pytest.mark.parametrize('folder', ['nowhere', 'gpt', 'unfinished', 'utf16'])
def test_a_run_without_losses_is_refused(folder, runs, capsys):
    """It does not exist, its log is missing, unreadable or without held-out text: no picture."""
    pytest.importorskip('matplotlib')
    Path('gpt/log.csv').unlink()
    save('unfinished', toy_subject().model, {})
    Path('unfinished/log.csv').write_text('tokens,loss,val_loss\n64,4,\n')
    save('utf16', toy_subject().model, {})
    Path('utf16/log.csv').write_text('tokens,loss,val_loss\n64,4,5\n', encoding='utf-16')
    assert folder in error_of(tables, capsys, 'plot', folder, '--out', 'x.svg')
    assert not Path('x.svg').exists()


def test_without_matplotlib_a_line_says_to_install_it(runs, capsys, monkeypatch):
    """Nothing else of eval.py needs it, so it may not be there."""
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    text = error_of(tables, capsys, 'plot', 'gpt', '--out', 'x.svg')
    assert 'pip install matplotlib' in text
    assert not Path('x.svg').exists()
