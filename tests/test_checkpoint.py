"""Claims about checkpoints: kills, full disks, damage and untrusted files cost no state and run no code."""

import csv
import io
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, checkpoint, error_of, log, same

import eval
import sample
import train
from rucksack.common import UserError, lock_folder
from rucksack.published import from_pretrained

RUN = [*SMALL, '--eval_interval=2', '--max_iters=6', '--dropout=0.2']
RESUME = [*RUN, '--init_from=resume']

# Runs in processes of their own are forked from one that has torch loaded and has never used it.
os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
PROCESSES = multiprocessing.get_context('forkserver')
PROCESSES.set_forkserver_preload(['test_checkpoint', 'torch._dynamo'])


def work(argv: tuple[str, ...], env: dict, prepared, folder: Path, said: str) -> None:
    """In a process of its own: train.py, its output in a file; prepared() comes first."""
    os.chdir(folder)
    os.environ.update(env)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    torch.set_num_threads(1)
    if prepared:
        prepared()
    train.main(list(argv))


def start(*argv: str, env: dict | None = None, prepared=None, folder: Path | None = None, said='said.txt'):
    """Start train.py in a new process."""
    args = argv, env or {}, prepared, folder or Path.cwd(), said
    process = PROCESSES.Process(target=work, args=args)
    process.start()
    return process


def finish(process) -> int:
    """Wait for a process; its exit code, minus the signal if one killed it."""
    process.join(120)
    assert process.exitcode is not None, 'it hangs'
    return process.exitcode


def at_change(n: int, act) -> None:
    """Call act() right before this process changes a file below out/ for the n-th time."""
    count, changes = itertools.count(1), ('os.rename', 'os.remove', 'os.link', 'os.mkdir')

    def hook(event: str, args: tuple) -> None:
        """Count what opens a file to write, links, renames or removes one, or makes a folder."""
        writes = event == 'open' and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in changes) and 'out/' in str(args[0]) and next(count) == n:
            act()

    sys.addaudithook(hook)


def ranks(n: int, *argv: str, folders: list[Path] | None = None) -> list[int]:
    """The exit codes of n processes of one run, started as torchrun does; only the first may change files."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        env = {'WORLD_SIZE': str(n), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(s.getsockname()[1])}
    watch = partial(at_change, 1, partial(os._exit, 77))
    return [finish(process) for process in [
        start(*argv, env=env | {'RANK': str(i), 'LOCAL_RANK': str(i)}, prepared=watch if i else None,
              folder=folders and folders[i], said=f'said{i}.txt') for i in range(n)]]


def assert_same_run(a: str, b: str) -> None:
    """Two runs have the same states, bit for bit, and the same log, without a gap, double or torn line."""
    for name in ('ckpt.pt', 'best.pt'):
        one, two = (torch.load(Path(run, name), weights_only=True) for run in (a, b))
        for key in ('model', 'optimizer'):
            same(one[key], two[key])
        assert all(one[key] == two[key] for key in ('step', 'val_loss', 'best_val_loss', 'data'))
    lines = Path(b, 'log.csv').read_text().splitlines(keepends=True)
    assert log(a) == log(b) and all(line.count(',') == 8 and line.endswith('\n') for line in lines)
    steps = [(int(row[0]), row[4] != '') for row in csv.reader(lines[1:])]
    assert steps == sorted(set(steps))
    assert [step for step, evaluated in steps if not evaluated] == list(range(1, steps[-1][0] + 1))


def finish_run(run: list[str]) -> None:
    """Resume a killed run until it is done; where it has no checkpoint yet, begin it, as the error says."""
    if code := finish(start(*run, '--init_from=resume')):
        assert code == 2 and 'start with python train.py' in Path('said.txt').read_text()
        assert not Path('out/run/ckpt.pt').exists() and finish(start(*run)) == 0
    assert sorted(os.listdir('out/run')) == ['best.pt', 'ckpt.pt', 'log.csv', 'previous.pt']
    assert_same_run('out/whole', 'out/run')


@pytest.mark.slow
def test_a_run_killed_before_any_change_of_a_file_resumes_to_the_same_bits(tiny):
    """For every n: killed right before its n-th open, link, rename or removal, it resumes to the same bits."""
    train.main([*RUN, '--out_dir=out/whole'])
    for n in itertools.count(1):
        die = partial(at_change, n, partial(signal.raise_signal, signal.SIGKILL))
        if (code := finish(start(*RUN, prepared=die))) == 0:
            break
        assert code == -signal.SIGKILL
        finish_run(RUN)
        shutil.rmtree('out/run')
    assert n > 25


@pytest.mark.slow
def test_a_run_killed_25_times_ends_in_the_same_bits(tiny):
    """A chain of 25 kills at random moments, each followed by a resume, changes no bit. KILL_SEED: others."""
    rng, kills = random.Random(os.environ.get('KILL_SEED', '0')), 0
    run = [*SMALL, '--eval_interval=5', '--max_iters=4000', '--dropout=0.2']
    assert finish(start(*run, '--out_dir=out/whole')) == 0
    while kills < 25:
        process = start(*run, *['--init_from=resume'] * Path('out/run/ckpt.pt').exists())
        process.join(rng.uniform(0.2, 2.5))
        process.kill()
        if finish(process) == 0:  # on a fast machine it may be done first: another one
            assert_same_run('out/whole', 'out/run')
            shutil.rmtree('out/run')
        else:
            assert process.exitcode == -signal.SIGKILL, Path('said.txt').read_text()[-1000:]
            kills += 1
    finish_run(run)


@pytest.mark.parametrize('share', [0.4, 0.6, 0.99])
def test_a_checkpoint_that_cannot_be_written_whole_leaves_the_last_one(share, tiny):
    """Where space ends within the second checkpoint a run stops, and resumes from the first to the same bits."""
    train.main([*RUN, '--out_dir=out/whole'])
    size = int(Path('out/whole/ckpt.pt').stat().st_size * share)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    assert finish(start(*RUN, prepared=full)) == 1 and checkpoint()['step'] == 0
    said = Path('said.txt').read_text()
    assert 'File too large; the last good state is out/run/ckpt.pt, of step 0; go on: python' in said
    assert 'Traceback' not in said and not list(Path('out/run').glob('*.partial'))
    finish_run(RUN)


def test_a_run_is_replaced_only_if_asked_for_and_then_as_a_whole(tiny, capsys, monkeypatch):
    """scratch where there is any checkpoint is refused; --overwrite removes them all before its first step."""
    train.main(RUN)
    shutil.copytree('out/run', 'out/rest')
    Path('out/rest/ckpt.pt').unlink()
    assert 'out/run/ckpt.pt exists; go on with --init_from=resume, ' in error_of(train, capsys, *RUN)
    assert 'out/rest/previous.pt exists; ' in error_of(train, capsys, *RUN, '--out_dir=out/rest')
    monkeypatch.setattr(train, 'evaluate', None)  # calling it is an error
    with pytest.raises(TypeError):
        train.main([*RUN, '--overwrite'])
    assert os.listdir('out/run') == ['log.csv']
    assert 'nothing to resume; start with python train.py' in error_of(train, capsys, *RESUME)


def test_two_runs_do_not_share_a_folder(tiny, capsys, monkeypatch):
    """While one trains another is refused in one line; afterwards it is not."""
    def gradients(*args, real=train.gradients):
        assert 'another process trains in out/run; choose' in error_of(train, capsys, *RESUME)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, 'gradients', gradients)
        train.main(RUN)
    train.main(RESUME)
    os.close(lock_folder(Path('out/run'), 'busy'))


def test_a_damaged_checkpoint_is_found_and_the_other_one_offered(tiny, capsys):
    """Cut short, or with a bit turned over that means something, it is named; previous.pt goes on from it."""
    train.main(RUN)
    path, rng, found = Path('out/run/ckpt.pt'), random.Random(0), 0
    raw, state = path.read_bytes(), checkpoint()
    damaged = [raw[:rng.randrange(len(raw))] for _ in range(10)] + [bytearray(raw) for _ in range(40)]
    for content in damaged[10:]:
        content[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    for content in damaged:
        path.unlink()
        path.write_bytes(content)
        try:
            same(dict(from_pretrained('out/run').state_dict()), state['model'])
        except UserError as error:
            found += 1
            assert f'{path} is damaged' in str(error) and 'cp out/run/previous.pt' in str(error)
    assert found > 30
    path.write_bytes(damaged[0])
    for script, argv in ((sample, []), (eval, ['loss']), (train, RESUME)):
        assert 'cp out/run/previous.pt out/run/ckpt.pt' in error_of(script, capsys, *argv)
    path.unlink()
    assert 'cp out/run/previous.pt out/run/ckpt.pt' in error_of(train, capsys, *RESUME)
    shutil.copy('out/run/previous.pt', path)
    train.main(RESUME)
    same(checkpoint()['model'], state['model'])


@pytest.mark.parametrize('place, value', [
    (['tokenizer'], torch.zeros(2)), (['log'], None), (['step'], 1.0), (['optimizer', 'state'], {0: {}}),
    (['optimizer', 'state', 0, 'exp_avg'], torch.zeros(3)), (['model'], [1]), (['model_config', 'n_layer'], 10**9),
    (['optimizer', 'state', 0, 'exp_avg'], torch.full((320, 16), torch.nan)), (['model', 'x'], torch.zeros(1)),
    (['model', 'wte.weight'], torch.full((320, 16), torch.inf)), (['model_config', 'vocab_size'], 10**12)])
def test_a_strange_checkpoint_is_one_line(place, value, tiny, capsys):
    """Wrong types, shapes and numbers anywhere in a checkpoint are refused as the run is resumed."""
    train.main([*SMALL, '--max_iters=1'])
    state = inside = checkpoint()
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    torch.save(state, 'out/run/ckpt.pt')
    assert 'out/run/ckpt.pt' in error_of(train, capsys, *SMALL, '--init_from=resume', '--max_iters=2')


class Evil:
    """Unpickled by whatever runs pickles, it writes a file."""

    def __reduce__(self):
        return open, ('run.marker', 'w')


def evil_file(kind: str) -> bytes:
    """A pickle that writes a file when it runs: plain, as torch.save writes it, as it once did."""
    if kind == 'plain':
        return pickle.dumps({'model': Evil()})
    torch.save({'model': Evil()}, stream := io.BytesIO(), _use_new_zipfile_serialization=kind == 'zip')
    return stream.getvalue()


@pytest.mark.parametrize('kind', ['plain', 'zip', 'legacy'])
def test_no_pickle_runs_wherever_it_is_put(kind, tiny, capsys):
    """In the place of a checkpoint or of published weights, for every script: one line, and nothing is run."""
    train.main([*RUN, '--out_dir=out/good'])
    shutil.copytree(ROOT / 'tests/fixtures/backpack-gpt2-tiny', 'published')
    Path('out/bad').mkdir()
    bait = ['published/pytorch_model.bin', *(f'out/bad/{name}.pt' for name in ('ckpt', 'best', 'previous'))]
    for name in bait:
        Path(name).write_bytes(evil_file(kind))
    for place in ('published', 'out/bad', *bait):
        for script, argv in ((train, [*RUN, f'--init_from={place}']), (sample, ['--from', place]),
                             (eval, ['loss', '--from', place]),
                             (eval, ['loss', '--from', 'out/good', '--baseline', place])):
            assert 'is damaged or holds no weights' in error_of(script, capsys, *argv)
    for script, argv in ((train, [*RESUME, '--out_dir=out/bad']), (sample, []), (eval, ['ablation', 'out/bad'])):
        assert 'out/bad/ckpt.pt is damaged or holds no weights' in error_of(script, capsys, *argv)
    assert not Path('run.marker').exists()
    pickle.loads(evil_file('plain'))
    assert Path('run.marker').exists()  # the bait works where pickles are run


def test_a_checkpoint_does_not_lead_out_of_the_data_folder(tiny, capsys):
    """The folder it says it was trained on is taken only if it is below data/; --dataset likewise."""
    train.main([*SMALL, '--max_iters=1'])
    assert from_pretrained('out/run').trained_on == 'tiny'
    for name in ('../data/tiny', '/etc', 'a/../../b', '', '\x1b[0m', 'x\0'):
        state = checkpoint()
        state['settings']['dataset'] = name
        torch.save(state, 'weights.pt')
        assert from_pretrained('weights.pt').trained_on is None
        error = error_of(train, capsys, *SMALL, f'--dataset={name}')
        assert 'the name of a folder in data/' in error and error.strip().isprintable()
