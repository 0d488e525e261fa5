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
from rucksack import grammar
from rucksack.published import export, from_pretrained

RUN = ' '.join([*SMALL, '--dataset=toy --max_iters=1 --block_size=32'])
SAY = '--max-new-tokens=3 --device=cpu'
COMMANDS = [  # and the file that it reads
    (train, f'{RUN} --max_iters=2 --init_from=resume', 'out/run/ckpt.pt'), (sample, SAY, 'out/run/ckpt.pt'),
    (train, f'{RUN} --overwrite --init_from=exported', 'exported/model.safetensors'),
    (train, f'{RUN} --overwrite', 'data/toy/meta.json'), (train, f'{RUN} --overwrite c.py', 'c.py'),
    (sample, f'{SAY} --from=exported', 'exported/config.json'), (eval, 'gender', 'out/run/ckpt.pt'),
    (sample, f'{SAY} --from=exported', 'exported/tokenizer.json'), (eval, 'loss', 'out/run/ckpt.pt'),
    (sample, f'{SAY} --from=cut', 'cut/merges.txt'),
    (sample, f'{SAY} --from=shards', 'shards/model.safetensors.index.json'),
    (sample, f'{SAY} --edit=e.json', 'e.json'), (eval, 'loss --edit=e.json', 'e.json'),
    (eval, 'lambada --data=c.py', 'c.py'),
    (prepare, 'own --num-proc=1 --text=c.txt', 'c.txt'), (prepare, 'toy', 'data/toy/val.bin')]
VALUES = ['', ' ', '0', '-1', '1.5', '1e999', 'nan', 'True', '[]', "'", '(' * 300, '..', '/', '%s%n', '*:99',
          '\x1b[31m', '\u202e', '\udcff', 'a' * 5000, 'e.json', 'out/run', 'cuda:99', 'meta', '--', '-x', '2',
          'nurse', 'nurse:1=0.5', 'she/he', 'nurse: he -> she', 'music, guitar', 'gpt', 'exported']
ODD = [None, -1, 0, 2**31, 10**30, 1.5, '', '../..', '\0', [], {}, True, [[]], 'y' * 10**5, torch.zeros(3)]
TOO_MUCH = {'help', 'max_iters', 'compile', 'wandb_log'}  # minutes, packages, downloads


def mutated(tree, rng: random.Random):
    """Nested dictionaries with something replaced."""
    if not isinstance(tree, dict) or not tree or rng.random() < 0.1:
        return rng.choice(ODD)
    key = rng.choice(list(tree))
    return tree | {key: mutated(tree[key], rng)}


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file: its bytes, or what it holds."""
    raw = path.read_bytes()
    at, some = rng.randrange(len(raw)), rng.randbytes(rng.choice([1, 2, 8, 100]))
    if path.suffix in ('.pt', '.bin') and raw[:2] == b'PK' and rng.random() < 0.7:
        torch.save(mutated(torch.load(path), rng), path)
    elif path.suffix == '.json' and rng.random() < 0.6:
        path.write_text(json.dumps(mutated(json.loads(raw), rng), default=str))
    else:
        end = rng.choice([b'', some + raw[at + len(some):], b'[' * 9999, b'9' * 5000, raw, bytes(len(raw))])
        path.write_bytes(raw[:at] + end)


@pytest.mark.parametrize('n', [20, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_flags_and_files_are_answered(n, tmp_path, monkeypatch, capsys):
    """Exit code 0 or 2, and with 2 one line that says why, or 1 of a run that had to stop itself; nothing is
    half-written. FUZZ_SEED: others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr(prepare, 'write_toy', partial(prepare.write_toy, n_train=200, n_val=20))
    prepare.main(['toy'])
    train.main(RUN.split())
    export(model := from_pretrained('out/run'), 'exported')
    model.tokenizer = {'name': 'gpt2', 'merges': ['\u0120 t', 'h e']}
    export(model, 'cut')
    shutil.copytree('exported', 'shards')
    Path('shards/model.safetensors').rename('shards/all.safetensors')
    Path('shards/model.safetensors.index.json').write_text('{"weight_map": {"x": "all.safetensors"}}')
    Path('c.py').write_text('n_layer = 1\nlearning_rate = 0.01\n')
    Path('c.txt').write_text('My nurse said that she left for the clinic.\n' * 40)
    edits = dict.fromkeys(grammar.EDITS, []) | {'senses_off': ['nurse:1'], 'replace': ['nurse: she -> he']}
    Path('e.json').write_text(json.dumps({'vocabulary': model.config.n_vocab, 'edits': edits}))
    shutil.copytree('.', whole := f'{tmp_path}_whole')
    rng, codes = random.Random(os.environ.get('FUZZ_SEED', n)), []
    for _ in range(n):
        script, words, path = rng.choice(COMMANDS)
        argv = words.split()
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
        what, text = f'{script.__name__} {argv} {path} {code}', capsys.readouterr().err
        said = re.findall(rf'^{script.__name__}\.py: .', text, re.MULTILINE)
        assert code in (0, 2) or code == 1 and 'train.py: stopped: step' in text, what
        assert len(said) == (code > 0) and not list(Path.cwd().rglob('*partial*')), what
        codes.append(code)
        for name in ('out', 'data'):
            shutil.rmtree(name)
        shutil.copytree(whole, '.', dirs_exist_ok=True)
    assert 0.1 * n < codes.count(0) < 0.8 * n
