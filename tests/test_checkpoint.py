"""Claims about checkpoints: kills, full disks, damage and foreign files lose no state."""

import errno
import itertools
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    RUN,
    assert_same_run,
    at_change,
    checkpoint,
    error_of,
    finish,
    posix,
    start,
)

from rucksack import run as run_folder
from rucksack import sample, train
from rucksack.data import data_id, read_meta
from rucksack.errors import UserError
from rucksack.loaded import load_model
from rucksack.paper.loss import loss_rows
from rucksack.tokenizer import ENGLISH

RESUME = [*RUN, '--init_from=resume']
CKPT = Path('out/run/ckpt.pt')


def finish_run(run: list[str]) -> None:
    """Resume a killed run, or start it again; assert that it ends like the one in out/whole."""
    code = finish(start(*run, '--init_from=resume'))
    if code != 0:
        assert code == 2
        assert not CKPT.exists()
        assert finish(start(*run, '--overwrite')) == 0
    assert sorted(os.listdir('out/run')) == sorted(os.listdir('out/whole'))
    assert_same_run('out/whole', 'out/run')


@posix
@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.01, 0.2])  # every evaluation is a new best, or only the first
def test_a_run_killed_before_any_change_ends_in_the_same_bits(rate, tiny):
    """A run killed before any open, rename or removal resumes and ends in the same bits."""
    run = [*RUN, f'--learning_rate={rate}']
    assert finish(start(*run, '--out_dir=out/whole')) == 0
    for n in itertools.count(1):
        die = partial(at_change, n, partial(signal.raise_signal, signal.SIGKILL))
        code = finish(start(*run, prepared=die))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        finish_run(run)
        shutil.rmtree('out/run')
    assert n > 20


@posix
@pytest.mark.parametrize('change', [9, 13])
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_run_after_a_signal_saves_its_step_and_goes_on(number, change, tiny):
    """The exit code gives the signal, and the resumed run has the same bits and evaluations."""
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    interrupt = partial(at_change, change, partial(signal.raise_signal, number))
    assert finish(start(*RUN, prepared=interrupt)) == 128 + number
    said = Path('said.txt').read_text().splitlines()[-1]
    assert f'step {checkpoint()["step"]}; ' in said
    assert '--init_from=resume --out_dir=out/run' in said
    finish_run(RUN)


@pytest.mark.parametrize('data', [None, 'tiny', 'data/tiny', 'data/tiny/val.bin'])
def test_texts_that_may_have_been_read_in_training_are_refused(data, tiny):
    """Data that has changed since training is refused, even by name: its split may be another."""
    train.main(RUN)
    loaded = load_model('out/run', 'cpu')
    assert loaded.data_id == data_id(read_meta(Path('data/tiny')))
    loss_rows(loaded, data)
    for name in ('tiny', str(Path('data/tiny').resolve())):  # --dataset may be a path
        with pytest.raises(UserError, match='changed'):
            loss_rows(replace(loaded, dataset=name, data_id='another'), data)


def test_a_checkpoint_names_no_text_as_its_held_out_data(tiny):
    """Without --data, only the val.bin of a data folder is scored, not any file."""
    Path('mine.txt').write_text('A text that nobody named.')
    loaded = load_model('english', 'cpu')
    with pytest.raises(UserError, match='mine.txt'):
        loss_rows(replace(loaded, dataset=str(Path('mine.txt').resolve())), None)


def test_which_of_two_runs_is_resumed_must_be_said(folder, capsys):
    """out/m and its Transformer out/m_gpt are not guessed at, and --model says which."""
    Path('out/m_gpt').mkdir(parents=True)
    resume = ['--init_from=resume', '--dataset=m']
    assert 'out/m_gpt' in error_of(train, capsys, *resume)
    assert 'out/m/ckpt.pt' in error_of(train, capsys, *resume, '--model=backpack')


@posix
@pytest.mark.parametrize('share', [0.4, 0.99])
def test_a_checkpoint_cut_by_a_full_disk_leaves_the_last_one(share, tiny):
    """If its second checkpoint fills the disk, a run stops; resumed, it ends in the same bits."""
    import resource  # Windows has none
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    size = int(Path('out/whole/ckpt.pt').stat().st_size * share)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    assert finish(start(*RUN, prepared=full)) in (1, 2)
    assert checkpoint()['step'] == 0
    assert os.strerror(errno.EFBIG) in Path('said.txt').read_text()
    assert not list(Path('out/run').glob('*.partial'))
    finish_run(RUN)


def test_a_run_locks_its_folder_before_it_looks_into_it(tiny, capsys, monkeypatch):
    """A second run that starts in the same folder is refused and overwrites nothing."""
    real = run_folder.refuse_to_replace

    def refuse_to_replace(folder):
        monkeypatch.setattr(run_folder, 'refuse_to_replace', real)
        assert 'out/run' in error_of(train, capsys, *RUN)
        real(folder)

    monkeypatch.setattr(run_folder, 'refuse_to_replace', refuse_to_replace)
    train.main(RUN)
    assert checkpoint()['step'] == 6


@pytest.mark.parametrize('name', ['ckpt.pt', 'best.pt', 'log.csv'])
def test_a_run_is_not_replaced_without_overwrite(name, tiny, capsys):
    """Weights in the folder, or a log that no run wrote, are kept and named in the error."""
    path = Path('out/run', name)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'mine')
    assert str(path) in error_of(train, capsys, *RUN)
    assert os.listdir('out/run') == [name]
    assert path.read_bytes() == b'mine'


def test_overwrite_keeps_checkpoints_until_the_new_run_has_saved(tiny):
    """If the new run's first loss is not finite, all old checkpoints and the log stay."""
    train.main(RUN)
    before = {path.name: path.read_bytes() for path in Path('out/run').iterdir()}
    state = checkpoint()
    state['model']['wte.weight'].fill_(1e30)
    torch.save(state, 'huge.pt')
    with pytest.raises(SystemExit, match='1'):
        train.main([*RUN, '--overwrite', '--init_from=huge.pt'])
    assert before == {path.name: path.read_bytes() for path in Path('out/run').iterdir()}


def test_overwrite_replaces_the_files_of_a_run_alone(tiny):
    """A person's own files in the folder stay."""
    train.main(RUN)
    mine = ['ckpt-3.pt', 'notes.txt']
    for name in mine:
        Path('out/run', name).touch()
    train.main([*RUN, '--overwrite'])
    assert sorted(os.listdir('out/run')) == sorted(['best.pt', 'ckpt.pt', 'log.csv', *mine])


def test_a_run_with_an_old_setting_is_resumed(tiny):
    """A checkpoint may name keep_every, which is gone: it changed no bits."""
    train.main(RUN)
    state = checkpoint()
    state['settings']['keep_every'] = 3
    torch.save(state, 'out/run/ckpt.pt')
    train.main([*RUN, '--init_from=resume', '--max_iters=8'])
    assert checkpoint()['step'] == 8


@pytest.mark.parametrize('damage', ['cut short', 'one bit', 'a weight less'])
def test_a_damaged_checkpoint_is_refused_by_name(damage, tiny, capsys):
    """A checkpoint that is cut short, has one flipped bit or lacks a weight gives one line."""
    train.main([*RUN, '--max_iters=0'])
    state = checkpoint()
    content = bytearray(CKPT.read_bytes())
    if damage == 'cut short':
        CKPT.write_bytes(content[:-1000])
    if damage == 'one bit':
        weight = state['model']['wte.weight'].numpy().tobytes()
        content[content.index(weight)] ^= 1
        CKPT.write_bytes(content)
    if damage == 'a weight less':
        del state['model']['contextualizer.ln_f.weight']
        torch.save(state, CKPT)
    assert str(CKPT) in error_of(sample, capsys, '--from=out/run')


class Evil:
    """An object that writes a file when it is unpickled."""

    def __reduce__(self):
        return open, ('marker', 'w')


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('source, file', [
    ('out/bad', 'out/bad/ckpt.pt'), ('published', 'published/pytorch_model.bin')])
def test_no_pickle_runs_wherever_it_is_put(source, file, zipped, tiny, capsys):
    """A pickle in a checkpoint or published weights is never run, in either torch.save format."""
    shutil.copytree(ROOT / 'tests/fixtures/backpack-gpt2-tiny', 'published')
    shutil.copy(ENGLISH / 'tokenizer.json', 'published')
    Path('out/bad').mkdir(parents=True)
    torch.save({'model': Evil()}, file, _use_new_zipfile_serialization=zipped)
    commands = [(train, [*RUN, f'--init_from={source}']), (sample, [f'--from={source}'])]
    if source == 'out/bad':
        commands += [(train, [*RESUME, '--out_dir=out/bad']), (sample, [])]  # the newest run
    for script, flags in commands:
        error = error_of(script, capsys, *flags)
        assert file in error
        assert 'weights_only' not in error  # torch's advice to run what is in the file
    assert not Path('marker').exists()
    torch.load(file, weights_only=False)
    assert Path('marker').exists()  # the bait works where pickles are run
