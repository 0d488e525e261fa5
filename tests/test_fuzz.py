"""Claims about bad input: whatever a command line or a file holds, a script answers or says what is wrong.

FUZZ_SEED in the environment makes other command lines and files, FUZZ_N that many times as many.
"""

import json
import os
import random
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
import torch
from conftest import SMALL
from test_robust import small_world

import eval
import model
import prepare
import sample
import train
from rucksack import published as published_py

SEED, TIMES = os.environ.get('FUZZ_SEED', '0'), int(os.environ.get('FUZZ_N', 1))
NASTY = [
    '', ' ', '0', '-1', '1', '2', '3', '1.5', '1e999', 'nan', '-inf', '9' * 25, '1_0', '0x10', 'True',
    'None', '[]', "'", '"', '\\', '(' * 300, '../..', '/', '.', '..', '~', '/dev/null', '\x1b[31m',
    '\u202e', 'é', '日本語', '😀', '\udcff', 'a' * 5000, 'nurse', 'nurse:0', 'nurse:she/he', '*:0-3',
    '*:99', 'nurse:1=0.5', 'she/he', 'she+he', 'nurse: he -> she', 'a/b/c', 'FILE:', 'FILE:.',
    'FILE:text.txt', 'resume', 'scratch', 'out/run', 'out/run_gpt', 'out/run/ckpt.pt', 'exported',
    'toy', 'data/toy', 'data', 'text.txt', 'text.jsonl', 'lambada.jsonl', 'blimp.jsonl', 'c.py',
    'model.pt', '%s%n', '{0}', 'cpu', 'cuda:99', 'meta', 'music', '0-1', '3,3,3,1', ':', '=', '/', '->',
    '--', '-x']
FLAGS = {
    train: [f'--{name}' for name in train.Settings.__dataclass_fields__ if name != 'max_iters'],
    prepare: ['--text', '--val', '--subsets', '--num-proc', '--seed', '--overwrite', '--check'],
    sample: ['--from', '--start', '--num-samples', '--max-new-tokens', '--temperature', '--top-k', '--seed',
             '--device', '--export', '--html', '--show', '--find', '--word', '--similar', '--sense', '--min',
             '--explain', '--weights', '--sweep', '--senses-off', '--senses-scale', '--replace', '--topic',
             '--strength'],
    eval: ['--from', '--baseline', '--data', '--device', '--json', '--first', '--sense', '--texts',
           '--length', '--step-sizes', '--seed', '--out', '--sweep', '--start'],
    model: ['--help', '--size']}
WORDS = {train: ['c.py'], prepare: ['toy', 'own', 'openwebtext', '.hidden'], sample: [], model: [],
         eval: ['loss', 'lambada', 'wikitext', 'blimp', 'similarity', 'gender', 'topic', 'ablation',
                'plot', 'plot']}
FITS = {  # a value that a flag takes; 2 for others
    '--show': 'nurse', '--similar': 'nurse', '--find': 'she/he', '--word': 'nurse', '--explain': 'she/he',
    '--weights': 'mean', '--sweep': 'nurse:0', '--senses-off': '*:1-2', '--senses-scale': 'nurse:she/he=0.5',
    '--replace': 'nurse: she -> he', '--topic': 'music, guitar', '--strength': '1', '--from': 'out/run',
    '--baseline': 'out/run_gpt', '--text': 'text.jsonl', '--val': 'text.txt', '--dataset': 'toy',
    '--out_dir': 'out/new0', '--init_from': 'exported', '--device': 'cpu', '--model': 'gpt', '--data': '.',
    '--html': 'page.html', '--out': 'plot.svg', '--dtype': 'float64', '--temperature': '0',
    '--learning_rate': '0.1', '--dropout': '0.3'}
BASE = {train: [*SMALL, '--dataset=toy', '--max_iters=1', '--overwrite=True'], prepare: ['--num-proc=1'],
        sample: ['--max-new-tokens=3', '--device=cpu'], eval: ['--device=cpu', '--texts=1', '--length=3'],
        model: []}


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    """A folder with data/toy, a Backpack and its Transformer after a step, and files of every format."""
    folder, before, write_toy = tmp_path_factory.mktemp('fuzz'), Path.cwd(), prepare.write_toy
    os.chdir(folder)
    os.environ['HF_HUB_OFFLINE'] = '1'
    small_world()
    prepare.main(['toy'])
    for kind in ('backpack', 'gpt'):
        train.main([*SMALL, '--dataset=toy', '--max_iters=1', f'--model={kind}',
                    f'--out_dir=out/run{"_gpt" * (kind == "gpt")}'])
    published_py.export(published_py.from_pretrained('out/run'), 'exported')
    lines = [json.dumps({'text': f'My nurse said that she left {i} clinics.'}) for i in range(30)]
    Path('text.jsonl').write_text('\n'.join(lines))
    Path('text.txt').write_text('My nurse said that she left for the clinic.\n' * 40)
    Path('lambada.jsonl').write_text('\n'.join(lines[:3]))
    Path('wiki.test.raw').write_text(' = Nurse = \n \n My nurse said that she left . \n' * 3)
    Path('blimp.jsonl').write_text(json.dumps({
        'UID': 'agreement', 'linguistics_term': 'agreement', 'sentence_good': 'She left.',
        'sentence_bad': 'She leave.'}))
    Path('SimLex-999.txt').write_text('word1\tword2\tPOS\tSimLex999\nnurse\tclinic\tN\t3.5\nold\tnew\tA\t1\n')
    Path('c.py').write_text('n_layer = 1\nlearning_rate = 0.01\n')
    with tarfile.open('text.tar', 'w') as tar:
        tar.add('text.txt')
    torch.save(published_py.from_pretrained('out/run').state_dict(), 'model.pt')
    yield folder
    os.chdir(before)
    del os.environ['HF_HUB_OFFLINE']
    prepare.write_toy = write_toy


def too_long(signum, frame) -> None:
    """Called after 20 seconds."""
    raise AssertionError('it hangs')


def answers(script, argv: list[str], capsys) -> int:
    """Run a script: its exit code is 0 or 2, and with 2 it says why in one line; nothing is half-written."""
    capsys.readouterr()
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    code = 0
    try:
        script.main(argv)
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as error:
        raise AssertionError(f'{script.__name__}.py {argv!r} in {Path.cwd()}') from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = [line for line in capsys.readouterr().err.splitlines()
            if line.startswith(f'{script.__name__}.py: ')]
    assert code in (0, 2) and len(said) == (code == 2), f"{script.__name__}.py {argv!r} {code}: {said}"
    left = [p for p in Path.cwd().rglob('*') if 'partial' in p.name]
    assert not left, (script.__name__, argv, left)
    return code


def made(rng: random.Random) -> tuple:
    """A script and a command line for it: some flags and words, with values that fit or do not."""
    script = rng.choices(list(FLAGS), [6, 3, 8, 6, 1])[0]
    argv = list(BASE[script])
    if script is train:
        argv.append(f'--out_dir=out/new{rng.randrange(3)}')
    argv += rng.sample(WORDS[script], min(len(WORDS[script]), rng.random() < 0.9))
    for flag in rng.sample(FLAGS[script], min(len(FLAGS[script]), rng.choice([0, 1, 1, 1, 2, 3]))):
        value = rng.choice(NASTY) if rng.random() < 0.5 else FITS.get(flag, '2')
        argv += [flag] if rng.random() < 0.1 else [f'{flag}={value}'] if rng.random() < 0.7 else [flag, value]
    if rng.random() < 0.15:
        argv.insert(rng.randrange(len(argv) + 1), rng.choice(NASTY))
    return script, argv


def test_made_command_lines_are_answered(world, capsys):
    """200 times five scripts' flags with odd values: exit code 0 or 2, one line, nothing half-written."""
    rng, codes = random.Random(SEED), []
    began = time.monotonic()
    for _ in range(240 * TIMES):
        script, argv = made(rng)
        codes.append(answers(script, argv, capsys))
        for left in ('out/new0', 'out/new1', 'out/new2', 'data/own', 'data/openwebtext'):
            shutil.rmtree(left, ignore_errors=True)
    print(f'\ninputs tried: {len(codes)} command lines, {codes.count(0)} answered, {codes.count(2)} refused '
          f'in one line, {time.monotonic() - began:.0f} s')
    assert 20 < codes.count(0) < 0.7 * len(codes)


# -----------------------------------------------------------------------------
# Files.

USES = {  # file -> commands that read it
    'out/run/ckpt.pt': [(sample, ['--from', 'out/run', '--show', 'nurse', *BASE[sample]]),
                        (eval, ['loss', '--from', 'out/run', *BASE[eval]]),
                        (train, [*SMALL, '--dataset=toy', '--max_iters=1', '--init_from=resume'])],
    'exported/pytorch_model.bin': [(sample, ['--from', 'exported', *BASE[sample]])],
    'exported/config.json': [(sample, ['--from', 'exported', *BASE[sample]])],
    'exported/rucksack_tokenizer.json': [(sample, ['--from', 'exported', *BASE[sample]])],
    'data/toy/meta.json': [(train, [*BASE[train], '--out_dir=out/new0']), (prepare, ['toy', '--check']),
                           (eval, ['loss', '--from', 'out/run', *BASE[eval]]), (prepare, ['toy'])],
    'data/toy/train.bin': [(train, [*BASE[train], '--out_dir=out/new0']), (prepare, ['toy', '--check'])],
    'data/toy/val.bin': [(train, [*BASE[train], '--out_dir=out/new0']),
                         (eval, ['loss', '--from', 'out/run', *BASE[eval]])],
    'text.jsonl': [(prepare, ['own', '--num-proc=1', '--text', 'text.jsonl'])],
    'text.txt': [(prepare, ['own', '--num-proc=1', '--text', 'text.txt']),
                 (sample, ['--start', 'FILE:text.txt', *BASE[sample]])],
    'text.tar': [(prepare, ['own', '--num-proc=1', '--text', 'text.tar'])],
    'lambada.jsonl': [(eval, ['lambada', '--from', 'out/run', '--data', 'lambada.jsonl', *BASE[eval]])],
    'blimp.jsonl': [(eval, ['blimp', '--from', 'out/run', '--data', 'blimp.jsonl', *BASE[eval]])],
    'wiki.test.raw': [(eval, ['wikitext', '--from', 'out/run', '--data', 'wiki.test.raw', *BASE[eval]])],
    'SimLex-999.txt': [(eval, ['similarity', '--from', 'out/run', '--data', '.', *BASE[eval]])],
    'c.py': [(train, ['c.py', *BASE[train], '--out_dir=out/new0'])]}
ODD = [None, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, float('nan'), float('inf'), '', 'x', '../..', '\0', [], {},
       True, [[]], {'x': {}}, 'y' * 10**5, torch.tensor(float('nan')), torch.zeros(0), torch.zeros(3),
       torch.zeros(1).expand(10**12)]


def mutated_bytes(raw: bytes, rng: random.Random) -> bytes:
    """A file cut, flipped, doubled, filled in or replaced."""
    at, n = rng.randrange(len(raw) + 1), rng.choice([1, 2, 8, 100])
    return rng.choice([
        lambda: raw[:at], lambda: raw[at:], lambda: raw[:at] + raw[at + n:], lambda: b'', lambda: raw + raw,
        lambda: raw[:at] + rng.randbytes(n) + raw[at + n:], lambda: raw[:at] + rng.randbytes(n) + raw[at:],
        lambda: raw[:at] + bytes([raw[at % len(raw)] ^ 1 << rng.randrange(8)]) + raw[at + 1:],
        lambda: raw[:at] + b'[' * 100_000, lambda: rng.randbytes(1000), lambda: bytes(len(raw)),
        lambda: b'\xff\xfe' + raw, lambda: raw[:at] + b'9' * 5000 + raw[at:]])()


def mutate_tree(tree: dict, rng: random.Random) -> None:
    """Replace, add or remove something in nested dictionaries and lists."""
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and len(place[key]) and rng.random() < 0.8:
            place = place[key]
            continue
        if rng.random() < 0.2:
            del place[key]
        elif isinstance(place, dict) and rng.random() < 0.1:
            place[rng.choice([3, 'x', '\x1b[31m'])] = rng.choice(ODD)
        else:
            place[key] = rng.choice(ODD)
        return


def mutate(path: Path, rng: random.Random) -> None:
    """Change a file: its bytes, or what it holds."""
    raw = path.read_bytes()
    if path.suffix in ('.pt', '.bin') and raw[:2] == b'PK' and rng.random() < 0.7:
        tree = torch.load(path)
        mutate_tree(tree, rng)
        return torch.save(tree, path)
    if path.suffix == '.json' and rng.random() < 0.6:
        tree = json.loads(raw)
        mutate_tree(tree, rng)
        return path.write_text(json.dumps(tree, default=lambda tensor: 'tensor'))
    path.unlink()
    if rng.random() < 0.05:
        return path.mkdir()
    path.write_bytes(mutated_bytes(raw, rng))


def test_mutated_files_are_read_or_refused(world, capsys):
    """100 times a file of every kind, cut, flipped or with odd values in it: exit code 0 or 2, one line."""
    rng, codes = random.Random(SEED), []
    began = time.monotonic()
    for i in range(160 * TIMES):
        path = Path(list(USES)[i % len(USES)] if i % 3 else 'out/run/ckpt.pt')
        shutil.copy2(path, 'whole')
        shutil.copytree('out/run', 'run_before')
        mutate(path, rng)
        if path.is_file():
            shutil.copy2(path, f'mutated{path.suffix}')  # for whoever looks into a failure
        for script, argv in USES[str(path)]:
            codes.append(answers(script, argv, capsys))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree('out/run')
        os.rename('run_before', 'out/run')
        shutil.copy2('whole', path)
        for left in ('out/new0', 'data/own'):
            shutil.rmtree(left, ignore_errors=True)
    print(f'\ninputs tried: {160 * TIMES} mutated files in {len(codes)} commands, {codes.count(0)} read and '
          f'{codes.count(2)} refused in one line, {time.monotonic() - began:.0f} s')
    assert 20 < codes.count(2)
