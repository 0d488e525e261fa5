"""Claims about eval.py: each command end to end, on random models."""

import json
import shutil
from functools import partial
from pathlib import Path

import conftest
import pytest
from subjects import WORDS, save, toy_subject, write_benchmarks

import eval as tables
from rucksack import timing, words

say, error_of = partial(conftest.say, tables), partial(conftest.error_of, tables)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The working directory of the test, with a Backpack, its Transformer, other Backpacks, and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'table'])
    monkeypatch.setattr(timing, 'alternate', lambda works, *_: [(1.0, 2.0, 9.0), (1.0, 1.0, 4.0)])
    for name, k in (('run', 4), ('run_gpt', 0), ('run_2', 2), ('run_8', 8)):
        s = toy_subject(k, block_size=128)
        run = dict(batch_size=3, gradient_accumulation_steps=2, block_size=8)
        save(f'out/{name}', s.model, dataset='other' if k == 8 else 'tiny', **run)
    conftest.make_data([0], s.encode(WORDS) * 9, tokenizer=s.model.tokenizer, vocab_size=s.encoding.n_vocab)
    write_benchmarks(Path('bench'))


def test_every_table_runs_on_random_models(pair, capsys):
    """all makes every table, and JSON of them; a malformed file is said twice, and skips its own alone."""
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
    with pytest.raises(SystemExit, match='2'):
        tables.main(argv)
    text = capsys.readouterr().out
    assert '\nlambada: skipped, ' in text and 'lambada_test.jsonl' in text and 'WikiText (Table 2)' in text


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
    ('similarity --data bench', 'SimLex-999.txt'), ('loss --baseline out/run', 'takes a Transformer'),
    ('timing --size small --from out/run', '--from goes without'), ('loss out/run --from out/run', 'RUN'),
    ('loss out/none', 'out/none'), ('plot --out x.svg', 'RUN'),
    ('plot out/run --out x.png', '.svg'), ('plot out/none --out x.svg', 'out/none/ckpt.pt'),
    ('plot out/run --out x.svg', 'log.csv')])
def test_bad_input_is_one_line_and_exit_code_2(pair, capsys, argv, said):
    """What was given, what is allowed, what to run; the file where one is malformed."""
    assert said in error_of(capsys, *argv.split())
