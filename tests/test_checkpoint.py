"""Claims about checkpoints: kills, full disks, damage and untrusted files cost no state and run no code."""

import csv
import itertools
import multiprocessing
import os
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
from rucksack.common import UserError
from rucksack.published import from_pretrained

RUN = [*SMALL, '--eval_interval=2', '--max_iters=6', '--dropout=0.2']
RESUME = [*RUN, '--init_from=resume']

# Runs in processes of their own are forked from one that has torch loaded and has never used it.
os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
PROCESSES = multiprocessing.get_context('forkserver')
PROCESSES.set_forkserver_preload(['test_checkpoint', 'torch._dynamo'])


def work(folder: Path, said: str, prepared, env: dict, argv: tuple[str, ...]) -> None:
    """In a process of its own: train.py, what it says in a file; prepared() comes first."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open(said, 'a')
    torch.set_num_threads(1)
    if prepared:
        prepared()
    train.main(list(argv))


def start(*argv: str, prepared=None, said: str = 'said.txt', **env: str):
    """Start train.py in a new process."""
    process = PROCESSES.Process(target=work, args=(Path.cwd(), said, prepared, env, argv))
    process.start()
    return process


def finish(process) -> int:
    """Wait for a process; its exit code, minus the signal if one killed it."""
    process.join(120)
    return process.exitcode  # None where it hangs


def at_change(n: int, act) -> None:
    """Call act() right before this process changes a file below out/ for the n-th time."""
    count, changes = itertools.count(1), ('os.rename', 'os.remove', 'os.link', 'os.mkdir')

    def hook(event: str, args: tuple) -> None:
        writes = event == 'open' and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in changes) and 'out/' in str(args[0]) and next(count) == n:
            act()

    sys.addaudithook(hook)


def ranks(*commands: list[str]) -> list[int]:
    """The exit codes of processes that train together, as under torchrun; only the first may change files."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        env = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(s.getsockname()[1])}
    watch = partial(at_change, 1, partial(os._exit, 77))
    env['WORLD_SIZE'] = str(len(commands))
    processes = [start(*argv, prepared=watch if i else None, said=f'said{i}.txt', RANK=str(i), **env)
                 for i, argv in enumerate(commands)]
    return list(map(finish, processes))


def assert_same_run(a: str, b: str) -> None:
    """Two runs have the same states, bit for bit, and the same log, without a gap, double or torn line."""
    for name in ('ckpt.pt', 'best.pt'):
        states = [torch.load(Path(run, name), weights_only=True) for run in (a, b)]
        same(*({k: x for k, x in s.items() if k not in ('log', 'seconds', 'settings')} for s in states))
    lines = Path(b, 'log.csv').read_text().splitlines(keepends=True)
    assert log(a) == log(b) and all(line.count(',') == 10 and line.endswith('\n') for line in lines)
    rows = [(int(row[0]), row[4] != '') for row in csv.reader(lines[1:])]
    assert rows == sorted(set(rows)) and [n for n, val in rows if not val] == list(range(1, rows[-1][0] + 1))


def finish_run(run: list[str]) -> None:
    """Resume a killed run until it is done; where it has no checkpoint yet, begin it, as the error says."""
    if code := finish(start(*run, '--init_from=resume')):
        assert code == 2 and 'start without --init_from=resume' in Path('said.txt').read_text()
        assert not Path('out/run/ckpt.pt').exists() and finish(start(*run)) == 0
    assert sorted(os.listdir('out/run')) == sorted(os.listdir('out/whole'))
    assert_same_run('out/whole', 'out/run')


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.01, 0.2])  # each evaluation is the best so far; the first one is
def test_a_run_killed_before_any_change_of_a_file_resumes_to_the_same_bits(rate, tiny):
    """For every n: killed right before its n-th open, link, rename or removal; with weights that stay."""
    run = [*RUN, f'--learning_rate={rate}', '--keep_every=3']
    assert finish(start(*run, '--out_dir=out/whole')) == 0
    for n in itertools.count(1):
        die = partial(at_change, n, partial(signal.raise_signal, signal.SIGKILL))
        if (code := finish(start(*run, prepared=die))) == 0:
            break
        assert code == -signal.SIGKILL
        finish_run(run)
        shutil.rmtree('out/run')
    assert n > 25


@pytest.mark.slow
def test_a_run_killed_25_times_ends_in_the_same_bits(tiny):
    """A chain of 25 kills at random moments, each followed by a resume. KILL_SEED: others."""
    rng, run = random.Random(os.environ.get('KILL_SEED', '0')), [*RUN, '--lr_decay_iters=9999']
    for _ in range(25):
        resume = ['--init_from=resume'] * Path('out/run/ckpt.pt').exists()
        process = start(*run, '--max_iters=999999', *resume)
        process.join(rng.uniform(0.2, 2.5))
        process.kill()
        assert finish(process) == -signal.SIGKILL, Path('said.txt').read_text()[-1000:]
    run += [f'--max_iters={checkpoint()["step"] + 7}']
    assert finish(start(*run, '--out_dir=out/whole')) == 0
    finish_run(run)


@pytest.mark.parametrize('share', [0.4, 0.6, 0.99])
def test_a_checkpoint_that_cannot_be_written_whole_leaves_the_last_one(share, tiny):
    """Where space ends within the second checkpoint a run stops; the first resumes to the same bits."""
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    size = int(Path('out/whole/ckpt.pt').stat().st_size * share)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
    assert finish(start(*RUN, prepared=full)) == 1 and checkpoint()['step'] == 0
    said = Path('said.txt').read_text()
    assert 'File too large; the last good state is out/run/ckpt.pt, of step 0; go on by --init' in said
    assert 'Traceback' not in said and not list(Path('out/run').glob('*.partial'))
    finish_run(RUN)


def test_a_folder_has_one_run(tiny, capsys, monkeypatch):
    """A second one is refused, meanwhile and later; with --overwrite nothing is left of the first."""
    def gradients(*args, real=train.gradients):
        assert 'another process trains in out/run; choose' in error_of(train, capsys, *RESUME)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, 'gradients', gradients)
        train.main(RUN)
    assert 'out/run/ckpt.pt exists; go on with --init_from=resume, ' in error_of(train, capsys, *RUN)
    Path('out/run/ckpt.pt').unlink()
    assert 'out/run/previous.pt exists; ' in error_of(train, capsys, *RUN)
    monkeypatch.setattr(train, 'evaluate', None)  # calling it is an error
    with pytest.raises(TypeError):
        train.main([*RUN, '--overwrite'])
    assert os.listdir('out/run') == ['log.csv']
    assert 'nothing to resume; start without' in error_of(train, capsys, *RESUME)


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
            assert f'{path} is damaged' in str(error) and f'cp out/run/previous.pt {path}' in str(error)
    assert found > 30
    path.unlink()
    assert f'cp out/run/previous.pt {path}' in error_of(train, capsys, *RESUME)
    shutil.copy('out/run/previous.pt', path)
    train.main(RESUME)
    same(checkpoint()['model'], state['model'])


class Evil:
    """Unpickled by whatever runs pickles, it writes a file."""

    def __reduce__(self):
        return open, ('marker', 'w')


@pytest.mark.parametrize('zipped', [True, False])
def test_no_pickle_runs_wherever_it_is_put(zipped, tiny, capsys):
    """As a checkpoint or as published weights, in both formats of torch.save: one line, nothing is run."""
    train.main([*RUN, '--out_dir=out/good'])
    shutil.copytree(ROOT / 'tests/fixtures/backpack-gpt2-tiny', 'published')
    Path('out/bad').mkdir()
    bait = ['published/pytorch_model.bin', *(f'out/bad/{name}.pt' for name in ('ckpt', 'best', 'previous'))]
    for name in bait:
        torch.save({'model': Evil()}, name, _use_new_zipfile_serialization=zipped)
    calls = [(train, [*RESUME, '--out_dir=out/bad']), (sample, []), (eval, ['loss', 'out/bad'])]
    for place in ('published', 'out/bad', *bait):
        calls += [(train, [*RUN, f'--init_from={place}']), (sample, ['--from', place]),
                  (eval, ['loss', '--from=out/good', '--baseline', place])]
    for script, argv in calls:
        assert 'is damaged or holds no weights' in error_of(script, capsys, *argv)
    assert not Path('marker').exists()
    torch.load(bait[0], weights_only=False)
    assert Path('marker').exists()  # the bait works where pickles are run
