"""Claims about reading documents: nothing is silently left out or taken for text."""

import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import pyarrow
import pytest
from helpers import posix, tar
from pyarrow.parquet import write_table

from rucksack.documents import files_at, read_documents, read_tar
from rucksack.errors import UserError

pytestmark = pytest.mark.usefixtures('folder')


def texts_of(path: str, field: str = 'text') -> list[str]:
    """Return the texts of a file."""
    return list(read_documents(Path(path), field))


@pytest.mark.parametrize('line, fact', [
    ('{"text": ', 'row 2.*JSON'), ('{"text": 7}', 'int.*--field'), ('[1]', 'row 2'),
    ('{"text": false}', 'bool.*--field'), ('{"body": "b", "n": 1}', 'row 2.*text.*--field')])
def test_a_row_without_text_is_one_line(line, fact):
    """The error names the file and the row and, if the field is missing, --field."""
    Path('a.jsonl').write_text('{"text": "2020-01-01"}\n\n' + line + '\n')
    with pytest.raises(UserError, match=f'a.jsonl.*{fact}'):
        texts_of('a.jsonl')


@pytest.mark.parametrize('name, data, texts', [
    ('a.txt', b'a\r\nb', ['a\nb']), ('a.ndjson', b'{"text": "a\\r\\nb"}\r\n', ['a\nb']),
    ('a.txt', b'one\r\n<|endoftext|>\r\ntwo<|endoftext|>three\n', ['one', 'two', 'three'])])
def test_marks_returns_and_ends_of_text_are_not_in_a_text(name, data, texts):
    """A byte order mark and \\r are dropped, even inside a row; an end-of-text ends a document."""
    Path(name).write_bytes(b'\xef\xbb\xbf' + data)
    assert texts_of(name) == texts


@posix
def test_a_folder_has_its_known_files_each_once(capsys):
    """Linked files and folders are followed; a file is read once, whatever its names."""
    Path('in/sub').mkdir(parents=True)
    Path('other').mkdir()
    for name in ('in/a.txt', 'in/sub/b.md', 'c.txt', 'other/d.txt', 'in/._a.txt', 'in/e.png'):
        Path(name).write_text('x')
    Path('in/c.txt').symlink_to('../c.txt')
    Path('in/more').symlink_to('../other')
    Path('in/sub/loop').symlink_to('../../in')
    os.link('in/a.txt', 'in/z.txt')
    files = files_at(Path('in'), set())
    assert list(map(str, files)) == ['in/a.txt', 'in/c.txt', 'in/more/d.txt', 'in/sub/b.md']
    assert 'in: skipped 1 files' in capsys.readouterr().out


@pytest.mark.parametrize('name, content', [
    ('a.txt', 'x'.encode('utf-16-le') * 9), ('a.md', 'x'.encode('utf-16')),
    ('a.tar', tar({'b.txt': b'text'})),
    ('a.tar.gz', gzip.compress(tar({'b.txt': b'text'}), mtime=0)),
    ('a.parquet.gz', gzip.compress(b'PAR1', mtime=0))])
def test_what_is_not_utf8_text_is_refused(name, content):
    """Archives and UTF-16 are refused in one line that says what can be read."""
    Path(name).write_bytes(content)
    with pytest.raises(UserError, match=f'{name}.*give .jsonl'):
        texts_of(name)


@pytest.mark.parametrize('name', ['a::b.txt', 'file:z.txt', 'a.log', 'a.csv', 'a.html.gz'])
def test_a_file_that_is_named_is_read_whatever_its_name(name):
    """A file that a person names is read, whatever its name means to a library."""
    Path(name).write_bytes(gzip.compress(b'mine', mtime=0) if name.endswith('.gz') else b'mine')
    Path('a').write_text('not mine')
    assert texts_of(name) == ['mine']


def test_of_a_parquet_file_only_the_texts_are_read():
    """A date after the year 9999 in another column does no harm, and an error names --field."""
    far = pyarrow.array([2**40], pyarrow.timestamp('s'))
    write_table(pyarrow.table({'crawled': far, 'body': ['a']}), 'a.parquet')
    assert texts_of('a.parquet', 'body') == ['a']
    with pytest.raises(UserError, match='text.*--field'):
        texts_of('a.parquet')


STORIES = tar({'1.txt': b'One', '2.txt': b'Two'})


@pytest.mark.parametrize('archive', [
    lzma.compress(STORIES[:1700]), lzma.compress(STORIES[:-8192]),
    lzma.compress(STORIES[:1024] + b'?' * 512 + STORIES[1536:]), lzma.compress(STORIES)[:-9]],
    ids=['cut', 'without an end', 'damaged', 'cut .xz'])
def test_a_broken_archive_of_openwebtext_is_an_error(archive):
    """A tar that is cut or damaged never ends early without a word."""
    with pytest.raises((EOFError, tarfile.TarError)):
        list(read_tar(None, io.BytesIO(tar({'1_data.xz': archive}))))
