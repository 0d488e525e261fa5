"""Claims about user errors: one line, exit code 2, and nothing half-written."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, SMALL, error_of, offline, say

from rucksack import edit, prepare, sample, train
from rucksack import eval as evaluation
from rucksack.page import PAGE_BEGINS

SCRIPTS = {'train': train, 'sample': sample, 'prepare': prepare, 'eval': evaluation}

# The script, its arguments as typed, the fact that the line must name, and the fixture of the
# working directory: tiny has data/tiny, out has the toy in out/toy.
ROWS = [
    ('train', '--n_layr=3', 'n_layer', 'tiny'), ('train', '--learning_rate=nan', 'nan', 'tiny'),
    ('train', '--compile=yes', 'yes', 'tiny'), ('train', '--n_embd=18', '18', 'tiny'),
    ('train', '--dataset=none', 'data/none', 'tiny'),
    ('train', '--dataset=../data/tiny', '../data/tiny', 'tiny'),
    ('train', '--block_size=300', 'block_size', 'tiny'),
    ('train', '--init_from=resume', 'out/run/ckpt.pt', 'tiny'),
    ('train', '--device=abacus', 'abacus', 'tiny'), ('train', '--device=xpu', 'XPU', 'tiny'),
    ('train', 'config/none.py', 'config/none.py', 'tiny'), ('train', '--n_sense=0', "'0'", 'tiny'),
    ('train', '--n_layer=2000000', '2000000', 'tiny'),
    ('train', '--model=gpt --loaded_lr=0', 'loaded_lr', 'tiny'),  # without senses, nothing learns
    ('train', '--loaded_lr=0', 'loaded_lr', 'tiny'),  # nothing is loaded
    ('train', '--n_embd=2147483648', 'memory', 'tiny'),
    ('train', '--init_from=english', 'english', 'tiny'),
    ('train', '--out_dir=out/toy', 'out/toy/ckpt.pt', 'out'),
    ('train', '--init_from=resume --out_dir=out/toy', '--init_from=out/toy/ckpt.pt', 'out'),
    ('sample', '--senses-off nurse:16', '16', 'out'), ('sample', '--edit nurse', "'nurse'", 'out'),
    ('sample', '--edit Wii:HP->Xerox', "'Xerox'", 'out'),
    ('sample', '--edit zebra:1', "'zebra'", 'out'),
    ('sample', '--edit @none.txt', '@none.txt', 'out'),
    ('sample', '--from out/tou', 'out/tou', 'out'),
    ('sample', '--from exports/my_modle', 'no folder exports/my_modle', 'out'),
    ('sample', '--from english_gpt --show nurse', 'english_gpt', 'out'),
    ('sample', '--temperature -1', "'-1'", 'out'), ('sample', "--probs ''", "''", 'out'),
    ('sample', "--words ''", "''", 'out'), ('sample', '--csv x.csv', '--csv', 'out'),
    ('sample', '--words a,b --find she+he', '--words', 'out'),
    ('sample', '--start {} --words a,b --html x.html', '--html', 'out'),
    ('sample', '--show @words.txt', '@words.txt', 'out'), ('sample', '--show *:3', "'*:3'", 'out'),
    ('sample', '--show nurse:1=2', "'nurse:1=2'", 'out'), ('sample', '--export .', 'new', 'out'),
    ('sample', '--export x --show nurse', '--export', 'out'),
    ('sample', '--export out/toy', 'out/toy', 'out'), ('sample', '--find a,b/c', "'a'", 'out'),
    ('sample', '--html none/x.html', 'none/x.html', 'out'),
    ('sample', '--html out/toy/ckpt.pt', 'out/toy/ckpt.pt', 'out'),
    ('sample', '--probs she --csv out/toy', 'out/toy', 'out'),
    ('eval', 'loss --data nowhere', 'nowhere', 'out'),
    ('eval', 'loss --data out', 'out/val.bin; choose a text', 'out'),
    ('eval', 'loss --edit "topic music"', 'topic', 'out'),
    ('eval', 'gender --baseline out/toy', 'out/toy', 'out'),
    ('eval', 'loss --csv no/x.csv', 'no/x.csv', 'out'),
    ('eval', 'loss out/toy --from out/toy', '--from', 'out'),
    ('eval', 'gender --from english_gpt --edit nurse:10', '--edit', 'out'),
    ('eval', 'similarity --data .', '--data', 'out'), ('eval', 'blimp', 'toy', 'out'),
    ('prepare', 'stories', '--text', 'tiny'),
    ('prepare', '../x --text data/tiny/meta.json', '../x', 'tiny'),
    ('prepare', 'x --text none.txt', 'none.txt', 'tiny'),
    ('prepare', 'x --text data/tiny/val.bin --merges 300', 'val.bin', 'tiny'),
    ('prepare', 'x --text data/tiny/meta.json --merges 300',
     'prepare.py: data/tiny/meta.json: no row', 'tiny'),
    ('prepare', 'x --merges 300 --text data/tiny/meta.json --val data/tiny/meta.json',
     '1 already read', 'tiny'),
    ('prepare', 'toy --merges 300', '--merges', 'tiny'),
    ('prepare', 'openwebtext --merges 300', 'OpenWebText', 'tiny'),
    ('prepare', 'x --hub stories --merges 300', 'stories', 'tiny')]


@pytest.mark.parametrize('script, arguments, fact, fixture', ROWS)
def test_a_bad_command_is_one_line(script, arguments, fact, fixture, request, monkeypatch, capsys):
    """The error line names what cannot be used, and no file is written."""
    offline(monkeypatch)
    request.getfixturevalue(fixture)
    before = sorted(Path().rglob('*'))
    common = SMALL if script == 'train' else []
    assert fact in error_of(SCRIPTS[script], capsys, *common, *shlex.split(arguments))
    assert sorted(Path().rglob('*')) == before


@pytest.mark.parametrize('script', ['prepare', 'train', 'sample', 'edit', 'eval'])
def test_ctrl_c_while_torch_is_imported_prints_nothing(script, folder, monkeypatch):
    """The script ends by the signal; a module that sends it stands in for torch."""
    Path('torch.py').write_text('import signal\nsignal.raise_signal(signal.SIGINT)\n')
    monkeypatch.setenv('PYTHONPATH', str(folder))
    ended = subprocess.run([sys.executable, ROOT / f'{script}.py'], capture_output=True)
    assert ended.stderr == b''
    assert ended.returncode == -signal.SIGINT


@pytest.mark.parametrize('flags, ours', [
    ('--probs she --csv', '"rucksack_table","word"\n'), ('--probs she --csv', '"rucksack_table"\n'),
    ('--html', PAGE_BEGINS), ('--html', '')])
def test_a_file_of_ours_may_be_replaced(flags, ours, out, capsys):
    """Our own file is replaced, even one without rows or content."""
    Path('x').write_text(ours)
    say(sample, capsys, *flags.split(), 'x')
    assert Path('x').read_text() != ours


@pytest.mark.parametrize('flags, mine', [
    ('--html', '<!DOCTYPE html>\n<!-- saved from url=(0014)about:internet -->\n'),
    ('--probs she --csv', 'table,word\n')])
def test_a_file_of_ones_own_is_not_replaced(flags, mine, out, capsys):
    """A person's file is kept even if it begins almost like one of ours."""
    Path('mine').write_text(mine)
    assert 'mine' in error_of(sample, capsys, *flags.split(), 'mine')
    assert Path('mine').read_text() == mine


@pytest.mark.parametrize('flag, value', [
    ('--words', ['~/y', '~/z']), ('--edit', ['~/nurse:10']), ('--probs', ['~/he'])])
def test_a_tilde_in_words_stays(flag, value):
    """Words, edits and lists are no paths."""
    flags = sample.make_parser().parse_args([f'{flag}={",".join(value)}'])
    assert value in vars(flags).values()


@pytest.mark.parametrize('script, flags, name', [
    (sample, ['--probs=she', '--csv'], 'x.csv'), (edit, ['wishes.txt', '--out'], 'x.safetensors')])
def test_a_file_in_the_way_of_a_temporary_one_stays(script, flags, name, folder, capsys):
    """A person's own x.csv.partial stays, although writing x.csv would use that name."""
    Path(f'{name}.partial').write_text('mine')
    assert f'{name}.partial' in error_of(script, capsys, *flags, name)
    assert Path(f'{name}.partial').read_text() == 'mine'
