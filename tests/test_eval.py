"""Claims about rucksack eval: each command end to end, on random models."""

import os
import shutil
from functools import partial
from pathlib import Path

import helpers
import pandas
import pytest
import torch
from helpers import WORDS, error_of, make_data, save, toy_loaded, write_benchmarks

from rucksack.paper import eval as tables
from rucksack.paper import gender
from rucksack.tokenizer import words_tokenizer

say = partial(helpers.say, tables)
ALL = ['all', '--from=out/run', '--data=bench', '--dtype=float32']


@pytest.fixture(autouse=True)
def runs(folder, monkeypatch):
    """Make a working directory with models, data, benchmarks, word pairs and two nouns."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table'])
    for name, n_sense in (('run', 4), ('run_gpt', 0), ('run_2', 2)):
        loaded = toy_loaded(n_sense, block_size=128)
        save(f'out/{name}', loaded.model, loaded.tokenizer)
    val_ids = loaded.encode(WORDS) * 9
    make_data([0], val_ids, tokenizer=loaded.tokenizer, vocab_size=loaded.encoding.n_vocab)
    write_benchmarks(Path('bench'))
    Path('bench/RG65.csv').write_text('song;music;3.9\nchair;song;0.1\ntable;chair;2\n')


def rows_of(capsys, *argv: str) -> list[dict]:
    """Return the rows of a command's tables, as --csv writes them."""
    say(capsys, *argv, '--csv=x.csv')
    return pandas.read_csv('x.csv', dtype=str, keep_default_na=False).to_dict('records')


def test_all_writes_every_table_to_csv(capsys):
    """eval all measures loss on the run's own data: --data is for the English benchmarks."""
    rows = rows_of(capsys, *ALL)
    losses = rows_of(capsys, 'loss', '--from=out/run')
    assert list(dict.fromkeys(row['rucksack_table'] for row in rows)) == tables.IN_PAPER
    assert [row['perplexity'] for row in rows[:2]] == [row['perplexity'] for row in losses]


def test_all_skips_the_table_without_data_alone(capsys):
    """A line names the missing file, and all other tables are printed."""
    Path('bench/lambada_test.jsonl').unlink()
    text = say(capsys, *ALL, '--csv=x.csv')
    skipped, = [line for line in text.splitlines() if ': skipped, ' in line]
    assert skipped.startswith('lambada: skipped, bench')
    assert {*pandas.read_csv('x.csv').rucksack_table} == {*tables.IN_PAPER} - {'lambada'}


@pytest.mark.parametrize('name, data, n_rows', [
    ('loss', ['--data=tiny'], 1), ('lambada', ['--data=bench'], 1),
    ('wikitext', ['--data=bench'], 1), ('gender', [], 6)])
def test_edit_adds_rows_and_changes_no_other(name, data, n_rows, capsys):
    """The rows of the edited model follow the unchanged rows of the unedited one."""
    plain = rows_of(capsys, name, '--from=out/run', *data)
    rows = rows_of(capsys, name, '--from=out/run', *data, '--edit', '*:0-2')
    under_edit = list(rows[n_rows].values())
    assert rows[:n_rows] + rows[2 * n_rows:] == plain
    assert under_edit[1] == 'Backpack out/run under *:0-2'
    assert under_edit[2:] != list(plain[0].values())[2:]


@pytest.mark.parametrize('data', ['tiny', 'tiny/val.bin', 'elsewhere', 'elsewhere/val.bin'])
def test_data_of_a_loss_can_be_anywhere(data, capsys):
    """--data may be a folder in data/, one elsewhere, or a .bin file in either."""
    shutil.copytree('data/tiny', 'elsewhere')
    expected = rows_of(capsys, 'loss', '--from=out/run')
    found = rows_of(capsys, 'loss', '--from=out/run', '--data', data)
    assert [row['perplexity'] for row in found] == [row['perplexity'] for row in expected]


def test_losses_of_named_runs_have_a_row_each(capsys):
    """Each run's row has its number of senses."""
    rows = rows_of(capsys, 'loss', 'out/run_2', 'out/run')
    assert [row['senses'] for row in rows] == ['2', '4']


def change_words(run: str) -> None:
    """Replace the words in a checkpoint with the same number of other words."""
    state = torch.load(f'{run}/ckpt.pt')
    state['tokenizer'] = words_tokenizer([f' {word.upper()}' for word in WORDS.split()])
    torch.save(state, f'{run}/ckpt.pt')


def test_a_baseline_with_other_words_is_left_out(capsys):
    """NAME_gpt with as many words, but different ones, has no row, and a line names it."""
    change_words('out/run_gpt')
    text = say(capsys, 'loss', '--from=out/run', '--data=tiny')
    assert 'No baseline: out/run_gpt' in text
    assert 'Transformer' not in text


def test_a_baseline_without_a_checkpoint_is_left_out(capsys):
    """While NAME_gpt has no checkpoint yet, NAME is measured alone, and a line says so."""
    Path('out/run_gpt/ckpt.pt').unlink()
    text = say(capsys, 'loss', '--from=out/run', '--data=tiny')
    assert 'No baseline: ' in text
    assert 'Transformer' not in text


def test_data_with_other_words_is_refused(capsys):
    """A dataset with as many words, but different ones, is refused by name."""
    change_words('out/run_2')
    assert 'data/tiny' in error_of(tables, capsys, 'loss', '--from=out/run_2', '--data=tiny')


def test_a_file_is_named_before_a_folder_of_data(capsys):
    """--data mine.txt reads ./mine.txt, even if data/mine.txt exists."""
    Path('mine.txt').write_text('the nurse said that she')
    Path('data/mine.txt').write_text('music')
    row, _ = rows_of(capsys, 'loss', '--from=out/run', '--data=mine.txt')
    assert row['on tokens'] == str(len(toy_loaded().encode('the nurse said that she')))


def test_a_tilde_is_ones_home_for_data_and_the_baseline(capsys, monkeypatch):
    """~ in --data=~/FILE and --from=~/NAME, which no shell replaces, finds NAME_gpt too."""
    monkeypatch.setenv('HOME', os.getcwd())
    Path('mine.txt').write_text('the nurse said that she')
    rows = rows_of(capsys, 'loss', '--from=~/out/run', '--data=~/mine.txt')
    assert [row['model'] for row in rows] == ['Backpack ~/out/run', 'Transformer ~/out/run_gpt']
