"""Claims about bad input: whatever a command line or a file holds, a script answers or says what is wrong."""

import json
import os
import random
import re
import shutil
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

RUN, SAY = [*SMALL, '--dataset=toy', '--max_iters=1'], ['--max-new-tokens=3', '--device=cpu']
COMMANDS = [  # and the file that it reads
    (train, [*RUN, '--max_iters=2', '--init_from=resume'], 'out/run/ckpt.pt'), (sample, SAY, 'out/run/ckpt.pt'),
    (train, [*RUN, '--overwrite', '--init_from=exported'], 'exported/pytorch_model.bin'),
    (sample, [*SAY, '--from=exported'], 'exported/config.json'), (eval, ['loss'], 'data/toy/val.bin'),
    (sample, [*SAY, '--from=exported'], 'exported/rucksack_tokenizer.json'),
    (train, [*RUN, '--overwrite'], 'data/toy/meta.json'), (prepare, ['toy', '--check'], 'data/toy/val.bin'),
    (train, [*RUN, '--overwrite', 'c.py'], 'c.py'), (sample, [*SAY, '--start=FILE:c.py'], 'c.py'),
    (eval, ['lambada', '--data=c.py'], 'c.py'), (prepare, ['own', '--num-proc=1', '--text=c.txt'], 'c.txt')]
VALUES = ['', ' ', '0', '-1', '1.5', '1e999', 'nan', '9' * 25, 'True', '[]', "'", '(' * 300, '..', '/', 'cpu',
          '/dev/null', '\x1b[31m', '\u202e', '\udcff', 'a' * 5000, '*:99', 'FILE:', 'out/run/ckpt.pt', 'toy',
          '%s%n', 'cuda:99', 'meta', '--', '-x', '2', 'nurse', 'nurse:1=0.5', '*:1-2', 'she/he', 'c.txt', 'gpt',
          'nurse: he -> she', 'music, guitar', 'exported', 'out/run']
ODD = [None, -1, 0, 2**31, 10**30, 1.5, '', '../..', '\0', [], {}, True, [[]], 'y' * 10**5, torch.zeros(3)]
TOO_MUCH = {'help', 'max_iters', 'compile', 'wandb_log', 'subsets'}  # minutes, packages, downloads


def mutated(tree, rng: random.Random):
    """Nested dictionaries and lists with something replaced or removed."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    if not keys or rng.random() < 0.2:
        return rng.choice(ODD)
    tree[key] = mutated(tree[key := rng.choice(keys)], rng)
    if rng.random() < 0.1:
        del tree[key]
    return tree


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file: its bytes, or what it holds."""
    raw = path.read_bytes()
    at, some = rng.randrange(len(raw)), rng.randbytes(rng.choice([1, 2, 8, 100]))
    if path.suffix in ('.pt', '.bin') and raw[:2] == b'PK' and rng.random() < 0.7:
        torch.save(mutated(torch.load(path), rng), path)
    elif path.suffix == '.json' and rng.random() < 0.6:
        path.write_text(json.dumps(mutated(json.loads(raw), rng), default=str))
    else:
        path.write_bytes(rng.choice([raw[:at], raw[at:], b'', raw + raw, raw[:at] + some + raw[at + len(some):],
                                     raw[:at] + b'[' * 9999, bytes(len(raw)), raw[:at] + b'9' * 5000]))


@pytest.mark.parametrize('n', [30, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_flags_and_files_are_answered(n, tmp_path, monkeypatch, capsys):
    """Exit code 0 or 2, and with 2 one line that says why; nothing is half-written. FUZZ_SEED: others."""
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(prepare, 'write_toy', partial(prepare.write_toy, n_train=200, n_val=20))
    prepare.main(['toy'])
    train.main(RUN)
    export(from_pretrained('out/run'), 'exported')
    Path('c.py').write_text('n_layer = 1\nlearning_rate = 0.01\n')
    Path('c.txt').write_text('My nurse said that she left for the clinic.\n' * 40)
    shutil.copytree('.', '../whole')
    rng, codes = random.Random(os.environ.get('FUZZ_SEED', n)), []
    for _ in range(n):
        script, argv, path = rng.choice(COMMANDS)
        if rng.random() < 0.5:
            mutate(Path(path), rng)
        else:
            with pytest.raises(SystemExit):
                script.main([*argv[:script is eval], '--help'])
            flags = set(re.findall(r'^ +--([\w-]+)', capsys.readouterr().out, re.MULTILINE)) - TOO_MUCH
            for flag in rng.sample(sorted(flags), rng.randrange(4)):
                argv = [*argv, f'--{flag}', rng.choice(VALUES)]
            argv = argv[:len(argv) - (rng.random() < 0.1)]
        try:
            code = script.main(argv) or 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException as error:
            raise AssertionError(f'{script.__name__}.py {argv!r} in {Path.cwd()}') from error
        said = re.findall(rf'^{script.__name__}\.py: .', capsys.readouterr().err, re.MULTILINE)
        assert code in (0, 2) and len(said) == (code == 2), (script.__name__, argv, code)
        assert not [path for path in Path.cwd().rglob('*') if 'partial' in path.name], (script.__name__, argv)
        codes.append(code)
        for name in ('out', 'data'):
            shutil.rmtree(name)
        shutil.copytree('../whole', '.', dirs_exist_ok=True)
    assert 0.1 * n < codes.count(0) < 0.8 * n
