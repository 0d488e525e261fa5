"""Read documents for prepare.py: text files, JSON lines, Parquet, tars and Hub datasets.

A reader yields the text of each document, '' if it is empty. skipped counts the files and documents
that are not read, by reason.
"""

import gzip
import json
import lzma
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rucksack.cli import printable, quiet_hub
from rucksack.errors import UserError, user_errors
from rucksack.tokenizer import END_OF_TEXT

FORMATS = ('.jsonl, .ndjson, .json, .parquet, .tar, or UTF-8 text (.txt, .md or no extension), '
           'optionally as .gz or .xz')

Texts = Iterator[str]  # one per document; '' for an empty one


def open_unpacked(path: str, file=None):
    """Open a path, or wrap an open file, to read its bytes; .gz and .xz are decompressed."""
    opener = {'.gz': gzip.open, '.xz': lzma.open}.get(Path(path).suffix.lower(), open)
    return opener(file or path, 'rb')


def decoded(content: bytes) -> str:
    """Decode UTF-8 and turn \\r\\n into \\n; raises ValueError for NUL bytes."""
    if b'\0' in content:
        raise ValueError('it contains NUL bytes and may be UTF-16; save it as UTF-8')
    return content.decode('utf-8-sig').replace('\r\n', '\n')


# -----------------------------------------------------------------------------
# Rows with fields; one field holds the text.


def texts_of_rows(rows: Iterable, field: str) -> Texts:
    """Yield a field of each row (a dictionary or a line of JSON). Errors name the row."""
    row = {}
    is_found = False
    for n, row in enumerate(rows, 1):
        with user_errors(f'row {n}'):
            if isinstance(row, bytes):
                row = json.loads(row)
            if not isinstance(row, dict):
                raise UserError('it is not a JSON object; write one object per line')
            text = row.get(field)
            is_found = is_found or field in row
            if not isinstance(text, str | None):
                raise UserError(f'"{field}" is not text; {advice(row)}')
            text = (text or '').replace('\r\n', '\n')
            text.encode()  # raises UnicodeEncodeError for a lone surrogate
        yield text
    if row and not is_found:
        raise UserError(f'no row has a field "{field}"; {advice(row)}')


def advice(row: dict) -> str:
    """Say how to choose another field of a row."""
    return f'choose from {", ".join(row)} with the flag --field of prepare.py'


def texts_of_tables(tables: Iterable, columns: list[str], field: str) -> Texts:
    """Yield one column of pyarrow tables; only the names of the other columns are read."""
    named = dict.fromkeys(columns)
    wanted = [column for column in columns if column == field]
    rows = (named | row for table in tables for row in table.select(wanted).to_pylist())
    return texts_of_rows(rows, field)


def read_json(path: str, field: str, skipped: Counter) -> Texts:
    """Yield a field of each object in a file: one object per line, or one list of objects."""
    with open_unpacked(path) as file:
        is_list = re.match(rb'(\xef\xbb\xbf)?\s*\[', file.read(100))
        file.seek(0)
        if is_list:
            yield from texts_of_rows(json.load(file), field)
        else:
            yield from texts_of_rows(filter(bytes.strip, file), field)


def read_parquet(path: str, field: str, skipped: Counter) -> Texts:
    """Yield a column of a Parquet file."""
    from pyarrow.parquet import ParquetFile  # comes with datasets
    with open_unpacked(path) as file:
        parquet = ParquetFile(file)
        tables = parquet.iter_batches(batch_size=1000, columns=[field])
        yield from texts_of_tables(tables, parquet.schema_arrow.names, field)


def read_hub(source: str, field: str, skipped: Counter) -> Texts:
    """Yield a column of hub:OWNER/DATASET[:CONFIG[:SPLIT]]."""
    import datasets
    dataset, config, split = (source.split(':') + ['', ''])[1:4]
    quiet_hub(dataset)
    found = datasets.load_dataset(dataset, config or None, split=split or 'train')
    tables = found.with_format('arrow').iter(batch_size=1000)
    return texts_of_tables(tables, found.column_names, field)


# -----------------------------------------------------------------------------
# Text files, alone or in a tar.


def read_text(path: str, field: str, skipped: Counter) -> Texts:
    """Yield the documents of a text file: one, or several separated by END_OF_TEXT."""
    with open_unpacked(path) as file:
        documents = decoded(file.read()).split(END_OF_TEXT)
    if len(documents) == 1:
        yield documents[0]
        return
    print(printable(f'{path}: split into {len(documents):,} documents at {END_OF_TEXT}'))
    for text in documents:
        yield text.strip()


class Header(tarfile.TarInfo):
    """A tar header that raises ReadError where tarfile would silently stop reading."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Read the next header; raises ReadError if it is broken, or if the tar has no end."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # zeros mark the end, but another tar may follow
            archive.has_end = True
            raise
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EmptyHeaderError) and getattr(archive, 'has_end', False):
                raise
            raise tarfile.ReadError(f'{error} at byte {archive.offset:,}')


def read_tar(path: str, field: str, skipped: Counter, file=None) -> Texts:
    """Yield the .txt files in a tar and in nested .xz tars; runs of blank lines become one."""
    with (open_unpacked(path, file) as unpacked,  # tarfile reads only one .gz member
          tarfile.open(path, 'r|', unpacked, tarinfo=Header, ignore_zeros=True) as tar):
        for member in tar:
            if member.isdir():
                continue
            name = member.name.lower()
            is_known = name.endswith(('.xz', '.txt'))
            why = why_skipped(name, member.isreg(), is_known)
            if why:
                skipped[why] += 1
            elif name.endswith('.xz'):
                yield from read_tar(member.name, field, skipped, tar.extractfile(member))
            else:
                with user_errors(member.name):
                    text = decoded(tar.extractfile(member).read())
                yield re.sub(r'\n{3,}', '\n\n', text).strip()


READERS = {
    '.jsonl': read_json,
    '.ndjson': read_json,
    '.json': read_json,
    '.parquet': read_parquet,
    '.tar': read_tar,
    '.txt': read_text,
    '.md': read_text,
    '': read_text}


def reader_of(source: str) -> Callable | None:
    """Return the reader for hub:DATASET or for this file extension; None if there is none."""
    if source.startswith('hub:') and not os.path.exists(source):
        return read_hub
    unpacked = re.sub(r'\.[gx]z$', '', source.lower())
    return READERS.get(Path(unpacked).suffix)


def reader_or_text(source: str) -> Callable:
    """Return the reader for a source that a person named; any other file is read as plain text."""
    reader = reader_of(source)
    if reader is None:
        print(printable(
            f'{source}: unknown file type, read as plain text; known: {FORMATS}'))
        return read_text
    return reader


def why_skipped(name: str, is_file: bool, is_known: object) -> str:
    """Say why a file in a folder or a tar is skipped; return '' if it is read."""
    if re.search(r'(^|/)\.[^/]', name):  # such as ._NAME from macOS
        return 'hidden'
    if not is_file:
        return 'not a file'
    return '' if is_known else 'of an unknown type'


# -----------------------------------------------------------------------------
# The files in folders, and the documents in a source.


def files_in(paths: list[str], seen: set, skipped: Counter) -> list[str]:
    """List the given files and all files below the given folders, except those in seen.

    skipped counts the others. Raises UserError if a path does not exist, or if no file is left.
    """
    files = []
    for path in map(os.path.expanduser, paths):
        if os.path.exists(path):
            files += sorted(files_at(path, seen, skipped))
        else:
            raise UserError(f'{path} does not exist; give {FORMATS}')
    if paths and not files:
        raise UserError(f'there are no files to read in {", ".join(paths)} (skipped: '
                        f'{counted(skipped)}); give {FORMATS}')
    return files


def files_at(path: str, seen: set, skipped: Counter) -> Iterator[str]:
    """Yield a file, or all files below a folder, including links; add them to seen."""
    file = os.stat(path)
    number = (file.st_dev, file.st_ino)
    if number in seen:  # a second name, or a link that leads back
        skipped['already read'] += 1
        return
    seen.add(number)
    if not os.path.isdir(path):
        yield path
        return
    for name in sorted(os.listdir(path)):
        file = os.path.join(path, name)
        is_folder = os.path.isdir(file)
        why = why_skipped(name, is_folder or os.path.isfile(file), is_folder or reader_of(file))
        if why:
            skipped[why] += 1
        else:
            yield from files_at(file, seen, skipped)


def counted(skipped: Counter) -> str:
    """Say how many were skipped for each reason."""
    counts = [f'{n:,} {why}' for why, n in skipped.items()]
    return ', '.join(counts) or 'none'


def read_texts(sources: list[str], field: str, skipped: Counter, cache: str):
    """Read the texts of all sources into a datasets.Dataset with one column, text.

    The Dataset is stored in the folder cache. skipped counts documents without text.
    """
    from datasets import Dataset, Features, Value

    def rows() -> Iterator[dict]:
        is_found = False
        for source in sources:
            with user_errors(source):
                for text in reader_or_text(source)(source, field, skipped):
                    if text:
                        is_found = True
                        yield {'text': text}
                    else:
                        skipped['empty'] += 1
        if not is_found:
            raise UserError(f'no text in {", ".join(sources)}; skipped: {counted(skipped)}')

    with user_errors(cache, problem='cannot be written'):
        return Dataset.from_generator(rows, Features(text=Value('string')), cache)


def openwebtext_files() -> list[str]:
    """Download OpenWebText to the Hub's cache: its Parquet files if complete, else its tars."""
    import huggingface_hub as hub
    repo = 'Skylion007/openwebtext'
    with user_errors('OpenWebText', 'connect to the internet, or use --text FILE...'):
        names = sorted(hub.list_repo_files(repo, repo_type='dataset'))
        files = [name for name in names if name.endswith('.parquet')]
        is_whole = any(name.endswith(f'-of-{len(files):05d}.parquet') for name in files)
        if not is_whole:
            files = [name for name in names if name.endswith('.tar')]
        return [hub.hf_hub_download(repo, name, repo_type='dataset') for name in files]
