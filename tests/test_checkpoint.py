"""Claims about checkpoints: kills, full disks, damage and foreign files lose no state."""

import errno
import itertools
import os
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import ROOT, RUN, assert_same_run, at_change, checkpoint, error_of, finish, start

import eval
from rucksack import sample, train
from rucksack.data import data_id, read_meta
from rucksack.errors import UserError
from rucksack.loaded import load_model
from rucksack.paper.likelihood import held_out, loss_table
from rucksack.run_log import out_dir_of
from rucksack.weights import from_pretrained

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


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.01, 0.2])  # every evaluation is a new best, or only the first
def test_a_run_killed_before_any_change_ends_in_the_same_bits(rate, tiny):
    """A run killed before any open, rename or removal resumes and ends in the same bits."""
    run = [*RUN, f'--learning_rate={rate}', '--keep_every=3']
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
    held_out(loaded, data)
    changed = replace(loaded, data_id='another')
    with pytest.raises(UserError, match='changed'):
        held_out(changed, data)
    with pytest.raises(UserError, match='changed'):
        loss_table([loaded, changed], data)


@pytest.mark.parametrize('flags, found, expected', [
    (set(), ['m_gpt'], 'm_gpt'), (set(), ['m'], 'm'), (set(), [], 'm'),
    (set(), ['m', 'm_gpt'], None), ({'model'}, ['m', 'm_gpt'], 'm')])
def test_without_model_the_one_run_that_exists_is_resumed(flags, found, expected, folder):
    """A run that was fine-tuned from a Transformer is in NAME_gpt; two runs are not guessed at."""
    for name in found:
        Path('out', name).mkdir(parents=True)
        Path('out', name, 'ckpt.pt').touch()
    s = train.Settings(init_from='resume', dataset='m')
    if expected:
        assert out_dir_of(s, flags, []) == f'out/{expected}'
    else:
        with pytest.raises(UserError, match='out/m and out/m_gpt'):
            out_dir_of(s, flags, [])


@pytest.mark.parametrize('share', [0.4, 0.99])
def test_a_checkpoint_cut_by_a_full_disk_leaves_the_last_one(share, tiny):
    """If its second checkpoint fills the disk, a run stops; resumed, it ends in the same bits."""
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    size = int(Path('out/whole/ckpt.pt').stat().st_size * share)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    assert finish(start(*RUN, prepared=full)) == 1
    assert checkpoint()['step'] == 0
    last_line = Path('said.txt').read_text().splitlines()[-1]
    for fact in (os.strerror(errno.EFBIG), str(CKPT), 'step 0'):
        assert fact in last_line
    assert not list(Path('out/run').glob('*.partial'))
    finish_run(RUN)


def test_a_run_locks_its_folder_before_it_looks_into_it(tiny, capsys, monkeypatch):
    """A second run that starts in the same folder is refused and overwrites nothing."""
    real = train.refuse_to_replace

    def refuse_to_replace(folder):
        monkeypatch.setattr(train, 'refuse_to_replace', real)
        assert 'out/run' in error_of(train, capsys, *RUN)
        real(folder)

    monkeypatch.setattr(train, 'refuse_to_replace', refuse_to_replace)
    train.main(RUN)
    assert checkpoint()['step'] == 6


@pytest.mark.parametrize('is_there', [False, True])
def test_a_refused_run_leaves_the_folders_there_were(is_there, tiny, capsys):
    """A refused run removes the folders that it made and keeps an empty folder that was there."""
    if is_there:
        Path('out/run').mkdir(parents=True)
    error_of(train, capsys, *RUN, '--init_from=missing.pt')
    assert Path('out/run').exists() == is_there
    assert Path('out').exists() == is_there


@pytest.mark.parametrize('name', ['ckpt.pt', 'best.pt', 'ckpt-3.pt', 'log.csv'])
def test_a_run_is_not_replaced_without_overwrite(name, tiny, capsys):
    """Weights in the folder, or a log that no run wrote, are kept and named in the error."""
    path = Path('out/run', name)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'mine')
    assert str(path) in error_of(train, capsys, *RUN)
    assert os.listdir('out/run') == [name]
    assert path.read_bytes() == b'mine'


def test_overwrite_keeps_checkpoints_until_the_new_run_has_saved(tiny, capsys):
    """If the new run's first loss is not finite, all old checkpoints and the log stay."""
    train.main([*RUN, '--keep_every=3'])
    before = {path.name: path.read_bytes() for path in Path('out/run').iterdir()}
    state = checkpoint()
    state['model']['wte.weight'].fill_(1e30)
    torch.save(state, 'huge.pt')
    with pytest.raises(SystemExit) as stop:
        train.main([*RUN, '--overwrite', '--init_from=huge.pt'])
    assert stop.value.code == 1
    assert 'resume' not in capsys.readouterr().err  # resuming would continue the older run
    assert before == {path.name: path.read_bytes() for path in Path('out/run').iterdir()}


def test_overwrite_removes_the_files_of_a_run_alone(tiny):
    """An older run's weights and half-written files are removed; other files stay."""
    train.main(RUN)
    ours = ['ckpt-3.pt', 'ckpt.pt.partial', 'best.pt.partial']
    mine = ['ckpt-3-mine.pt', 'mine.pt', 'notes.txt', 'ckpt.pt.my_partial']
    for name in ours + mine:
        Path('out/run', name).touch()
    train.main([*RUN, '--overwrite'])
    assert sorted(os.listdir('out/run')) == sorted(['best.pt', 'ckpt.pt', 'log.csv', *mine])


@pytest.mark.parametrize('damage', ['cut short', 'one bit'])
def test_a_damaged_checkpoint_is_refused_by_name(damage, tiny):
    """A checkpoint that was cut short or has one flipped bit gives an error that names the file."""
    train.main([*RUN, '--max_iters=0'])
    content = bytearray(CKPT.read_bytes())
    if damage == 'cut short':
        content = content[:-1000]
    else:
        weight = checkpoint()['model']['wte.weight'].numpy().tobytes()
        content[content.index(weight)] ^= 1
    CKPT.write_bytes(content)
    with pytest.raises(UserError, match=str(CKPT)):
        from_pretrained('out/run')


@pytest.mark.parametrize('script, flags, change', [
    (sample, ['--from=out/run'], {'model': {}}),
    (train, [*RUN, '--init_from=resume'], {'model': {}}),
    (sample, ['--from=out/run'], {'tokenizer': {'name': 'gpt2', 'merges': [1]}}),
    (train, [*RUN, '--init_from=resume'], {'step': 'x'})])
def test_a_checkpoint_with_wrong_contents_is_one_line(script, flags, change, tiny, capsys):
    """If checksums match but a part is wrong, a one-line error names the checkpoint."""
    train.main([*RUN, '--max_iters=0'])
    torch.save(checkpoint() | change, CKPT)
    Path('out/run/log.csv').unlink()
    assert f'.py: {CKPT} cannot be read' in error_of(script, capsys, *flags)


def test_settings_of_another_version_are_one_line(tiny, capsys):
    """A run with an unknown setting cannot be resumed, but its weights can be loaded."""
    train.main([*RUN, '--max_iters=0'])
    state = checkpoint()
    state['settings']['lr_decay_iters'] = 5
    torch.save(state, CKPT)
    assert 'lr_decay_iters' in error_of(train, capsys, *RESUME)


class Evil:
    """An object that writes a file when it is unpickled."""

    def __reduce__(self):
        return open, ('marker', 'w')


@pytest.mark.parametrize('zipped', [True, False])
def test_no_pickle_runs_wherever_it_is_put(zipped, tiny, capsys):
    """A pickle in a checkpoint or published weights is never run, in either torch.save format."""
    train.main([*RUN, '--out_dir=out/good'])
    shutil.copytree(ROOT / 'tests/fixtures/backpack-gpt2-tiny', 'published')
    Path('out/bad').mkdir()
    bad = Path('out/bad/ckpt.pt')
    published = Path('published/pytorch_model.bin')
    for path in (bad, published):
        torch.save({'model': Evil()}, path, _use_new_zipfile_serialization=zipped)
    for source, file in (('out/bad', bad), ('published', published)):
        baseline = ['loss', '--from=out/good', f'--baseline={source}']
        assert str(file) in error_of(train, capsys, *RUN, f'--init_from={source}')
        error = error_of(sample, capsys, f'--from={source}')
        assert str(file) in error
        assert 'weights_only' not in error  # torch's advice to run what is in the file
        assert str(file) in error_of(eval, capsys, *baseline)
    assert str(bad) in error_of(train, capsys, *RESUME, '--out_dir=out/bad')
    assert str(bad) in error_of(sample, capsys)  # the newest run
    assert not Path('marker').exists()
    torch.load(bad, weights_only=False)
    assert Path('marker').exists()  # the bait works where pickles are run


def test_a_moment_of_another_shape_is_refused(tiny, capsys):
    """A moment with the wrong shape is refused, because a fused kernel would write past its end."""
    train.main(RUN)
    state = checkpoint()
    state['optimizers']['AdamW']['state'][0]['exp_avg'] = torch.zeros(())
    torch.save(state, CKPT)
    assert str(CKPT) in error_of(train, capsys, *RESUME)
