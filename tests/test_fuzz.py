"""Claims about bad input: whatever a command or a file holds, a script answers or says why not."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import SMALL, offline

import eval
import prepare
import sample
import train
from rucksack.phrases import EDIT_FLAGS
from rucksack.published import export, from_pretrained
from rucksack.tokenizer import gpt2_tokenizer


@dataclass(frozen=True)
class Command:
    """A command that is right, and a file that it reads."""

    script: ModuleType
    argv: list[str]
    file: str


RUN = [*SMALL, '--dataset=toy', '--max_iters=1', '--block_size=32']
AGAIN = [*RUN, '--overwrite']
SAY = ['--max-new-tokens=3', '--device=cpu']
COMMANDS = [
    Command(train, [*RUN, '--max_iters=2', '--init_from=resume'], 'out/run/ckpt.pt'),
    Command(train, [*AGAIN, '--init_from=exported'], 'exported/model.safetensors'),
    Command(train, AGAIN, 'data/toy/meta.json'),
    Command(train, [*AGAIN, 'c.py'], 'c.py'),
    Command(sample, SAY, 'out/run/ckpt.pt'),
    Command(sample, [*SAY, '--from=exported'], 'exported/config.json'),
    Command(sample, [*SAY, '--from=exported'], 'exported/tokenizer.json'),
    Command(sample, [*SAY, '--from=cut'], 'cut/tokenizer.json'),
    Command(sample, [*SAY, '--edit=e.json'], 'e.json'),
    Command(eval, ['gender'], 'out/run/ckpt.pt'),
    Command(eval, ['loss'], 'out/run/ckpt.pt'),
    Command(eval, ['loss', '--edit=e.json'], 'e.json'),
    Command(eval, ['lambada', '--data=c.py'], 'c.py'),
    Command(prepare, ['own', '--merges=99', '--text=c.txt'], 'c.txt'),
    Command(prepare, ['toy', '--overwrite'], 'data/toy/val.bin')]

# What a flag is set to, and what takes the place of something in a checkpoint or a JSON file.
VALUES = [
    '', ' ', '0', '-1', '1.5', '1e999', 'nan', 'True', '[]', "'", '(' * 300, '..', '/dev/null',
    '%s%n', '*:99', '\x1b[31m', '\u202e', '\udcff', 'a' * 5000, 'e.json', 'out/run', 'cuda:99',
    'meta', '--', '-x', '2', 'nurse', 'nurse:1=0.5', 'she/he', 'nurse: he -> she', 'music, guitar',
    'gpt', 'exported']
ODD = [None, -1, 0, 2**31, 10**30, 1.5, '', '../..', '\0', [], {}, True, [[]], 'y' * 10**5,
       torch.zeros(3)]
TOO_MUCH = {'help', 'max_iters', 'compile', 'wandb_log'}  # minutes, packages, downloads


# -----------------------------------------------------------------------------
# Damage.


def mutated(tree, rng: random.Random):
    """Nested dictionaries with something replaced."""
    if not isinstance(tree, dict) or not tree or rng.random() < 0.1:
        return rng.choice(ODD)
    key = rng.choice(list(tree))
    return tree | {key: mutated(tree[key], rng)}


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bytes that are cut short, changed, or followed by nonsense from some place on."""
    start = rng.randrange(len(raw))
    noise = rng.randbytes(rng.choice([1, 2, 8, 100]))
    end = rng.choice([
        b'', noise + raw[start + len(noise):], b'[' * 9999, b'9' * 5000, raw, bytes(len(raw))])
    return raw[:start] + end


def damage(path: Path, rng: random.Random) -> None:
    """Change a file: its bytes, or what it holds."""
    raw = path.read_bytes()
    if path.suffix == '.pt' and rng.random() < 0.7:
        torch.save(mutated(torch.load(path, weights_only=True), rng), path)
    elif path.suffix == '.json' and rng.random() < 0.6:
        path.write_text(json.dumps(mutated(json.loads(raw), rng), default=str))
    else:
        path.write_bytes(damaged(raw, rng))


def flags_of(command: Command, capsys) -> list[str]:
    """The flags in its --help, but for those that would take minutes."""
    table = command.argv[:1] if command.script is eval else []
    with pytest.raises(SystemExit) as stop:
        command.script.main([*table, '--help'])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    return sorted(set(re.findall(r'^ +--([\w-]+)', text, re.MULTILINE)) - TOO_MUCH)


def odd_argv(command: Command, rng: random.Random, capsys) -> list[str]:
    """The command with up to three flags more, and sometimes without its last word."""
    argv = list(command.argv)
    flags = flags_of(command, capsys)
    for flag in rng.sample(flags, rng.randrange(4)):
        argv += [f'--{flag}', rng.choice(VALUES)]
    if rng.random() < 0.1:
        argv.pop()
    return argv


# -----------------------------------------------------------------------------
# Answers.


def code_of(main: Callable, argv: list[str]) -> int:
    """The exit code of a script."""
    try:
        main(argv)
    except SystemExit as stop:
        return stop.code or 0
    except BaseException as error:  # a KeyboardInterrupt too: which command is it about?
        raise AssertionError(f'{argv!r} in {Path.cwd()}') from error
    return 0


def check_answer(script: ModuleType, code: int, said: str, what: str) -> None:
    """Assert that it is 0, or 2 and one line; or 1 and one line of a run that stopped itself."""
    name = f'{script.__name__}.py'
    lines = [line for line in said.splitlines() if line.startswith(f'{name}: ')]
    stopped = [line for line in lines if line.startswith('train.py: stopped: step ')]
    assert code in (0, 1, 2), what
    assert len(lines) == (0 if code == 0 else 1), what
    assert len(stopped) == (1 if code == 1 else 0), what
    assert not list(Path.cwd().rglob('*partial*')), what


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A copy of the working directory: data, a run, exports, an edit, a config, a text."""
    folder = tmp_path / 'here'
    folder.mkdir()
    monkeypatch.chdir(folder)
    offline(monkeypatch)
    monkeypatch.setattr(prepare, 'TOY_STORIES', {'train': 200, 'val': 20})
    prepare.main(['toy'])
    train.main(RUN)
    model = from_pretrained('out/run')
    export(model, 'exported')
    model.tokenizer = gpt2_tokenizer(model.config.n_vocab - 257)
    export(model, 'cut')
    edits = dict.fromkeys(EDIT_FLAGS, [])
    edits |= {'senses_off': ['nurse:1'], 'replace': ['nurse: she -> he']}
    contents = {'vocabulary': model.config.n_vocab, 'edits': edits}
    Path('e.json').write_text(json.dumps(contents))
    Path('c.py').write_text('n_layer = 1\nlearning_rate = 0.01\n')
    Path('c.txt').write_text('My nurse said that she left for the clinic.\n' * 40)
    shutil.copytree(folder, tmp_path / 'whole')
    return tmp_path / 'whole'


@pytest.mark.parametrize('n', [20, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_flags_and_files_are_answered(n, whole, capsys):
    """Each gives an exit code and at most one line, and leaves nothing half-written.

    FUZZ_SEED in the environment chooses other ones.
    """
    rng = random.Random(os.environ.get('FUZZ_SEED', n))
    codes = []
    for _ in range(n):
        command = rng.choice(COMMANDS)
        argv = command.argv
        if rng.random() < 0.5:
            damage(Path(command.file), rng)
        else:
            argv = odd_argv(command, rng, capsys)
        capsys.readouterr()
        code = code_of(command.script.main, argv)
        said = capsys.readouterr().err
        what = f'{command.script.__name__}.py {argv} {command.file} {code}'
        check_answer(command.script, code, said, what)
        codes.append(code)
        shutil.rmtree('out')
        shutil.rmtree('data')
        shutil.copytree(whole, '.', dirs_exist_ok=True)
    assert 0.1 * n < codes.count(0) < 0.8 * n
