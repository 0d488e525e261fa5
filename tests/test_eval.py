"""Claims about eval.py: each command end to end, on random models."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import pytest
from subjects import WORDS, save, toy_subject, write_benchmarks

import eval as tables
from rucksack import likelihood, timing, words

say, error_of = partial(conftest.say, tables), partial(conftest.error_of, tables)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """The working directory of the test, with a Backpack, its Transformer, one of fewer senses, and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(words, 'NOUNS', ['nurse', 'table'])
    monkeypatch.setattr(timing, 'alternate', lambda works, *_: [(1.0, 2.0)] * len(works))
    s = toy_subject(block_size=128)
    conftest.make_data([0], s.encode(WORDS) * 9, tokenizer=s.model.tokenizer, vocab_size=s.encoding.n_vocab)
    for name, k in (('run', 4), ('run_gpt', 0), ('run_2', 2)):
        save(tmp_path / 'out' / name, toy_subject(k, block_size=128).model, s.model.tokenizer, dataset='tiny',
             batch_size=3, gradient_accumulation_steps=2, block_size=8)
    write_benchmarks(tmp_path / 'bench')
    return tmp_path


def test_every_table_runs_on_random_models(pair, capsys):
    """all goes through all tables with a Backpack and a Transformer, from one folder of data, and writes the
    same numbers as JSON. The ablation finds the runs of the same shape; cost and plot are not part of all."""
    text = say(capsys, 'all', '--from', 'out/run', '--data', 'bench', '--texts=1', '--length=4', '--step_sizes=.05',
               '--json', 'all.json')
    found = json.loads(Path('all.json').read_text())['tables']
    assert [*found, 'cost', 'plot'] == list(tables.TABLES) and 'Transformer out/run_gpt' in text
    assert all(row[1] is not None for table in found.values() for row in table['rows'])
    assert [row[:2] + row[4:5] for row in found['ablation']['rows']] == [['out/run_2', 2, 10 * 48 / 1e6],
                                                                        ['out/run', 4, 10 * 48 / 1e6]]
    assert f'{found["loss"]["rows"][0][1]:.3f}' in text and f'{found["lambada"]["rows"][1][1]:.1f}' in text
    assert '170.1' in say(capsys, 'cost') and not list(Path().glob('.*partial*'))


def test_the_best_is_compared_with_the_best(pair, capsys):
    """The baseline of a file is the file of that name in the folder beside, of a folder the folder beside."""
    for name in ('run', 'run_gpt'):
        shutil.copy(f'out/{name}/ckpt.pt', f'out/{name}/best.pt')
    for file in ('', '/best.pt'):
        assert f'\nTransformer out/run_gpt{file} ' in say(capsys, 'loss', '--from', f'out/run{file}')
    assert 'train out/run_2_gpt with' in say(capsys, 'loss', '--from', 'out/run_2')


def test_all_tables_go_on_where_one_file_is_malformed(pair, capsys, monkeypatch):
    """all prints the tables it can, says which it skips, and leaves with exit code 2 where a file is wrong
    rather than missing."""
    Path('bench/lambada_test.jsonl').write_text('{"text": ')
    monkeypatch.setattr(tables, 'TABLES', {name: tables.TABLES[name] for name in ('lambada', 'wikitext')})
    with pytest.raises(SystemExit) as stop:
        tables.main(['all', '--from', 'out/run', '--data', 'bench'])
    shown, error = capsys.readouterr()
    assert stop.value.code == 2 and 'lambada_test.jsonl' in error and error.count('\n') == 1
    assert '\nlambada: skipped, ' in shown and 'WikiText (Table 2)' in shown


@pytest.mark.parametrize('argv, said', [
    ('gendre', 'invalid choice'), ('loss --texts 3', 'unrecognized'), ('topic --texts 0', 'from 1 to'),
    ('loss --json no/such/x.json', '--json'), ('loss --data nothing', 'prepare.py'), ('loss --device gpu', 'gpu'),
    ('loss --data data/odd', 'another vocabulary'), ('lambada --data out', 'run curl'), ('loss --from x', 'x'),
    ('blimp --data bench/wiki.test.raw', 'bench/wiki.test.raw'), ('wikitext --data bad.jsonl', 'bad.jsonl'),
    ('similarity --data bench', 'SimLex-999.txt'), ('gender --from out/run_gpt', 'no senses'),
    ('loss --baseline out/run', 'takes a Transformer'), ('ablation out/run', '--n_sense'),
    ('plot out/run --sweep nurse:1 --out x.svg', 'not allowed with'), ('plot --out x.svg', 'required'),
    ('plot out/run --out x.png', '.svg'), ('plot out/none --out x.svg', 'out/none/ckpt.pt'),
    ('plot out/run --out x.svg', 'log.csv'), ('plot --sweep nurse:9 --out x.svg', 'no sense 9')])
def test_bad_input_is_one_line_and_exit_code_2(pair, capsys, argv, said):
    """What was given, what is allowed, what to run; the file where one is malformed."""
    Path('bad.jsonl').write_text('{"text": 3}\n')
    Path('data/odd').mkdir()
    np.zeros(9, 'uint16').tofile('data/odd/val.bin')  # a nanoGPT folder, so GPT-2's tokens
    assert said in error_of(capsys, *argv.split())
