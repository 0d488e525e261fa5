"""Claims about bad input: whatever a command line or a file holds, a script answers or says what is wrong."""

import json
import os
import random
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import SMALL

import eval
import prepare
import sample
import train
from rucksack.published import export, from_pretrained

TRAIN = [*SMALL, '--dataset=toy', '--max_iters=1']
NEW, SAY = [*TRAIN, '--out_dir=out/new'], ['--max-new-tokens=3', '--device=cpu']
OWN = ['own', '--num-proc=1', '--text=text.txt']
COMMANDS = [(train, NEW), (sample, SAY), (sample, SAY), (prepare, OWN[:2])] + [
    (eval, [table, '--device=cpu']) for table in ('loss', 'lambada', 'similarity', 'gender')]
NASTY = ['', ' ', '0', '-1', '1.5', '1e999', 'nan', '9' * 25, 'True', 'None', '[]', "'", '(' * 300, '..', '/',
         '/dev/null', '\x1b[31m', '\u202e', '\udcff', 'a' * 5000, 'nurse', 'nurse:1=0.5', '*:99', 'she/he',
         'FILE:', 'out/run', 'out/run/ckpt.pt', 'toy', 'text.txt', '%s%n', '{0}', 'cuda:99', 'meta', '--', '-x']
FITS = {'show': 'nurse', 'similar': 'nurse', 'find': 'she/he', 'explain': 'she/he', 'sweep': 'nurse:0',
        'senses-off': '*:1-2', 'senses-scale': 'nurse:she/he=0.5', 'replace': 'nurse: she -> he', 'from': 'out/run',
        'topic': 'music, guitar', 'text': 'text.txt', 'init_from': 'exported', 'model': 'gpt', 'dropout': '0.3'}
TOO_MUCH = {'help', 'max_iters', 'compile', 'wandb_log', 'subsets'}  # minutes, packages, downloads
USES = {  # what reads each file
    'out/run/ckpt.pt': [(sample, [*SAY, '--show=nurse']), (eval, ['loss', '--from=out/run', '--device=cpu']),
                        (train, [*TRAIN, '--max_iters=2', '--init_from=resume'])],
    'exported/pytorch_model.bin': [(sample, [*SAY, '--from=exported']), (train, [*NEW, '--init_from=exported'])],
    'exported/config.json': [(sample, [*SAY, '--from=exported'])],
    'exported/rucksack_tokenizer.json': [(sample, [*SAY, '--from=exported'])],
    'data/toy/meta.json': [(train, NEW), (prepare, ['toy', '--check']), (eval, ['loss', '--from=out/run'])],
    'data/toy/val.bin': [(train, NEW), (eval, ['loss', '--from=out/run'])],
    'text.txt': [(sample, [*SAY, '--start=FILE:text.txt'])], 'c.py': [(train, [*NEW, 'c.py'])]}
ODD = [None, -1, 0, 2**31, 10**30, 1.5, float('nan'), '', '../..', '\0', [], {}, True, [[]], 'y' * 10**5,
       torch.tensor(torch.nan), torch.zeros(3), torch.zeros(1).expand(10**12)]
TIMES = pytest.mark.parametrize('n', [20, pytest.param(300, marks=pytest.mark.slow)])


@pytest.fixture
def world(tmp_path_factory, tmp_path, monkeypatch):
    """The working directory of the test, with data/toy, two models after a step, and files to read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(prepare, 'write_toy', partial(prepare.write_toy, n_train=200, n_val=20))
    prepare.main(['toy'])
    train.main(TRAIN)
    train.main([*TRAIN, '--out_dir=out/run_gpt', '--model=gpt'])
    export(from_pretrained('out/run'), 'exported')
    Path('text.txt').write_text('My nurse said that she left for the clinic.\n' * 40)
    Path('c.py').write_text('n_layer = 1\nlearning_rate = 0.01\n')


def hangs(*_) -> None:
    """Called after 20 seconds."""
    raise AssertionError('it hangs')


def answers(script, argv: list[str], capsys) -> int:
    """Run a script: its exit code is 0 or 2, and with 2 it says why in one line; nothing is half-written."""
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    capsys.readouterr()
    try:
        code = script.main(argv) or 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as error:
        raise AssertionError(f'{script.__name__}.py {argv!r} in {Path.cwd()}') from error
    finally:
        signal.alarm(0)
    said = re.findall(rf'^{script.__name__}\.py: .', capsys.readouterr().err, re.MULTILINE)
    assert code in (0, 2) and len(said) == (code == 2), (script.__name__, argv, code)
    assert not [path for path in Path.cwd().rglob('*') if 'partial' in path.name], (script.__name__, argv)
    for left in ('out/new', 'data/own'):
        shutil.rmtree(left, ignore_errors=True)
    return code


@TIMES
def test_made_command_lines_are_answered(n, world, capsys):
    """Each script's flags, with values that fit or do not: exit code 0 or 2, one line, nothing half-written."""
    rng, codes = random.Random(os.environ.get('FUZZ_SEED', n)), []
    for _ in range(n):
        script, argv = rng.choice(COMMANDS)
        with pytest.raises(SystemExit):
            script.main([*argv[:script is eval], '--help'])
        flags = set(re.findall(r'^ +--([\w-]+)', capsys.readouterr().out, re.MULTILINE)) - TOO_MUCH
        for flag in rng.sample(sorted(flags), rng.randrange(4)):
            value = rng.choice(NASTY) if rng.random() < 0.4 else FITS.get(flag, '2')
            argv = [*argv, *rng.choice([[f'--{flag}'], [f'--{flag}={value}'], [f'--{flag}', value]])]
        codes.append(answers(script, argv + [rng.choice(NASTY)] * (rng.random() < 0.1), capsys))
    assert 0.1 * n < codes.count(0) < 0.8 * n


def mutated_tree(tree, rng: random.Random):
    """Nested dictionaries and lists, with something replaced or removed."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    if not keys or rng.random() < 0.2:
        return rng.choice(ODD)
    tree[key] = mutated_tree(tree[key := rng.choice(keys)], rng)
    if rng.random() < 0.1:
        del tree[key]
    return tree


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file: its bytes, or what it holds."""
    raw = path.read_bytes()
    at, some = rng.randrange(len(raw)), rng.randbytes(rng.choice([1, 2, 8, 100]))
    if path.suffix in ('.pt', '.bin') and raw[:2] == b'PK' and rng.random() < 0.7:
        torch.save(mutated_tree(torch.load(path), rng), path)
    elif path.suffix == '.json' and rng.random() < 0.6:
        path.write_text(json.dumps(mutated_tree(json.loads(raw), rng), default=str))
    else:
        path.write_bytes(rng.choice([
            raw[:at], raw[at:], b'', raw + raw, raw[:at] + some + raw[at:], raw[:at] + some + raw[at + len(some):],
            raw[:at] + b'[' * 100_000, bytes(len(raw)), b'\xff\xfe' + raw, raw[:at] + b'9' * 5000 + raw[at:]]))


@TIMES
def test_mutated_files_are_read_or_refused(n, world, capsys):
    """A file of every kind, cut, flipped or with odd values in it: exit code 0 or 2, one line."""
    rng, codes = random.Random(os.environ.get('FUZZ_SEED', n)), []
    shutil.copytree('.', '../whole')
    for i in range(n):
        path = list(USES)[i % len(USES)] if i % 3 else 'out/run/ckpt.pt'
        mutate(Path(path), rng)
        for script, argv in USES[path]:
            codes.append(answers(script, argv, capsys))
        shutil.rmtree('out/run')
        shutil.copytree('../whole', '.', dirs_exist_ok=True)
    assert 0.2 * len(codes) < codes.count(2)
