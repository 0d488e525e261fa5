"""Claims about user errors: one line, exit code 2, and nothing half-written."""

import os
import shlex
from pathlib import Path

import pytest
from helpers import SMALL, error_of, offline

from rucksack import prepare, sample, train
from rucksack.errors import UserError
from rucksack.files import output_path
from rucksack.hub import export
from rucksack.looks import find, probs, show
from rucksack.page import page
from rucksack.paper import eval as tables

# The script, its arguments as typed, the fact that the line must name, and the fixture of the
# working directory: tiny has data/tiny, out has the toy in out/toy.
ROWS = [
    (train, '--n_layr=3', 'n_layer', 'tiny'), (train, '--learning_rate=nan', 'nan', 'tiny'),
    (train, '--dataset=none', 'data/none', 'tiny'), (train, '--model=gtp', 'gtp', 'tiny'),
    (train, '--block_size=300', 'block_size', 'tiny'), (train, '--compile=yes', 'yes', 'tiny'),
    (train, '--init_from=resume', 'out/run/ckpt.pt', 'tiny'),
    (train, 'config/none.py', 'config/none.py', 'tiny'),
    (train, '--n_sense=0', 'n_sense=0', 'tiny'), (train, '--init_from=english', 'english', 'tiny'),
    (sample, '--senses-off nurse:16', '16', 'out'), (sample, '--edit zebra:1', "'zebra'", 'out'),
    (sample, '--from out/tou', 'out/tou', 'out'), (sample, '--strength 2', '--lender', 'out'),
    (show, 'nurse --from english_gpt', 'english_gpt', 'out'), (show, 'nurse:1=2', "'1=2'", 'out'),
    (show, '*:3', "'*:3'", 'out'), (show, 'nurse,guard:3', "'nurse,guard:3'", 'out'),
    (find, 'a,b/c', "'a'", 'out'), (probs, 'she --start nobody --words a', "'nobody'", 'out'),
    (probs, 'she --csv out/toy', 'out/toy', 'out'), (export, 'x --edit nurse:3', '--edit', 'out'),
    (export, 'x', 'GPT-2', 'out'),
    (page, 'none/x.html', 'none/x.html', 'out'), (tables, 'loss --data nowhere', 'nowhere', 'out'),
    (tables, 'loss --data out', 'out/meta.json', 'out'),
    (tables, 'loss --edit "topic music"', 'topic', 'out'),
    (tables, 'gender --from english_gpt --edit nurse:10', '--edit', 'out'),
    (tables, 'similarity --data .', 'SimLex-999.txt', 'out'), (tables, 'blimp', 'toy', 'out'),
    (prepare, 'stories', '--text', 'tiny'), (prepare, 'toy --like english', '--like', 'tiny'),
    (prepare, 'x --text none.txt', 'none.txt', 'tiny'),
    (prepare, 'x --text data/tiny/val.bin --like english', 'val.bin', 'tiny'),
    (prepare, 'x --hub stories --like english', 'stories', 'tiny')]


@pytest.mark.parametrize('script, arguments, fact, fixture', ROWS)
def test_a_bad_command_is_one_line(script, arguments, fact, fixture, request, monkeypatch, capsys):
    """The error line names what cannot be used, and no file is written."""
    offline(monkeypatch)
    request.getfixturevalue(fixture)
    before = sorted(Path().rglob('*'))
    common = SMALL if script is train else []
    assert fact in error_of(script, capsys, *common, *shlex.split(arguments))
    assert sorted(Path().rglob('*')) == before


@pytest.mark.parametrize('verb, flags, ours', [
    (probs, ['she', '--csv', 'x'], '"rucksack_table","word"\n'), (page, ['x'], page.PAGE_BEGINS),
    (page, ['x'], '')])
def test_a_file_of_ours_may_be_replaced(verb, flags, ours, out):
    """Our own file is replaced, even one without rows or content."""
    Path('x').write_text(ours)
    verb.main([*flags, '--from', 'out/toy'])
    assert Path('x').read_text() != ours


@pytest.mark.parametrize('verb, flags, mine', [
    (page, ['mine'], '<!DOCTYPE html>\n<!-- saved from url=(0014)about:internet -->\n'),
    (probs, ['she', '--csv', 'mine'], 'table,word\n')])
def test_a_file_of_ones_own_is_not_replaced(verb, flags, mine, out, capsys):
    """A person's file is kept even if it begins almost like one of ours."""
    Path('mine').write_text(mine)
    assert 'mine' in error_of(verb, capsys, *flags)
    assert Path('mine').read_text() == mine


@pytest.mark.parametrize('path', [os.devnull, '/proc/mine'])
def test_what_cannot_be_written_is_refused_before_the_work(path):
    """A device is not replaced, and a folder that takes no file is found out at once."""
    with pytest.raises((OSError, UserError)):
        output_path('the table', path, 'x')
