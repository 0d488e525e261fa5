"""Claims about eval.py: each command end to end, on random models."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import conftest
import pytest
import torch
from subjects import WORDS, flags, save, toy_subject, write_benchmarks
from torch.nn import functional as F

import eval as tables
import sample
from rucksack import gender, timing
from rucksack.likelihood import held_out, windows
from rucksack.table import load
from senses import scale_senses

say, error_of = partial(conftest.say, tables), partial(conftest.error_of, tables)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The working directory of the test, with a Backpack, its Transformer, other Backpacks, and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table'])
    monkeypatch.setattr(timing, 'alternate', lambda works, *_: [(1.0, 2.0, 9.0), (1.0, 1.0, 4.0)])
    for name, k in (('run', 4), ('run_gpt', 0), ('run_2', 2), ('run_8', 8)):
        s = toy_subject(k, block_size=128)
        run = dict(batch_size=3, gradient_accumulation_steps=2, block_size=8)
        save(f'out/{name}', s.model, dataset='other' if k == 8 else 'tiny', **run)
    conftest.make_data([0], s.encode(WORDS) * 9, tokenizer=s.model.tokenizer, vocab_size=s.encoding.n_vocab)
    write_benchmarks(Path('bench'))


def test_every_table_runs_on_random_models(pair, capsys):
    """all makes every table, and JSON of them; a malformed file is said, and skips its own alone."""
    argv = 'all --from out/run --data bench --texts=1 --length=4 --step_sizes=.05 --json=all.json'.split()
    text = say(capsys, *argv)
    content = json.loads(Path('all.json').read_text())
    found = {name: table['rows'] for name, table in content['tables'].items()}
    assert [*found, 'plot'] == list(tables.TABLES) and '\nTransformer out/run_gpt: ' in text
    assert all(row[5 if name == 'loss' else 1] is not None for name, rows in found.items() for row in rows)
    assert f'{found["loss"][0][5]:.3f}' in text and found['timing'][0][1:4] == [2000, 1000, 2]
    runs = 'out/run_2', 'out/run'
    say(capsys, 'loss', *runs, '--json=loss.json')
    rows = json.loads(Path('loss.json').read_text())['tables']['loss']['rows']
    assert [row[:2] + row[4:5] for row in rows] == [
        [f'Backpack {name}', k, 10 * 3 * 2 * 8 / 1e6] for name, k in zip(runs, (2, 4))]
    assert rows[1] == found['loss'][0]
    Path('bench/lambada_test.jsonl').write_text('{"text": ')
    text = say(capsys, *argv)
    assert '\nlambada: skipped, ' in text and 'lambada_test.jsonl' in text and 'WikiText (Table 2)' in text


def rows_of(capsys, *argv: str) -> list[list]:
    """The rows of a table, as --json writes them."""
    say(capsys, *argv, '--json', 'x.json')
    return json.loads(Path('x.json').read_text())['tables'][argv[0]]['rows']


@pytest.fixture
def edits(pair, capsys):
    """Two files of edits, e.json without a topic and t.json with one."""
    for file, asked in (('e.json', ['--senses-off', '*:0-2']), ('t.json', ['--topic', 'music'])):
        conftest.say(sample, capsys, '--from', 'out/run', *asked, '--save-edit', file)


@pytest.mark.parametrize('name, data', [('loss', []), ('lambada', ['--data', 'bench']), ('gender', []),
                                        ('wikitext', ['--data', 'bench']), ('blimp', ['--data', 'bench'])])
def test_an_edit_is_scored_beside_the_model_as_it_is(name, data, edits, capsys):
    """It has rows of its own (in BLiMP a column) after those of the model, and changes no other's."""
    argv = [name, '--from', 'out/run', *data]
    plain, both = (rows_of(capsys, *argv, *more) for more in ([], ['--edit', 'e.json']))
    if name == 'blimp':
        assert [[row[0], row[1], row[3]] for row in both] == plain and any(row[1] != row[2] for row in both)
    else:
        n = len(both) - len(plain)
        assert n == (3 if name == 'gender' else 1) and both[:n] + both[2 * n:] == plain
        assert both[n][0].startswith('Backpack out/run under e.json') and both[n][1:] != both[0][1:]


def test_the_loss_of_an_edit_is_that_of_edited_senses(edits, capsys):
    """Perplexity, by hand; a topic is refused, whose annealing would see the future; so is a Transformer."""
    rows, s, nats = rows_of(capsys, 'loss', '--from=out/run', '--edit=e.json'), load('out/run', 'cpu'), 0
    (ids, _), edit = held_out(s, flags()), scale_senses(None, [0, 1, 2], 0.0)
    for (before,), block in windows(ids, s.eot, 128, look_back=False):
        idx = torch.tensor([[before, *block[:-1]]])
        logits = s.model(idx, C=edit(idx, s.model.senses(idx)))[0]
        nats += F.cross_entropy(logits, torch.tensor(block), reduction='sum').item()
    assert rows[1][5] == pytest.approx(math.exp(nats / len(ids)), rel=1e-4)
    for argv, why in (('loss --from out/run --edit t.json', 't.json has a topic'),
                      ('gender --from out/run_gpt --edit e.json', 'is a Transformer'),
                      ('loss --edit none.json --from out/run', 'none.json'),
                      ('loss out/run --edit e.json', 'RUN'),
                      ('similarity --from out/run --edit e.json', 'unrecognized')):
        assert why in error_of(capsys, *argv.split())


def test_runs_that_are_named_have_a_row_each(pair, capsys):
    """Of gender what the model has, and its fall without the sense; of similarity the best sense's."""
    for name in ('gender', 'similarity'):
        own, *rest = (rows_of(capsys, name, *argv) for argv in (
            ['out/run_8', 'out/run'], ['--from', 'out/run_8'], ['--from', 'out/run']))
        assert len(own) == 2
        for row, alone, k in zip(own, rest, (8, 4)):
            if name == 'gender':
                label = alone[1][0].replace(', without', '; reduced without')
                assert row == [label, *(alone[i == 2 or i == 4][i] for i in range(1, 7))]
            else:
                best = [max(r[i] for r in alone[:k]) for i in (1, 2)]
                assert row[1:] == best and row[0] == f'Backpack {"out/run" if k == 4 else "out/run_8"}'


def test_the_best_is_compared_with_the_best(pair, capsys):
    """The baseline of a file is the file of that name in the folder beside, of a folder the folder beside."""
    for name in ('run', 'run_gpt'):
        shutil.copy(f'out/{name}/ckpt.pt', f'out/{name}/best.pt')
    for file in ('', '/best.pt'):
        assert f'\nTransformer out/run_gpt{file} ' in say(capsys, 'loss', '--from', f'out/run{file}')


@pytest.mark.parametrize('argv, said', [
    ('gendre', 'invalid choice'), ('loss --texts 3', 'unrecognized'), ('topic --texts 0', 'from 1 to'),
    ('loss --json no/such/x.json', '--json'), ('loss --data x', 'prepare.py'), ('loss --device gpu', 'gpu'),
    ('lambada --data out', 'run curl'), ('blimp --data bench/wiki.test.raw', 'bench/wiki.test.raw'),
    ('wikitext --data bench/lambada_test.jsonl', 'lambada_test.jsonl'), ('gender --from out/run_gpt', 'no '),
    ('similarity --data bench', 'SimLex-999.txt'), ('similarity --data RG65.csv', 'RG65.csv holds no'),
    ('loss --baseline out/run', 'takes a Transformer'),
    ('timing --size small --from out/run', 'go without'), ('loss out/run --from out/run', 'RUN'),
    ('loss out/none', 'out/none'), ('plot --out x.svg', 'RUN'),
    ('plot out/run --out x.png', '.svg'), ('plot out/none --out x.svg', 'out/none/ckpt.pt'),
    ('plot out/run --out x.svg', 'log.csv')])
def test_bad_input_is_one_line_and_exit_code_2(pair, capsys, argv, said):
    """What was given, what is allowed, what to run; the file where one is malformed, or empty."""
    Path('RG65.csv').touch()
    assert said in error_of(capsys, *argv.split())
