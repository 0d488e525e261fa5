"""Claims about reading documents: nothing is left out, or taken for text, without a word."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers import tar

from rucksack.cli import UserError
from rucksack.documents import files_in, read_texts

pytestmark = pytest.mark.usefixtures('folder')


def texts_of(path: str, field: str = 'text') -> tuple[list[str], Counter]:
    """The texts of a file, and what was skipped."""
    skipped = Counter()
    rows = read_texts([path], field, skipped, 'cache')
    return rows['text'][:], skipped


def error_of(path: str, field: str = 'text') -> str:
    """What is said of a file that cannot be read."""
    with pytest.raises(UserError) as error:
        read_texts([path], field, Counter(), 'cache')
    return str(error.value)


def write_rows(rows: list, name: str = 'a.jsonl') -> str:
    """Write rows as JSON lines; returns the name of the file."""
    Path(name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return name


@pytest.mark.parametrize('late', [{'tag': 'x'}, {'tag': 3, 'more': {'a': [1]}}, {'2020': None}])
def test_only_the_field_asked_for_is_looked_at(late):
    """Other fields may change their type, or appear, in the last of many rows."""
    rows = [{'text': f'{i} ' * 500, 'tag': None} for i in range(3000)]
    rows += [{'text': 'last', **late}]
    texts, skipped = texts_of(write_rows(rows))
    assert len(texts) == 3001
    assert texts[-1] == 'last'
    assert not skipped


def test_a_field_that_is_no_text_is_named_with_its_row():
    """Only fields of text are offered in its place."""
    rows = [{'text': 'a', 'body': 'b', 'n': 1}, {'text': 7, 'body': 'b', 'n': 1}]
    said = error_of(write_rows(rows))
    assert 'row 2' in said
    assert said.endswith('--field: body')


def test_rows_without_a_text_are_counted_as_empty():
    """None, nothing, and no such field."""
    texts, skipped = texts_of(write_rows([{'text': None}, {'text': ''}, {}, {'text': 'a'}]))
    assert texts == ['a']
    assert skipped == {'empty': 3}


@pytest.mark.parametrize('line', ['{"text": "\\ud800"}', '{"text": ', '[1]'])
def test_a_row_that_cannot_be_read_is_named_by_its_number(line):
    """Half of a surrogate pair, half of an object, or no object."""
    Path('a.jsonl').write_text('{"text": "2020-01-01"}\n\n' + line + '\n')
    assert 'row 2' in error_of('a.jsonl')


def test_a_column_that_is_no_text_is_not_read():
    """Only columns of text are offered in its place."""
    table = pyarrow.table({'text': [1, 2], 'body': ['b', 'c']})
    pyarrow.parquet.write_table(table, 'a.parquet')
    assert error_of('a.parquet').endswith('--field: body')
    assert texts_of('a.parquet', 'body')[0] == ['b', 'c']


BOM = b'\xef\xbb\xbf'


def test_a_tar_has_its_regular_files_that_are_not_hidden():
    """What is skipped is counted: the files of macOS, other kinds."""
    members = {'d/a.txt': BOM + b'a', 'd/._a.txt': b'\0\5\x16junk', '.git/x.txt': b'x',
               'b.png': b'x', 'c.TXT': b''}
    Path('a.tar').write_bytes(tar(members))
    texts, skipped = texts_of('a.tar')
    assert texts == ['a']
    assert skipped == {'hidden': 2, 'of an unknown kind': 1, 'empty': 1}


@pytest.mark.parametrize('name, data', [
    ('a.txt', BOM + b'a'), ('a.jsonl', BOM + b'{"text": "a"}\n'),
    ('a.json', BOM + b' [{"text": "a"}]')])
def test_a_byte_order_mark_is_no_text(name, data):
    """Windows writes one at the beginning of a file."""
    Path(name).write_bytes(data)
    assert texts_of(name)[0] == ['a']


def test_links_to_folders_are_followed_once():
    """A loop ends; hidden files, broken links and unknown kinds are counted."""
    Path('in/sub').mkdir(parents=True)
    Path('out').mkdir()
    for name in ('in/a.txt', 'in/sub/b.md', 'out/c.txt', 'in/.d.txt', 'in/e.png'):
        Path(name).write_text('x')
    Path('in/linked').symlink_to('../out')
    Path('in/sub/loop').symlink_to('../../in')
    Path('in/broken.txt').symlink_to('nowhere')
    skipped = Counter()
    files = files_in(['in'], skipped)
    assert files == ['in/a.txt', 'in/linked/c.txt', 'in/sub/b.md']
    assert skipped == {'hidden': 1, 'not a file': 1, 'of an unknown kind': 1,
                       'a folder that was read already': 1}
