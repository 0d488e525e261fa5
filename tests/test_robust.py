"""Claims about runs that are killed, full disks, strangers' files, processes that end: nothing is lost."""

import csv
import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from test_train import SMALL, checkpoint, log, make_data, same

import eval
import prepare
import sample
import train
from rucksack import data as data_py
from rucksack import settings as settings_
from rucksack import toy as toy_py
from rucksack.published import from_pretrained

ROOT = Path(__file__).parent.parent
RUN = [*SMALL, '--eval_interval=2', '--max_iters=6', '--dropout=0.2']

# Each run gets a process of its own, forked from one that has torch loaded and has never used it.
os.environ['PYTHONPATH'] = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
PROCESSES = multiprocessing.get_context('forkserver')
PROCESSES.set_forkserver_preload(['train', 'torch._dynamo', 'test_robust'])


def work(main, argv: list[str], folder: Path, said: Path, env: dict, prepared=None) -> None:
    """In a process of its own: a script's main, its output to a file; prepared() comes first."""
    os.chdir(folder)
    os.environ.update(env)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by ignores
    if prepared:
        prepared()
    main(argv)


def start(*argv: str, main=train.main, folder: Path | None = None, prepared=None, said: str = 'said.txt',
          **env: str):
    """Start a script, by default train.py, in a new process."""
    folder = folder or Path.cwd()
    args = main, list(argv), folder, folder / said, env, prepared
    process = PROCESSES.Process(target=work, args=args)
    process.start()
    return process


def finish(process, seconds: float = 120) -> int:
    """Wait for a process; its exit code, minus the signal if one killed it."""
    process.join(seconds)
    assert process.exitcode is not None, 'it hangs'
    return process.exitcode


def wait_for(path: Path, text: str, process) -> None:
    """Wait until a file has a text."""
    end = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end and process.is_alive(), (path, text, Path('said.txt').read_text())
        time.sleep(0.002)


def assert_same_run(a: str, b: str) -> None:
    """Two runs have the same weights, moments, steps and losses, bit for bit, and the same log."""
    one, two = checkpoint(a), checkpoint(b)
    for name in ('model', 'optimizer'):
        same(one[name], two[name])
    assert all(one[name] == two[name] for name in ('step', 'best_val_loss', 'val_loss', 'data'))
    same(torch.load(f'{a}/best.pt')['model'], torch.load(f'{b}/best.pt')['model'])
    assert log(a) == log(b)
    lines = Path(b, 'log.csv').read_text().splitlines(keepends=True)
    assert all(line.count(',') == 7 and line.endswith('\n') for line in lines)
    steps = [(int(row[0]), row[2] != '') for row in csv.reader(lines[1:])]
    assert steps == sorted(set(steps))


def end_of_run(out: str, run: list[str]) -> None:
    """Resume a run until it is done; where there is no checkpoint yet, begin it as the error says."""
    code = finish(start(*run, f'--out_dir={out}', '--init_from=resume'))
    if code == 2:
        assert 'start with python train.py' in Path('said.txt').read_text()
        assert not Path(out, 'ckpt.pt').exists()
        code = finish(start(*run, f'--out_dir={out}'))
    assert code == 0, Path('said.txt').read_text()[-2000:]
    assert sorted(os.listdir(out)) == ['best.pt', 'ckpt.pt', 'log.csv', 'previous.pt']


# -----------------------------------------------------------------------------
# Killed.


def is_change(event: str, args: tuple) -> bool:
    """Whether an audit event is a change of the files below out/ or data/."""
    if event == 'open':
        flags = args[2] if isinstance(args[2], int) else 0
        changes = flags & (os.O_WRONLY | os.O_RDWR) or 'partial' in str(args[0])
    else:
        changes = event in ('os.rename', 'os.remove', 'os.link', 'os.mkdir', 'os.rmdir')
    return bool(changes) and any(part in str(args[0]) for part in ('out/', 'data/'))


def die_at(n: int) -> None:
    """Have this process killed right before its n-th change of a file."""
    count = 0

    def hook(event: str, args: tuple) -> None:
        """Count changes of files."""
        nonlocal count
        if event in ('open', 'os.rename', 'os.remove', 'os.link', 'os.mkdir', 'os.rmdir'):
            count += is_change(event, args)
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_run_killed_before_any_change_of_a_file_resumes_to_the_same_bits(tiny):
    """For every n: killed right before its n-th open, link, rename or removal, then resumed, a run ends as
    one that was not interrupted."""
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    for n in range(1, 1000):
        code = finish(start(*RUN, f'--out_dir=out/{n}', prepared=partial(die_at, n)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        end_of_run(f'out/{n}', RUN)
        assert_same_run('out/whole', f'out/{n}')
        shutil.rmtree(f'out/{n}')
    assert n > 25
    print(f'\nfaults: a run killed before each of its {n - 1} changes of a file; all resumed, same bits')


@pytest.mark.slow
def test_a_run_killed_25_times_ends_in_the_same_bits(tiny):
    """A chain of 25 kills at random moments, each followed by a resume, changes no bit of weights, moments
    and log. (KILL_SEED in the environment has other moments.)"""
    rng = random.Random(os.environ.get('KILL_SEED', '0'))
    run = [*SMALL, '--eval_interval=5', '--max_iters=4000', '--dropout=0.2']
    whole = start(*run, '--out_dir=out/whole')
    kills, writing, resumed = 0, 0, 0
    while kills < 25:
        begun = Path('out/killed/ckpt.pt').exists()
        process = start(*run, '--out_dir=out/killed', *['--init_from=resume'] * begun)
        process.join(rng.uniform(0.2, 2.5))
        process.kill()
        code = finish(process)
        if code == 0:  # on a fast machine it may be done first: another one
            assert finish(whole) == 0
            assert_same_run('out/whole', 'out/killed')
            shutil.rmtree('out/killed')
            continue
        assert code == -signal.SIGKILL, Path('said.txt').read_text()[-1000:]
        kills, resumed = kills + 1, resumed + begun
        writing += bool(list(Path('out/killed').glob('*.partial')))
    steps = checkpoint('out/killed')['step']
    end_of_run('out/killed', run)
    assert finish(whole) == 0
    assert_same_run('out/whole', 'out/killed')
    print(f'\nkills survived: {kills}, {writing} of them while a file was written, {resumed} in a resumed '
          f'run; the last after step {steps}; states lost: 0')


def test_a_name_left_by_a_kill_does_not_spoil_the_best(tiny):
    """Killed when ckpt.partial was best.pt already, a run that is resumed writes its next state elsewhere."""
    train.main([*SMALL, '--max_iters=4', '--eval_interval=2'])
    os.link('out/run/best.pt', 'out/run/ckpt.partial')
    best = Path('out/run/best.pt').read_bytes()
    process = start(*SMALL, '--max_iters=100000', '--eval_interval=99999', '--init_from=resume')
    wait_for(Path('out/run/log.csv'), '\n7,', process)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process) == 128 + signal.SIGTERM and checkpoint()['step'] > 4
    assert Path('out/run/best.pt').read_bytes() == best


def test_a_float64_run_resumes_to_the_same_bits(tiny):
    """The weights of a run in float64 do not lose digits on their way through a file."""
    run = [*SMALL, '--dtype=float64', '--eval_interval=3']
    train.main([*run, '--max_iters=6', '--out_dir=out/whole'])
    train.main([*run, '--max_iters=3'])
    train.main([*run, '--max_iters=6', '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')


def test_a_run_that_replaces_another_leaves_none_of_it_to_resume(tiny, capsys):
    """Killed in its first evaluation, a run with --overwrite=True has nothing; resume says so."""
    train.main(RUN)
    assert finish(start(*RUN, '--overwrite=True', prepared=die_in_evaluation)) == -signal.SIGKILL
    assert 'start with python train.py' in conftest.error_of(train, capsys, *RUN, '--init_from=resume')
    assert not list(Path('out/run').glob('*.pt'))


def die_in_evaluation() -> None:
    """Have this process killed as it begins to evaluate."""
    train.evaluate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_two_runs_do_not_share_a_folder(tiny, capsys):
    """While one trains, another is refused in one line; a killed one leaves no lock behind."""
    process = start(*SMALL, '--max_iters=100000', '--eval_interval=5')
    wait_for(Path('out/run/log.csv'), '\n7,', process)
    resume = [*SMALL, '--max_iters=100000', '--eval_interval=5', '--init_from=resume']
    assert 'another process trains in out/run' in conftest.error_of(train, capsys, *resume)
    process.kill()
    finish(process)
    step = checkpoint()['step']
    train.main([*SMALL, f'--max_iters={step + 1}', '--init_from=resume', '--allow_changes=True'])
    assert checkpoint()['step'] == step + 1


def no_reader() -> None:
    """Close the reading end of what this process prints to."""
    read, write = os.pipe()
    os.close(read)
    for stream in (1, 2):
        os.dup2(write, stream)


def test_a_run_outlives_its_terminal(tiny):
    """With nobody to read what it prints a run goes on, and a signal still ends it with a checkpoint."""
    process = start(*SMALL, '--max_iters=100000', '--eval_interval=50', prepared=no_reader)
    wait_for(Path('out/run/log.csv'), '\n7,', process)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 128 + signal.SIGINT and checkpoint()['step'] >= 7


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(signum, tiny):
    """Exit code 128 + signal, the command to go on, and then the same bits as if nothing had happened."""
    run = [*SMALL, '--max_iters=400', '--dropout=0.2', '--eval_interval=150']
    whole = start(*run, '--out_dir=out/whole')
    process = start(*run)
    wait_for(Path('out/run/log.csv'), '\n7,', process)
    os.kill(process.pid, signum)
    assert finish(process) == 128 + signum
    step = checkpoint()['step']
    assert 7 <= step < 400
    said = Path('said.txt').read_text()
    assert f'stopped after step {step}; to go on: python train.py ' in said and '--init_from=resume' in said
    end_of_run('out/run', run)
    assert finish(whole) == 0
    assert_same_run('out/whole', 'out/run')


def test_the_same_command_gives_the_same_bits(tiny):
    """Two runs with one seed are equal bit for bit; another seed gives another run."""
    for name, seed in (('a', 1), ('b', 1), ('c', 2)):
        train.main([*RUN, f'--out_dir=out/{name}', f'--seed={seed}'])
    assert_same_run('out/a', 'out/b')
    assert log('out/a') != log('out/c')


# -----------------------------------------------------------------------------
# Disks.


def limit_files(size: int, deadly: bool) -> None:
    """Let no file of this process grow beyond a size: it is an error, or the kernel kills the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize('share', [0.4, 0.6, 0.99])
@pytest.mark.parametrize('deadly', [True, False])
def test_a_checkpoint_that_cannot_be_written_whole_leaves_the_last_one(share, deadly, tiny):
    """Where space ends in the middle of the second checkpoint the run stops, with exit code 1 and a line that
    says so; or it is killed in the middle. It resumes from the first one to the same bits."""
    assert finish(start(*RUN, '--out_dir=out/whole')) == 0
    size = int(Path('out/whole/ckpt.pt').stat().st_size * share)
    code = finish(start(*RUN, prepared=partial(limit_files, size, deadly)))
    assert code == (-signal.SIGXFSZ if deadly else 1) and checkpoint()['step'] == 0
    said = Path('said.txt').read_text()
    assert deadly or ('File too large; out/run/ckpt.pt is complete' in said and 'Traceback' not in said)
    assert [p.name for p in Path('out/run').glob('*.partial')] == ['ckpt.partial'] * deadly
    end_of_run('out/run', RUN)
    assert_same_run('out/whole', 'out/run')


def test_a_damaged_checkpoint_is_found_and_the_other_one_offered(tiny, capsys):
    """Cut short, or with a bit turned over anywhere: the reader names the file and the one before it, or the
    bit is one that means nothing. The offer works."""
    train.main([*SMALL, '--eval_interval=2', '--max_iters=4'])
    path, rng, found = Path('out/run/ckpt.pt'), random.Random(0), 0
    raw, state = path.read_bytes(), checkpoint()
    damaged = [raw[:rng.randrange(len(raw))] for _ in range(10)]
    for _ in range(60):
        copy = bytearray(raw)
        copy[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(copy))
    for content in damaged:
        path.unlink()
        path.write_bytes(content)
        capsys.readouterr()
        try:
            model = from_pretrained('out/run')
        except ValueError as error:
            found += 1
            assert f'{path} is damaged' in str(error) and 'out/run/previous.pt is whole' in str(error)
        else:
            same(dict(model.state_dict()), state['model'])
    assert found > 40
    path.write_bytes(damaged[0])
    for script, argv in ((train, [*SMALL, '--eval_interval=2', '--max_iters=4', '--init_from=resume']),
                         (sample, []), (eval, ['loss'])):
        assert 'cp out/run/previous.pt out/run/ckpt.pt' in conftest.error_of(script, capsys, *argv)
    os.rename('out/run/previous.pt', path)
    train.main([*SMALL, '--eval_interval=2', '--max_iters=4', '--init_from=resume'])
    assert_same_state(checkpoint(), state)
    print(f'\nfaults: {len(damaged)} damaged checkpoints, {found} refused, the others with the same content')


def test_what_is_left_of_a_run_is_neither_passed_over_nor_replaced_unasked(tiny, capsys):
    """Without ckpt.pt, previous.pt is offered to go on from, and a new run is refused; the offer works."""
    run = [*SMALL, '--eval_interval=2', '--max_iters=4']
    train.main(run)
    state = checkpoint()
    os.unlink('out/run/ckpt.pt')
    assert 'out/run/previous.pt exists' in conftest.error_of(train, capsys, *run)
    assert 'cp out/run/previous.pt out/run/ckpt.pt' in conftest.error_of(train, capsys, *run,
                                                                         '--init_from=resume')
    shutil.copy('out/run/previous.pt', 'out/run/ckpt.pt')
    train.main([*run, '--init_from=resume'])
    assert_same_state(checkpoint(), state)


def assert_same_state(a: dict, b: dict) -> None:
    """Two checkpoints have the same weights and moments."""
    for name in ('model', 'optimizer'):
        same(a[name], b[name])


def test_a_bin_is_checked_against_its_meta(tiny, capsys):
    """--check finds a bit turned over in a bin, and says so; a right one passes; a resumed run says that the
    data are others."""
    train.main([*SMALL, '--max_iters=2'])
    prepare.main(['tiny', '--check'])
    assert 'data/tiny/val.bin: 200 tokens, the checksum is right' in capsys.readouterr().out
    data = bytearray(Path('data/tiny/train.bin').read_bytes())
    data[300] ^= 1
    Path('data/tiny/train.bin').write_bytes(data)
    error = conftest.error_of(prepare, capsys, 'tiny', '--check')
    assert 'data/tiny/train.bin is damaged: its checksum' in error
    make_data([1] * 800, [2] * 200)
    resume = [*SMALL, '--max_iters=3', '--init_from=resume']
    assert 'data/tiny is not what out/run/ckpt.pt' in conftest.error_of(train, capsys, *resume)
    train.main([*resume, '--allow_changes=True'])
    assert checkpoint()['step'] == 3


def small_world() -> None:
    """A toy world of few stories."""
    prepare.write_toy = partial(prepare.write_toy, n_train=200, n_val=20)


def small_world_until(n: int) -> None:
    """The same, in a process that is killed before its n-th change of a file."""
    small_world()
    die_at(n)


def test_a_killed_prepare_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    """For every n: killed right before its n-th change of a file, prepare leaves a whole folder or none, and
    the next one clears away what the first has left."""
    monkeypatch.chdir(tmp_path)
    for n in range(1, 1000):
        code = finish(start('toy', main=prepare.main, prepared=partial(small_world_until, n)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if Path('data/toy').exists():
            data_py.verify(Path('data/toy'))
        assert finish(start('toy', main=prepare.main, prepared=small_world)) == 0
        data_py.verify(Path('data/toy'))
        assert os.listdir('data') == ['toy']
        shutil.rmtree('data')
    assert n > 8
    print(f'\nfaults: prepare killed before each of its {n - 1} changes of a file')


def some_text() -> None:
    """A .jsonl of about two million characters."""
    line = json.dumps({'text': 'My nurse said that she had left for the clinic. ' * 40})
    Path('text.jsonl').write_text(f'{line}\n' * 1000)


def test_a_prepare_without_space_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    """Where space ends in the reading of a corpus or in the writing of bins: exit code 1, no folder."""
    monkeypatch.chdir(tmp_path)
    some_text()
    command = ['own', '--text', 'text.jsonl', '--num-proc', '1']
    for size in (100_000, 300_000):
        assert finish(start(*command, main=prepare.main, prepared=partial(limit_files, size, False))) == 1
        assert 'prepare.py: stopped, data/own is as it was' in Path('said.txt').read_text()
        assert not Path('data').exists()


def processes_in(folder: Path) -> list[str]:
    """The processes whose working directory is a folder."""
    found = []
    for process in Path('/proc').glob('[0-9]*'):
        try:
            found += [process.name] * (os.readlink(process / 'cwd') == str(folder))
        except OSError:
            pass  # it has ended meanwhile
    return found


@pytest.mark.skipif(not Path('/proc/self/cwd').exists(), reason='only Linux lists its processes as files')
def test_a_killed_prepare_takes_its_processes_along(tmp_path):
    """The processes that encode end within seconds once the one that started them was killed."""
    os.chdir(tmp_path)
    some_text()
    os.chdir(ROOT)
    command = [sys.executable, ROOT / 'prepare.py', 'own', '--num-proc', '2', '--text', *['text.jsonl'] * 20]
    said = tmp_path / 'said.txt'
    with open(said, 'w') as file, subprocess.Popen(command, cwd=tmp_path, stderr=file) as process:
        while 'Encoding' not in said.read_text() or len(processes_in(tmp_path)) < 3:
            assert process.poll() is None, said.read_text()
        process.kill()
    end = time.monotonic() + 20
    while processes_in(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize('seeds, options, codes', [
    ((1, 1), [], [{0}]), ((1, 2), [], [{0, 2}, {0, 1}]), ((1, 2), ['--overwrite'], [{0}, {0, 1}])])
def test_two_prepares_at_once_do_not_mix(seeds, options, codes, tmp_path, monkeypatch):
    """Of two that make one folder, one wins whole; the other says so, or finds its own work done."""
    monkeypatch.chdir(tmp_path)
    both = [start('toy', f'--seed={seed}', *options, main=prepare.main, prepared=small_world)
            for seed in seeds]
    assert {finish(process) for process in both} in codes, Path('said.txt').read_text()
    data_py.verify(Path('data/toy'))
    meta = json.loads(Path('data/toy/meta.json').read_text())
    prepare.write_bins(tmp_path, iter([toy_parts(meta['command']['seed'])]))
    assert Path('train.bin').read_bytes() == Path('data/toy/train.bin').read_bytes()
    assert os.listdir('data') == ['toy'] and 'Traceback' not in Path('said.txt').read_text()


def test_a_prepare_that_comes_second_does_not_replace_the_first(tmp_path, monkeypatch, capsys):
    """Even where the other finished at the last moment, after this one had looked: its folder stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'write_toy', partial(prepare.write_toy, n_train=200, n_val=20))
    prepare.main(['toy'])
    first = Path('data/toy/meta.json').read_bytes()
    monkeypatch.setattr(prepare, 'is_there', lambda *_: False)
    with pytest.raises(SystemExit) as stop:
        prepare.main(['toy', '--seed', '2'])
    assert stop.value.code == 1 and 'data/toy is as it was' in capsys.readouterr().err
    assert Path('data/toy/meta.json').read_bytes() == first and os.listdir('data') == ['toy']


def toy_parts(seed: int) -> list[np.ndarray]:
    """The ids of the small toy world, those to train on and those held out."""
    stories = [text for text, _ in toy_py.toy_stories(seed, 220)]
    encoding = data_py.load_tokenizer(toy_py.toy_tokenizer(stories))
    rows = [encoding.encode_ordinary(text) + [encoding.eot_token] for text in stories]
    return [np.array(sum(part, []), dtype='uint16') for part in (rows[:200], rows[200:])]


# -----------------------------------------------------------------------------
# Numbers and settings.


def test_a_run_that_overflows_names_the_step_whatever_the_log_interval(tiny, capsys):
    """The first step that is not finite is named, with learning rate, gradient norm and the last good state;
    nothing after it is saved."""
    wild = [*SMALL[:-1], '--learning_rate=3', '--weight_decay=3', '--grad_clip=0', '--warmup_iters=0',
            '--max_iters=60', '--lr_decay_iters=0', '--eval_interval=3']
    messages = []
    for interval in (1, 60):
        with pytest.raises(SystemExit) as stop:
            train.main([*wild, f'--log_interval={interval}', f'--out_dir=out/{interval}'])
        messages.append(capsys.readouterr().err.replace(f'out/{interval}', 'out/N'))
        last = checkpoint(f'out/{interval}')
        assert stop.value.code == 1 and messages[-1].count('\n') == 1
        assert f'out/N/ckpt.pt, of step {last["step"]}, is the last good state' in messages[-1]
        values = [*last['model'].values()]
        values += [t for moments in last['optimizer']['state'].values() for t in moments.values()]
        assert last['step'] and all(t.isfinite().all() for t in values)
    before = [message.split(', go on')[0] for message in messages]
    assert before[0] == before[1] and 'gradient norm' in before[0] and 'at learning rate' in before[0]


@pytest.mark.parametrize('options', [
    ['--learning_rate=0.02'], ['--batch_size=2'], ['--seed=2'], ['--weight_decay=0.2'], ['--dtype=float64'],
    ['--gradient_accumulation_steps=2'], ['--eval_iters=3'], ['--max_iters=3'], ['--lr_decay_iters=30']])
def test_a_run_resumes_with_other_settings_only_if_told(options, tiny, capsys):
    """What changes the result is named and refused; --allow_changes=True goes on, a longer run needs nothing.
    """
    run = [*SMALL, '--max_iters=2', '--eval_interval=2']
    longer = [*SMALL, '--max_iters=4', '--log_interval=2', '--eval_interval=4', '--compile=False']
    train.main(run if options != ['--max_iters=3'] else longer)
    name, value = options[0][2:].split('=')
    error = conftest.error_of(train, capsys, *SMALL, '--max_iters=4', *options, '--init_from=resume')
    assert f'{name} ' in error and f'now {value}' in error and '--allow_changes=True' in error
    if name != 'max_iters':
        train.main([*longer, *options, '--init_from=resume', '--allow_changes=True'])
        assert f'{name} ' in capsys.readouterr().out.split('changed: ')[1]
        assert checkpoint()['step'] == 4 and checkpoint()['settings'][name] == settings_.literal(value) or value
        train.main([*SMALL, '--max_iters=5', *options, '--init_from=resume'])
        assert checkpoint()['step'] == 5


def test_a_changed_weight_decay_takes_effect(tiny):
    """A resumed run takes betas and weight decay from its settings, not from the moments' file."""
    train.main([*SMALL, '--max_iters=2'])
    for decay in (0.1, 50):
        shutil.copytree('out/run', f'out/{decay}')
        train.main([*SMALL, '--max_iters=4', f'--weight_decay={decay}', f'--out_dir=out/{decay}',
                    '--init_from=resume', '--allow_changes=True'])
    assert not torch.equal(*(checkpoint(f'out/{decay}')['model']['wte.weight'] for decay in (0.1, 50)))


def test_a_checkpoint_has_one_loss_however_often_it_is_asked(tiny):
    """eval.py loss gives the same bits each time, also after the checkpoint went through a file again."""
    train.main([*SMALL, '--max_iters=3'])
    for name in ('a', 'b', 'c'):
        eval.main(['loss', '--device', 'cpu', '--json', f'{name}.json'])
        torch.save(checkpoint(), 'out/run/ckpt.pt')
    assert Path('a.json').read_text() == Path('b.json').read_text() == Path('c.json').read_text()


# -----------------------------------------------------------------------------
# Strangers' files.


class Evil:
    """Unpickled by whatever runs pickles, it writes a file."""

    def __reduce__(self):
        return open, ('run.marker', 'w')


def evil_files() -> dict[str, bytes]:
    """Pickles that write a file when they run: plain, as torch.save writes them, as it once did."""
    files = {'plain': pickle.dumps({'model': Evil()})}
    for name, zipped in (('zip', True), ('legacy', False)):
        stream = io.BytesIO()
        torch.save({'model': Evil()}, stream, _use_new_zipfile_serialization=zipped)
        files[name] = stream.getvalue()
    return files


@pytest.mark.parametrize('kind', evil_files())
def test_no_pickle_runs_wherever_it_is_put(kind, tiny, capsys):
    """In the place of a checkpoint, weights, data, text, settings or word pairs: exit code 2, nothing run."""
    evil = evil_files()[kind]
    train.main([*SMALL, '--max_iters=1', '--out_dir=out/good'])
    for name in ('out/bad', 'published', 'data/evil'):
        Path(name).mkdir()
    for name in ('out/bad/ckpt.pt', 'out/bad/previous.pt', 'published/pytorch_model.bin', 'x.parquet',
                 'x.jsonl', 'x.tar', 'x.txt', 'x.py', 'data/evil/meta.json', 'data/evil/train.bin',
                 'data/evil/val.bin', 'SimLex-999.txt'):
        Path(name).write_bytes(evil)
    fixture = ROOT / 'tests/fixtures/backpack-gpt2-tiny/config.json'
    shutil.copy(fixture, 'published/config.json')
    calls = [(train, [*SMALL, f'--init_from={place}', '--out_dir=out/new'])
             for place in ('out/bad', 'out/bad/ckpt.pt', 'published', 'published/pytorch_model.bin')]
    calls += [(train, [*SMALL, '--init_from=resume', '--out_dir=out/bad']), (train, ['x.py']),
              (train, ['--dataset=evil', '--device=cpu'])]
    calls += [(sample, ['--from', place]) for place in ('out/bad', 'out/bad/ckpt.pt', 'published', 'x.txt')]
    calls += [(sample, []), (eval, ['loss']), (eval, ['loss', '--from', 'out/bad']),
              (eval, ['loss', '--from', 'out/good', '--baseline', 'out/bad']),
              (eval, ['loss', '--from', 'out/good', '--data', 'evil']),
              (eval, ['similarity', '--from', 'out/good', '--data', '.']),
              (eval, ['lambada', '--from', 'out/good', '--data', 'x.jsonl']),
              (eval, ['blimp', '--from', 'out/good', '--data', 'x.tar']),
              (eval, ['ablation', 'out/good', 'out/bad'])]
    calls += [(prepare, ['own', '--num-proc', '1', '--text', name])
              for name in ('x.parquet', 'x.jsonl', 'x.tar', 'x.txt')] + [(prepare, ['evil', '--check'])]
    for script, argv in calls:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.main(argv)
        assert stop.value.code == 2, (argv, capsys.readouterr())
    assert not Path('run.marker').exists()
    pickle.loads(evil_files()['plain'])['model'].close()
    assert Path('run.marker').exists()  # the bait works where pickles are run
    print(f'\nstrangers: a malicious pickle ({kind}) in {len(calls)} places, run in none')


@pytest.mark.parametrize('make', [os.mkdir, os.mkfifo, lambda path: os.symlink('/dev/zero', path)])
def test_what_is_no_file_is_no_checkpoint(make, tiny, capsys):
    """A folder, a pipe or a device in the place of ckpt.pt is refused, not waited for."""
    Path('out/run').mkdir(parents=True)
    make('out/run/ckpt.pt')
    for script, argv in ((train, [*SMALL, '--init_from=resume']), (sample, ['--from', 'out/run/ckpt.pt']),
                         (eval, ['loss'])):
        assert 'out/run/ckpt.pt' in conftest.error_of(script, capsys, *argv)


@pytest.mark.parametrize('place, value', [
    (['tokenizer'], torch.zeros(2)), (['tokenizer', 'more'], torch.zeros(2)), (['log'], '\udcff'),
    (['log'], None), (['step'], -1), (['step'], 1.0), (['settings', 'seed'], torch.zeros(1).expand(10**12)),
    (['settings', 'seed'], [[[]]]), (['data'], {}), (['optimizer'], {}), (['optimizer', 'state'], {0: {}}),
    (['optimizer', 'state', 0, 'exp_avg'], torch.zeros(3)),
    (['optimizer', 'state', 0, 'step'], torch.tensor(-5.0)),
    (['optimizer', 'state', 0, 'exp_avg_sq'], -torch.ones(320, 16)), (['model_config', 'n_layer'], 10**9),
    (['optimizer', 'state', 0, 'exp_avg'], torch.full((320, 16), float('nan'))),
    (['model_config', 'vocab_size'], 10**12), (['model_config', 'dropout'], '0.5'), (['model'], [1]),
    (['model', 'wte.weight'], torch.zeros(1, 1).expand(320, 16))])
def test_a_strange_checkpoint_is_one_line(place, value, tiny, capsys):
    """Wrong types, shapes and sizes anywhere in a checkpoint are refused as the run is resumed."""
    train.main([*SMALL, '--max_iters=1'])
    state = inside = checkpoint()
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    torch.save(state, 'out/run/ckpt.pt')
    error = conftest.error_of(train, capsys, *SMALL, '--max_iters=2', '--init_from=resume')
    assert 'out/run/ckpt.pt' in error


def test_a_model_cannot_steer_the_terminal(tiny, capsys):
    """Control sequences in a vocabulary, in the names of weights or in a path come out as spaces."""
    escape = '\x1b]0;title\x07'
    tokenizer = toy_py.toy_tokenizer([''])
    tokenizer['pieces'] = [f'{escape}{i}' for i in range(40)] + ['\u202e' + 'abc', '\x9b31m']
    meta = {'tokenizer': tokenizer, 'vocab_size': 257 + 42}
    make_data(np.random.default_rng(0).integers(256, 298, 800), [256] * 200, **meta)
    train.main([*SMALL, '--max_iters=1'])
    state = checkpoint()
    state['model'][escape] = torch.zeros(1)
    torch.save(state, 'weights.pt')
    Path(f'out/{escape}').mkdir()
    shutil.copy('out/run/ckpt.pt', f'out/{escape}/ckpt.pt')
    capsys.readouterr()
    for script, argv in ((train, [*SMALL, '--max_iters=1', f'--out_dir=out/{escape}2']),
                         (sample, ['--num-samples', '9']), (sample, ['--explain']), (sample, ['--weights']),
                         (sample, ['--from', 'weights.pt']), (eval, ['loss']),
                         (eval, ['loss', '--data', escape]),
                         (train, [*SMALL, '--init_from=weights.pt', '--out_dir=out/new']),
                         (train, [*SMALL, f'--dataset={escape}', '--out_dir=out/new']),
                         (prepare, [escape]), (prepare, ['own', '--text', escape])):
        try:
            script.main(argv)
        except SystemExit as stop:
            assert stop.code == 2
        shown = ''.join(capsys.readouterr())
        assert shown and all(c.isprintable() or c == '\n' for c in shown), (argv, shown)


def test_a_checkpoint_does_not_lead_out_of_the_data_folder(tiny, capsys):
    """The folder it says it was trained on is taken only if it is below data/; --dataset likewise."""
    train.main([*SMALL, '--max_iters=1'])
    state = checkpoint()
    assert from_pretrained('out/run').trained_on == 'tiny'
    for name in ('../data/tiny', '/etc', 'a/../../b', 3, '', None, '\x1b[0m', 'x\0'):
        state['settings']['dataset'] = name
        torch.save(state, 'weights.pt')
        assert from_pretrained('weights.pt').trained_on is None
        if isinstance(name, str):
            assert 'below data/' in conftest.error_of(train, capsys, *SMALL, f'--dataset={name}')


# -----------------------------------------------------------------------------
# Several processes.


def free_port() -> str:
    """A port on which nobody listens."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return str(s.getsockname()[1])


def writes_nothing() -> None:
    """Have this process end with an error at its first change of a file of the run."""
    def hook(event: str, args: tuple) -> None:
        """Refuse a change."""
        if event in ('open', 'os.rename', 'os.remove', 'os.link', 'os.mkdir', 'os.rmdir') and \
                is_change(event, args):
            os._exit(77)

    sys.addaudithook(hook)


def ranks(n: int, *argv: str, folders: list[Path] | None = None) -> list:
    """Start n processes of one run, as torchrun would; all but the first must not write."""
    env = {'WORLD_SIZE': str(n), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': free_port()}
    return [start(*argv, RANK=str(i), LOCAL_RANK=str(i), **env, prepared=writes_nothing if i else None,
                  said=f'said{i}.txt', folder=folders and folders[i]) for i in range(n)]


@pytest.mark.parametrize('n', [2, 4])
def test_gloo_processes_train_as_one(n, tiny):
    """The loss and the gradients of the first step are those of one process to 1e-6 in float32; after 30
    steps in float64, dropout included, weights and losses to 1e-9. Only the first process writes."""
    for dtype, steps, options in (('float32', 1, ['--beta1=0', '--grad_clip=0']), ('float32', 30, []),
                                  ('float64', 30, ['--dropout=0.2'])):
        run = [*SMALL, '--overwrite=True', '--gradient_accumulation_steps=4', f'--dtype={dtype}',
               f'--max_iters={steps}', *options]
        train.main([*run, '--out_dir=out/one'])
        assert [finish(p) for p in ranks(n, *run, '--out_dir=out/all')] == [0] * n
        one, many = checkpoint('out/one'), checkpoint('out/all')
        off = max((one['model'][key] - many['model'][key]).abs().max().item() for key in one['model'])
        losses = [[float(row['loss'] or row['val_loss']) for row in log(f'out/{name}')]
                  for name in ('one', 'all')]
        if steps == 1:
            moments = one['optimizer']['state'], many['optimizer']['state']
            for a, b in zip(*(m.values() for m in moments)):  # with beta1 = 0 exp_avg is the gradient
                assert (a['exp_avg'] - b['exp_avg']).norm() <= 1e-6 * a['exp_avg'].norm()
            assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        elif dtype == 'float64':
            assert off < 1e-9 and losses[1] == pytest.approx(losses[0], abs=1e-9)
        print(f'\n{n} processes, {dtype}, {steps} steps: weights off by up to {off:.1e}')


@pytest.mark.parametrize('victim', [0, 2])
def test_when_a_process_dies_the_others_stop(victim, tiny):
    """Within a minute, with a message and exit code 1; the last checkpoint is whole."""
    run = [*SMALL, '--gradient_accumulation_steps=3', '--max_iters=100000', '--eval_interval=5']
    processes = ranks(3, *run)
    wait_for(Path('out/run/log.csv'), '\n7,', processes[0])
    processes[victim].kill()
    began = time.monotonic()
    for i, process in enumerate(processes):
        assert finish(process, 60) == (-signal.SIGKILL if i == victim else 1)
        said = Path(f'said{i}.txt').read_text()
        assert i == victim or 'stopped: another process has ended' in said and 'Traceback' not in said
    assert time.monotonic() - began < 60 and checkpoint()['step'] >= 5


def test_processes_at_different_steps_are_refused(tiny, tmp_path):
    """Two processes that resume from different checkpoints, as without a shared disk, are one line."""
    folders = [tmp_path / 'a', tmp_path / 'b']
    for folder, steps in zip(folders, (2, 4)):
        shutil.copytree('data', folder / 'data')
        os.chdir(folder)
        train.main([*SMALL, f'--max_iters={steps}', '--gradient_accumulation_steps=2'])
    os.chdir(tmp_path)
    run = [*SMALL, '--max_iters=6', '--gradient_accumulation_steps=2', '--init_from=resume']
    processes = ranks(2, *run, folders=folders)
    assert [finish(p) for p in processes] == [2, 2]
    assert 'the processes do not go on from the same step' in (folders[0] / 'said0.txt').read_text()


@pytest.mark.parametrize('world, n, message', [
    (3, 8, 'take 6 or 9, or 2 or 4 processes'), (2, 1, 'take 2, or 1 process'),
    (8, 12, 'take 8 or 16, or 6 or 12 processes'), (7, 6, 'take 7, or 6 processes')])
def test_an_uneven_number_of_processes_is_refused_with_the_nearest(world, n, message, tiny, capsys,
                                                                    monkeypatch):
    """Micro-batches that cannot be shared out evenly are one line that says what would work."""
    for name, value in (('RANK', 0), ('WORLD_SIZE', world), ('LOCAL_RANK', 0)):
        monkeypatch.setenv(name, str(value))
    assert message in conftest.error_of(train, capsys, *SMALL, f'--gradient_accumulation_steps={n}')
