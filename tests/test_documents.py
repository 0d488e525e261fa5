"""Claims about reading documents: nothing is silently left out or taken for text."""

import gzip
import json
import lzma
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from helpers import tar
from pyarrow.parquet import write_table

from rucksack.documents import files_in, read_texts
from rucksack.errors import UserError

pytestmark = pytest.mark.usefixtures('folder')


def texts_of(path: str) -> tuple[list[str], Counter]:
    """Return the texts of a file, and what was skipped."""
    skipped = Counter()
    rows = read_texts([path], 'text', skipped, 'cache')
    return rows['text'][:], skipped


@pytest.mark.parametrize('late', [{'tag': 'x'}, {'tag': 3, 'more': {'a': [1]}}, {'2020': None}])
def test_only_the_field_asked_for_is_looked_at(late):
    """Other fields may be empty, change type, or first appear in the last of many rows."""
    rows = [{'text': f'{i} ' * 500, 'tag': None} for i in range(3000)]
    rows += [{}, {'text': 'last', **late}]
    Path('a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    texts, skipped = texts_of('a.jsonl')
    assert len(texts) == 3001
    assert texts[-1] == 'last'
    assert skipped == {'empty': 1}


@pytest.mark.parametrize('line, fact', [
    ('{"text": 7, "body": "b"}', 'text, body'), ('{"text": "\\ud800"}', 'surrogate'),
    ('{"text": ', 'JSON'), ('[1]', 'object')])
def test_a_row_that_cannot_be_read_is_named_by_its_number(line, fact):
    """The error names a row that is cut short, is not an object, or has no valid text."""
    Path('a.jsonl').write_text('{"text": "2020-01-01"}\n\n' + line + '\n')
    with pytest.raises(UserError, match=f'row 2.*{fact}'):
        texts_of('a.jsonl')


BOM = b'\xef\xbb\xbf'


def test_a_tar_has_its_regular_files_that_are_not_hidden():
    """A tar's skipped files are counted by reason; macOS's own files count as hidden."""
    members = {'d/a.txt': BOM + b'a', 'd/._a.txt': b'\0\5\x16junk', '.git/x.txt': b'x',
               'b.png': b'x', 'c.TXT': b''}
    Path('a.tar').write_bytes(tar(members))
    texts, skipped = texts_of('a.tar')
    assert texts == ['a']
    assert skipped == {'hidden': 2, 'of an unknown type': 1, 'empty': 1}


@pytest.mark.parametrize('name, data', [
    ('a.txt', b'a\r\nb'), ('a.ndjson', b'{"text": "a\\r\\nb"}\r\n'),
    ('a.json', b' [{"text": "a\\r\\nb"}]')])
def test_files_of_windows_have_neither_marks_nor_carriage_returns(name, data):
    """A byte order mark at the start is dropped, and \\r\\n becomes \\n, even inside a row."""
    Path(name).write_bytes(BOM + data)
    assert texts_of(name)[0] == ['a\nb']


def test_links_to_folders_are_followed_once():
    """A cycle of links ends, a file named twice is read once, and skipped files are counted."""
    Path('in/sub').mkdir(parents=True)
    Path('out').mkdir()
    for name in ('in/a.txt', 'in/sub/b.md', 'out/c.txt', 'in/.d.txt', 'in/e.png'):
        Path(name).write_text('x')
    Path('in/hard.txt').hardlink_to('in/a.txt')
    Path('in/linked').symlink_to('../out')
    Path('in/sub/loop').symlink_to('../../in')
    Path('in/broken.txt').symlink_to('nowhere')
    skipped = Counter()
    files = files_in(['in', 'in/a.txt'], set(), skipped)
    assert files == ['in/a.txt', 'in/linked/c.txt', 'in/sub/b.md']
    assert skipped == {'hidden': 1, 'not a file': 1, 'of an unknown type': 1, 'already read': 3}


def tar_of(n: int) -> bytes:
    """Make a tar of n texts, three blocks each."""
    return tar({f'{i:02}.txt': f'text {i} '.encode() * 100 for i in range(n)})


BROKEN = {
    'a bad checksum': lambda whole: whole.replace(b'05.txt', b'99.txt'),
    'a header of zeros': lambda whole: whole[:512 * 9] + bytes(512) + whole[512 * 10:],
    'no end': lambda whole: whole[:512 * 9],
    'cut in a text': lambda whole: whole[:512 * 10 + 100]}


@pytest.mark.parametrize('name', BROKEN)
@pytest.mark.parametrize('packed', ['in.tar', 'in.tar.gz', 'nested.tar'])
def test_a_broken_tar_is_refused_by_name(packed, name, folder):
    """A damaged tar is an error, because tarfile would silently stop there and skip the rest."""
    content = BROKEN[name](tar_of(8))
    if packed == 'in.tar.gz':
        content = gzip.compress(content)
    if packed == 'nested.tar':
        content = tar({'00.xz': lzma.compress(content)})
    Path(packed).write_bytes(content)
    with pytest.raises(UserError, match=packed):
        texts_of(packed)


@pytest.mark.parametrize('name, pack', [
    ('two.tar', bytes), ('two.tar.gz', gzip.compress), ('two.tar.xz', lzma.compress)])
def test_a_tar_behind_a_tar_is_read(name, pack, folder):
    """Two tars joined by cat are both read, even if the file is compressed."""
    Path(name).write_bytes(pack(tar_of(3)) + pack(tar_of(2)))
    assert len(texts_of(name)[0]) == 5


@pytest.mark.parametrize('text', ['x'.encode('utf-16-le') * 9, 'x'.encode('utf-16'), b'1\0002'])
def test_text_with_nuls_is_refused(text, folder):
    """The error for NUL bytes suggests UTF-16, whose NULs would otherwise become tokens."""
    Path('a.txt').write_bytes(text)
    with pytest.raises(UserError, match='UTF-16'):
        texts_of('a.txt')


def test_an_end_of_text_in_a_file_ends_a_document(folder, capsys):
    """A file is split at each end-of-text, on its own line or not; a notice names the file."""
    Path('a.txt').write_bytes(b'one\r\n<|endoftext|>\r\ntwo<|endoftext|>three\n')
    assert texts_of('a.txt')[0] == ['one', 'two', 'three']
    assert 'a.txt' in capsys.readouterr().out


@pytest.mark.parametrize('name, is_known', [
    ('a::b.txt', True), ('file:z.txt', True), ('hub:w.txt', True), ('a.log', False),
    ('a.csv', False), ('a.html.gz', False)])
def test_a_file_that_is_named_is_read_whatever_its_name(name, is_known, folder, capsys):
    """A file is read whatever its name means to a library; a notice names files of unknown type."""
    content = b'mine'
    Path(name).write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    Path('a').write_text('not mine')
    assert texts_of(name)[0] == ['mine']
    assert (name in capsys.readouterr().out) != is_known


@pytest.mark.parametrize('field, named', [('text', None), ('body', 'crawled')])
def test_of_a_parquet_file_only_the_texts_are_read(field, named, folder):
    """A date after the year 9999 in another column does no harm, and an error lists that column."""
    far = pyarrow.array([2**40], pyarrow.timestamp('s'))
    write_table(pyarrow.table({'crawled': far, field: ['a']}), 'a.parquet')
    if named is None:
        assert texts_of('a.parquet')[0] == ['a']
        return
    with pytest.raises(UserError, match=named):
        texts_of('a.parquet')
