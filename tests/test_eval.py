"""Claims about eval.py: each command end to end, on random models."""

import csv
import json
import math
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import helpers
import pytest
import torch
from helpers import WORDS, make_data, save, toy_subject, write_benchmarks
from torch.nn import functional as F

from rucksack import eval as tables
from rucksack import sample
from rucksack.hub import BUNDLED
from rucksack.loaded import load_subject
from rucksack.model import Backpack, Config
from rucksack.paper import gender, timing
from rucksack.paper.likelihood import held_out, windows
from rucksack.senses import scale_senses
from rucksack.tokenizer import words_tokenizer
from rucksack.training.checkpoint import Training

say = partial(helpers.say, tables)
ALL = ['all', '--from=out/run', '--data=bench', '--texts=1', '--length=4', '--step-sizes=.05',
       '--json=all.json']
LOSS = 5  # the column of perplexity in the table of losses


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The working directory of the test, with a Backpack, its Transformer, two Backpacks, and data.

    Measuring is made fast: two nouns, and times that nobody took.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table'])
    monkeypatch.setattr(timing, 'alternate', lambda *args: [2000.0, 1000.0])
    for name, n_sense in (('run', 4), ('run_gpt', 0), ('run_2', 2), ('run_8', 8)):
        subject = toy_subject(n_sense, block_size=128)
        dataset = 'other' if name == 'run_8' else 'tiny'
        save(f'out/{name}', subject.model, subject.tokenizer, dataset)
    val_ids = subject.encode(WORDS) * 9
    make_data([0], val_ids, tokenizer=subject.tokenizer, vocab_size=subject.encoding.n_vocab)
    write_benchmarks(Path('bench'))


def rows_in(file: str) -> dict[str, list[list]]:
    """The rows of each table in a file of --json."""
    contents = json.loads(Path(file).read_text())
    return {name: table['rows'] for name, table in contents['tables'].items()}


def rows_of(capsys, name: str, *argv: str) -> list[list]:
    """The rows of a table, as --json writes them."""
    say(capsys, name, *argv, '--json=x.json')
    return rows_in('x.json')[name]


# -----------------------------------------------------------------------------
# All tables.


def test_all_makes_every_table(runs, capsys):
    """It prints each with the numbers of the JSON file, of the model and its Transformer."""
    text = say(capsys, *ALL)
    found = rows_in('all.json')
    assert list(found) == tables.IN_ALL
    assert '\nTransformer out/run_gpt: ' in text
    assert f'{found["loss"][0][LOSS]:.3f}' in text
    assert found['timing'][0][1:4] == [2000, 1000, 2]  # medians in ms, and their ratio
    for name, rows in found.items():
        column = LOSS if name == 'loss' else 1
        assert None not in [row[column] for row in rows], name


def test_a_malformed_file_skips_its_own_table_alone(runs, capsys):
    """The line on it names the file, and all other tables are made."""
    Path('bench/lambada_test.jsonl').write_text('{"text": ')
    text = say(capsys, *ALL)
    skipped, = [line for line in text.splitlines() if ': skipped, ' in line]
    assert skipped.startswith('lambada: ')
    assert 'lambada_test.jsonl' in skipped
    assert list(rows_in('all.json')) == [name for name in tables.IN_ALL if name != 'lambada']


@pytest.mark.parametrize('command, name, is_toy, data', [
    ('all', 'loss', True, None), ('all', 'loss', False, None), ('all', 'similarity', True, None),
    ('all', 'similarity', False, 'bench'), ('all', 'lambada', True, 'bench'),
    ('loss', 'loss', True, 'bench'), ('similarity', 'similarity', True, 'bench')])
def test_data_in_all_is_about_english(command, name, is_toy, data, monkeypatch):
    """Losses, and the similarity of the toy world, have data of their own: --data is not theirs."""
    monkeypatch.setattr(tables, f'{name}_table', lambda subjects, data, *more: data)
    subject = toy_subject()
    subject.is_toy = is_toy
    args = Namespace(size=None, table=command, runs=[], data='bench')
    assert tables.make_table(name, [subject], args) == data


# -----------------------------------------------------------------------------
# Models under an edit.


@pytest.fixture
def edits(runs, capsys):
    """Two files of edits: e.json without a topic, t.json with one."""
    save_edit = partial(helpers.say, sample, capsys, '--from=out/run', '--max-new-tokens=0')
    save_edit('--senses-off=*:0-2', '--save-edit=e.json')
    save_edit('--topic=music', '--save-edit=t.json')


@pytest.mark.parametrize('name, data, n_rows', [
    ('loss', [], 1), ('lambada', ['--data=bench'], 1), ('wikitext', ['--data=bench'], 1),
    ('gender', [], 3)])
def test_an_edit_has_rows_of_its_own(name, data, n_rows, edits, capsys):
    """They follow those of the model as it is, and no other row changes."""
    plain = rows_of(capsys, name, '--from=out/run', *data)
    both = rows_of(capsys, name, '--from=out/run', *data, '--edit=e.json')
    as_it_is = both[:n_rows]
    under_edit = both[n_rows:2 * n_rows]
    others = both[2 * n_rows:]
    assert as_it_is + others == plain
    assert len(under_edit) == n_rows
    assert under_edit[0][0].startswith('Backpack out/run under e.json')
    assert under_edit[0][1:] != as_it_is[0][1:]


def test_an_edit_has_a_column_of_its_own_in_blimp(edits, capsys):
    """It follows that of the model as it is, and no other column changes."""
    plain = rows_of(capsys, 'blimp', '--from=out/run', '--data=bench')
    both = rows_of(capsys, 'blimp', '--from=out/run', '--data=bench', '--edit=e.json')
    as_it_is = [row[1] for row in both]
    under_edit = [row[2] for row in both]
    assert [[row[0], row[1], row[3]] for row in both] == plain
    assert under_edit != as_it_is


def test_the_loss_of_an_edit_is_that_of_edited_senses(edits, capsys):
    """Perplexity is that of logits made by hand from senses that are turned off."""
    subject = load_subject('out/run', 'cpu')
    ids, _ = held_out(subject, None)
    edit = scale_senses(None, [0, 1, 2], 0.0)
    nats = 0.0
    for (before,), block in windows(ids, subject.eot, 128, look_back=False):
        idx = torch.tensor([[before, *block[:-1]]])
        C = edit(idx, subject.model.senses(idx))
        logits = subject.model(idx, C=C)[0]
        nats += F.cross_entropy(logits, torch.tensor(block), reduction='sum').item()
    rows = rows_of(capsys, 'loss', '--from=out/run', '--edit=e.json')
    assert rows[1][LOSS] == pytest.approx(math.exp(nats / len(ids)), rel=1e-4)


def test_two_files_of_edits_are_one_edit(edits, capsys, runs):
    """The loss under both is that under one file with the edits of both."""
    save_edit = partial(helpers.say, sample, capsys, '--from=out/run', '--max-new-tokens=0')
    save_edit('--senses-off=nurse:3', '--save-edit=n.json')
    save_edit('--senses-off', '*:0-2', 'nurse:3', '--save-edit=both.json')
    two = rows_of(capsys, 'loss', '--from=out/run', '--edit=e.json', '--edit=n.json')
    one = rows_of(capsys, 'loss', '--from=out/run', '--edit=both.json')
    alone = rows_of(capsys, 'loss', '--from=out/run', '--edit=e.json')
    assert two[1][0] == 'Backpack out/run under e.json and n.json'
    assert two[1][LOSS] == pytest.approx(one[1][LOSS], rel=1e-6)
    assert two[1][LOSS] != alone[1][LOSS]


def test_files_are_written_whoever_reads_the_table(runs, monkeypatch):
    """Printing into a closed pipe ends the program; by then the files are there."""
    def print_about(text, **more):
        if '\n' in text:  # a table
            raise BrokenPipeError

    monkeypatch.setattr(tables, 'print', print_about, raising=False)
    with pytest.raises(BrokenPipeError):
        tables.run(['loss', '--from=out/run', '--json=x.json', '--csv=x.csv', '--device=cpu'])
    assert len(rows_in('x.json')['loss']) == 2
    assert Path('x.csv').stat().st_size > 0


def test_a_table_is_printed_though_its_file_cannot_be_written(runs, capsys, monkeypatch):
    """What took an hour to make is not lost to a full disk."""
    def write_json(*args):
        raise OSError('No space left on device')

    monkeypatch.setattr(tables, 'write_json', write_json)
    with pytest.raises(SystemExit) as stop:
        tables.main(['loss', '--from=out/run', '--json=x.json', '--device=cpu'])
    printed, said = capsys.readouterr()
    assert stop.value.code == 2
    assert 'No space left' in said
    assert '\nLoss (Tables 2 and 8)' in printed


def test_csv_has_the_rows_of_all_tables(runs, capsys):
    """With the name of the table first, and the numbers of the JSON file."""
    say(capsys, *ALL, '--csv=all.csv')
    found = rows_in('all.json')
    with open('all.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['table'] for row in rows] == [name for name in found for _ in found[name]]
    perplexities = [float(row['perplexity']) for row in rows if row['table'] == 'loss']
    assert perplexities == [row[LOSS] for row in found['loss']]


def test_the_data_of_a_loss_can_be_anywhere(runs, capsys):
    """A folder in data/, one elsewhere, or a .bin file in either."""
    expected = rows_of(capsys, 'loss', '--from=out/run')
    shutil.copytree('data/tiny', 'elsewhere')
    for data in ('tiny', 'tiny/val.bin', 'elsewhere', 'elsewhere/val.bin'):
        assert rows_of(capsys, 'loss', '--from=out/run', f'--data={data}') == expected


def test_timing_is_as_the_model_was_trained(monkeypatch):
    """In its number format, compiled or not."""
    asked = []

    def timing_table(config, machine, compile):
        asked.append((machine.dtype, compile))

    monkeypatch.setattr(tables, 'timing_table', timing_table)
    for dtype, compile in (('float64', True), ('float32', False)):
        subject = toy_subject()
        subject.training = Training('tiny', 480, dtype, compile)
        tables.time_subject(subject, Namespace(device='cpu', dtype=None))
    assert asked == [('float64', True), ('float32', False)]


# -----------------------------------------------------------------------------
# Which models are compared.


def test_losses_of_named_runs_have_a_row_each(runs, capsys):
    """A row has the senses of a model, the tokens it has seen, and the loss that --from finds."""
    own, other = rows_of(capsys, 'loss', 'out/run_2', 'out/run')
    alone, _ = rows_of(capsys, 'loss', '--from=out/run')
    seen = 10 * 3 * 2 * 8 / 1e6  # steps, texts, micro-batches, tokens of a text; in millions
    assert own[:2] == ['Backpack out/run_2', 2]
    assert own[4] == seen
    assert other == alone


def test_gender_of_named_runs_has_the_rows_of_each(runs, capsys):
    """As if each were named alone."""
    rows = rows_of(capsys, 'gender', 'out/run_8', 'out/run')
    alone = [rows_of(capsys, 'gender', '--from', source)[:3] for source in ('out/run_8', 'out/run')]
    assert rows == alone[0] + alone[1]


@pytest.mark.parametrize('file', ['', '/best.pt'])
def test_the_best_is_compared_with_the_best(file, runs, capsys):
    """The baseline of a folder is the folder beside it, that of a file the same file in there."""
    for name in ('run', 'run_gpt'):
        shutil.copy(f'out/{name}/ckpt.pt', f'out/{name}/best.pt')
    text = say(capsys, 'loss', '--from', f'out/run{file}')
    assert f'\nTransformer out/run_gpt{file}: ' in text


def test_the_bundled_transformer_is_the_bundled_baseline(runs, capsys, monkeypatch):
    """Right after the installation, english is compared with english_gpt."""
    monkeypatch.setitem(BUNDLED, 'english', Path('out/run'))
    monkeypatch.setitem(BUNDLED, 'english_gpt', Path('out/run_gpt'))
    text = say(capsys, 'loss', '--from', 'english', '--data', 'tiny')
    assert '\nTransformer english_gpt: ' in text


def make_unusable(baseline: Path, why: str) -> None:
    """Put something in place of a Transformer that it cannot be compared with."""
    (baseline / 'ckpt.pt').unlink()
    if why == 'started':  # train.py is still compiling
        (baseline / 'log.csv').touch()
    if why == 'Backpack':
        shutil.copy('out/run_2/ckpt.pt', baseline)
    if why == 'vocabularies':
        baseline.rmdir()
        other = toy_subject(0)
        save(str(baseline), other.model, other.tokenizer)
        state = torch.load(baseline / 'ckpt.pt')
        state['tokenizer'] = words_tokenizer([' nurse'])
        torch.save(state, baseline / 'ckpt.pt')


@pytest.mark.parametrize('why', ['started', 'Backpack', 'vocabularies'])
def test_a_baseline_that_nobody_named_may_be_unusable(why, runs, capsys):
    """The model is measured alone, and a line says why; a baseline that was named is an error."""
    make_unusable(Path('out/run_gpt'), why)
    text = say(capsys, 'loss', '--from=out/run', '--json=x.json')
    line, = [line for line in text.splitlines() if line.startswith('no baseline: ')]
    assert 'out/run_gpt' in line
    assert len(rows_in('x.json')['loss']) == 1
    said = helpers.error_of(tables, capsys, 'loss', '--from=out/run', '--baseline=out/run_gpt')
    reason, *_ = line.removeprefix('no baseline: ').split(' (')
    assert reason in said


# -----------------------------------------------------------------------------
# Bad input.


def assert_refused(capsys, argv: str, part: str) -> None:
    """Assert that a command says one line with some part in it, and makes no file."""
    before = sorted(Path().rglob('*'))
    assert part in helpers.error_of(tables, capsys, *argv.split())
    assert sorted(Path().rglob('*')) == before


@pytest.mark.parametrize('argv, part', [
    ('gendre', 'gendre'),
    ('loss --texts 3', '--texts'),
    ('topic --texts 0', '--texts'),
    ('loss --json no/such/x.json', 'no/such/x.json'),
    ('loss --csv x.json', 'x.json'),
    ('loss --data x --json x.json', 'data/x'),
    ('loss --device gpu', 'gpu'),
    ('loss --from out/run_8', 'data/other'),
    ('loss out/none', 'out/none'),
    ('loss out/run --from out/run', '--from'),
    ('loss --from out/run --baseline out/run_8', 'out/run_8'),
    ('lambada --data nowhere', 'nowhere'),
    ('lambada --data out/run_8', 'out/run_8'),
    ('blimp --data bench/wiki.test.raw', 'bench/wiki.test.raw'),
    ('wikitext --data bench/lambada_test.jsonl', 'lambada_test.jsonl'),
    ('gender --from out/run_gpt', 'out/run_gpt'),
    ('similarity --data bench', 'SimLex-999.txt'),
    ('similarity --data RG65.csv', 'RG65.csv'),
    ('timing --size small --from out/run', '--from')])
def test_bad_input_is_one_line_and_exit_code_2(argv, part, runs, capsys):
    """The line names what was given, or what is missing."""
    Path('RG65.csv').touch()
    assert_refused(capsys, argv, part)


@pytest.mark.parametrize('argv, part', [
    ('loss --from out/run --edit t.json', 't.json'),
    ('loss --from out/run --edit none.json', 'none.json'),
    ('loss out/run --edit e.json', '--edit'),
    ('gender --from out/run_gpt --edit e.json', 'out/run_gpt'),
    ('similarity --from out/run --edit e.json', '--edit')])
def test_an_edit_that_cannot_be_scored_is_refused(argv, part, edits, capsys):
    """A topic's annealing would see the future of a text, and a Transformer has no senses."""
    assert_refused(capsys, argv, part)


def test_a_table_does_not_replace_the_edit_that_it_scores(edits, capsys):
    """--json with the file of --edit is refused, and the edit stays."""
    saved = Path('e.json').read_bytes()
    assert_refused(capsys, 'loss --from out/run --edit e.json --json ./e.json', './e.json')
    assert Path('e.json').read_bytes() == saved


def save_other_words() -> None:
    """A Backpack in out/other that knows neither she nor he."""
    tokenizer = words_tokenizer([' nurse table'])
    config = Config(n_layer=1, n_head=1, n_embd=8, n_sense=2, vocab_size=259, block_size=64)
    model = Backpack(config)
    save('out/other', model, tokenizer)


@pytest.mark.parametrize('argv, parts', [
    ('loss --from out/other --data tiny', ['259', 'data/tiny', '--like out/other']),
    ('gender out/run out/other', ['out/other', "'she'"])])
def test_a_model_of_other_words_is_named(argv, parts, runs, capsys):
    """What it lacks is in the line, among the names of other runs too."""
    save_other_words()
    said = helpers.error_of(tables, capsys, *argv.split())
    for part in parts:
        assert part in said
