"""Claims about eval.py: each command end to end, on random models."""

import os
import shutil
import threading
from functools import partial
from pathlib import Path

import helpers
import pandas
import pytest
import torch
from helpers import WORDS, error_of, make_data, save, toy_loaded, write_benchmarks

from rucksack import eval as tables
from rucksack.errors import UserError
from rucksack.paper import gender, topics
from rucksack.tokenizer import words_tokenizer
from rucksack.weights import BUNDLED

say = partial(helpers.say, tables)
ALL = ['all', '--from=out/run', '--data=bench', '--texts=1', '--length=4', '--step-sizes=.05',
       '--dtype=float32']

IN_ALL = [name for name, kind in tables.TABLES.items() if kind.number]


@pytest.fixture(autouse=True)
def runs(folder, monkeypatch):
    """Make a working directory with models, data, benchmarks and two nouns."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table'])
    for name, n_sense in (('run', 4), ('run_gpt', 0), ('run_2', 2)):
        loaded = toy_loaded(n_sense, block_size=128)
        save(f'out/{name}', loaded.model, loaded.tokenizer)
    val_ids = loaded.encode(WORDS) * 9
    make_data([0], val_ids, tokenizer=loaded.tokenizer, vocab_size=loaded.encoding.n_vocab)
    write_benchmarks(Path('bench'))


def rows_of(capsys, *argv: str) -> list[dict]:
    """Return the rows of a command's tables, as --csv writes them."""
    say(capsys, *argv, '--csv=x.csv')
    return pandas.read_csv('x.csv', dtype=str, keep_default_na=False).to_dict('records')


def test_all_writes_every_table_to_csv(capsys):
    """eval.py all measures loss on the run's own data: --data is for the English benchmarks."""
    rows = rows_of(capsys, *ALL)
    losses = rows_of(capsys, 'loss', '--from=out/run')
    assert list(dict.fromkeys(row['rucksack_table'] for row in rows)) == IN_ALL
    assert [row['perplexity'] for row in rows[:2]] == [row['perplexity'] for row in losses]


def test_all_skips_the_table_of_a_damaged_file_alone(capsys):
    """A line names the damaged file, and all other tables are made."""
    Path('bench/lambada_test.jsonl').write_text('{"text": ')
    text = say(capsys, *ALL, '--csv=x.csv')
    skipped, = [line for line in text.splitlines() if ': skipped, ' in line]
    assert skipped.startswith('lambada: ')
    assert 'bench' in skipped
    assert {*pandas.read_csv('x.csv').rucksack_table} == {*IN_ALL} - {'lambada'}


@pytest.mark.parametrize('name, data, n_rows', [
    ('loss', 'tiny', 1), ('lambada', 'bench', 1), ('wikitext', 'bench', 1),
    ('gender', 'nouns.txt', 3)])
def test_edit_adds_rows_and_changes_no_other(name, data, n_rows, capsys):
    """The rows of the edited model follow the unchanged rows of the unedited one."""
    Path('nouns.txt').write_text('nurse\ntable\n')
    plain = rows_of(capsys, name, '--from=out/run', '--data', data)
    rows = rows_of(capsys, name, '--from=out/run', '--data', data, '--edit', '*:0-2')
    under_edit = list(rows[n_rows].values())
    assert rows[:n_rows] + rows[2 * n_rows:] == plain
    assert under_edit[1] == 'Backpack out/run under *:0-2'
    assert under_edit[2:] != list(plain[0].values())[2:]


@pytest.mark.parametrize('name, file, text', [
    ('loss', 'a.txt', 'the nurse said'), ('loss', 'a.jsonl', '{"text": "the nurse said"}'),
    ('gender', 'a.txt', 'nurse'), ('examples', 'a.txt', '- the nurse -> said')])
def test_data_may_be_a_pipe(name, file, text, capsys):
    """--data <(command) gives the numbers of a file, although both models read it."""
    argv = [name, '--from=out/run_2', '--edit', '*:0', '--data']
    Path(file).write_text(text)
    pipe = Path('pipes', file)
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[text], daemon=True)
    writer.start()
    assert rows_of(capsys, *argv, str(pipe)) == rows_of(capsys, *argv, file)


def test_a_table_is_printed_though_csv_cannot_be_written(capsys):
    """A table that took an hour to make is printed even if its file cannot be written."""
    Path('x.csv.partial').mkdir()
    with pytest.raises(SystemExit) as stop:
        tables.main(['loss', '--from=out/run', '--csv=x.csv', '--device=cpu'])
    assert stop.value.code == 2
    assert '\nLoss (Tables 2 and 8)' in capsys.readouterr().out


@pytest.mark.parametrize('data', ['tiny', 'tiny/val.bin', 'elsewhere', 'elsewhere/val.bin'])
def test_data_of_a_loss_can_be_anywhere(data, capsys):
    """--data may be a folder in data/, one elsewhere, or a .bin file in either."""
    shutil.copytree('data/tiny', 'elsewhere')
    expected = rows_of(capsys, 'loss', '--from=out/run')
    assert rows_of(capsys, 'loss', '--from=out/run', '--data', data) == expected


def test_losses_of_named_runs_have_a_row_each(capsys):
    """Each run's row has its number of senses, and the same loss as with --from."""
    own, other = rows_of(capsys, 'loss', 'out/run_2', 'out/run')
    alone, _ = rows_of(capsys, 'loss', '--from=out/run')
    assert own['senses'] == '2'
    assert other == alone


@pytest.mark.parametrize('source, baseline', [
    ('out/run', 'out/run_gpt'), ('out/run/', 'out/run_gpt'), ('english', 'english_gpt')])
def test_the_baseline_is_the_transformer_beside_it(source, baseline, capsys, monkeypatch):
    """The baseline's name is the Backpack's name followed by _gpt."""
    monkeypatch.setitem(BUNDLED, 'english', Path('out/run'))
    monkeypatch.setitem(BUNDLED, 'english_gpt', Path('out/run_gpt'))
    text = say(capsys, 'loss', '--from', source, '--data=tiny')
    assert f'\nTransformer {baseline}: ' in text


def change_words(run: str) -> None:
    """Replace the words in a checkpoint with the same number of other words."""
    state = torch.load(f'{run}/ckpt.pt')
    state['tokenizer'] = words_tokenizer([f' {word.upper()}' for word in WORDS.split()])
    torch.save(state, f'{run}/ckpt.pt')


@pytest.mark.parametrize('changed, flags, named', [
    ('out/run_gpt', ['--from=out/run', '--baseline=out/run_gpt'], 'out/run_gpt'),
    ('out/run_2', ['--from=out/run_2'], 'data/tiny')])
def test_other_words_are_not_compared(changed, flags, named, capsys):
    """A baseline or dataset with as many words, but different ones, is refused by name."""
    change_words(changed)
    assert named in error_of(tables, capsys, 'loss', *flags, '--data=tiny')


def test_a_baseline_nobody_asked_for_stops_nothing(capsys):
    """A default baseline that does not fit is left out, and a line names it."""
    change_words('out/run_gpt')
    text = say(capsys, 'loss', '--from=out/run', '--data=tiny')
    assert 'No baseline: out/run_gpt' in text
    assert '\nBackpack out/run ' in text


def test_a_file_is_named_before_a_folder_of_data(capsys):
    """--data mine.txt reads ./mine.txt, even if data/mine.txt exists."""
    Path('mine.txt').write_text('the nurse said that she')
    Path('data/mine.txt').write_text('music')
    row, _ = rows_of(capsys, 'loss', '--from=out/run', '--data=mine.txt')
    assert row['on tokens'] == str(len(toy_loaded().encode('the nurse said that she')))


def test_a_model_without_its_data_names_a_text_that_ships(capsys):
    """The loss of a bundled model needs --data; the error suggests a file of this repository."""
    line = error_of(tables, capsys, 'loss', '--from=english')
    text = line.split('--data ')[1].split()[0]
    assert (helpers.ROOT / text).exists()



def test_the_dataset_of_a_checkpoint_is_a_name_in_data(capsys):
    """A checkpoint's dataset cannot be a path: only data/NAME is read without --data."""
    state = torch.load('out/run/ckpt.pt')
    state['settings']['dataset'] = str(Path('data/tiny').absolute())
    torch.save(state, 'out/run/ckpt.pt')
    assert 'data/tiny' in error_of(tables, capsys, 'loss', '--from=out/run')


def test_each_row_of_topic_is_written_when_it_is_made(monkeypatch, capsys):
    """If a row fails, the rows before it stay in the .csv file and on the screen."""
    make = topics.topic_row

    def fail_at_strength_1(loaded, name, *args):
        if name.endswith('1'):
            raise UserError('it fails')
        return make(loaded, name, *args)

    monkeypatch.setattr(topics, 'topic_row', fail_at_strength_1)
    with pytest.raises(SystemExit):
        tables.main(['topic', '--from=out/run', '--texts=1', '--length=4', '--csv=x.csv'])
    row, = pandas.read_csv('x.csv').to_dict('records')
    assert row['model'] == 'Backpack out/run, strength 0'
    assert '\nBackpack out/run, strength 0 ' in capsys.readouterr().out
