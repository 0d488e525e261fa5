"""Read documents for prepare.py: text files, JSON lines, Parquet, tars, datasets of the Hub.

A reader yields a row for each document, {'text': .., 'why': ..}; why says why a row has no text.
"""

import codecs
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fsspec

from rucksack.cli import UserError, quiet_hub, reading

FORMATS = ('.jsonl, .json, .parquet, .tar, or UTF-8 text (.txt, .md or no extension), '
           'each also as .gz or .xz')


def open_unpacked(path: str):
    """Open a file to read its bytes, unpacked if it is a .gz or .xz."""
    return fsspec.open(path, compression='infer')


def row_of(text: str | None) -> dict:
    """Make the row of a document, which may have no text."""
    return {'text': text or '', 'why': '' if text else 'empty'}


# -----------------------------------------------------------------------------
# Rows with fields, one of which holds the text.


def rows_of_fields(rows: Iterable[dict], field: str) -> Iterator[dict]:
    """Yield the text in a field of each row; UserError names a row by its number."""
    row = {}
    is_found = False
    for n, row in enumerate(rows, 1):
        with reading(f'row {n}', problem='is no object with text'):
            text = row.get(field)
            is_found = is_found or field in row
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise UserError(f'"{field}" is of type {kind}, not text{others(row)}')
            (text or '').encode()  # UnicodeEncodeError for half of a surrogate pair
        yield row_of(text)
    if row and not is_found:
        raise UserError(f'no row has a field "{field}"{others(row)}')


def others(row: dict) -> str:
    """Offer the fields of a row that hold text."""
    names = [name for name, value in row.items() if isinstance(value, str)]
    return f'; choose one with --field: {", ".join(names)}' if names else ''


def rows_of_json(path: str, field: str) -> Iterator[dict]:
    """Yield a field of each object in a file: one object a line, or a list of objects."""
    yield from rows_of_fields(objects_in(path), field)


def objects_in(path: str) -> Iterator[dict]:
    """Yield the objects in a JSON file."""
    with open_unpacked(path) as file:
        start = file.read(100).removeprefix(codecs.BOM_UTF8)
        file.seek(0)
        if start.lstrip()[:1] == b'[':
            yield from json.loads(file.read())
            return
        lines = (line for line in file if line.strip())
        for n, line in enumerate(lines, 1):
            with reading(f'row {n}'):
                row = json.loads(line)
            yield row


def rows_of_parquet(path: str, field: str) -> Iterator[dict]:
    """Yield a column of a Parquet file."""
    from pyarrow.parquet import ParquetFile  # comes with datasets
    with open_unpacked(path) as file:
        yield from rows_of_tables(ParquetFile(file).iter_batches(batch_size=1000), field)


def rows_of_hub(name: str, field: str, cache: str) -> Iterator[dict]:
    """Yield a column of OWNER/DATASET[:CONFIG[:SPLIT]], by way of a folder cache."""
    import datasets
    quiet_hub()
    dataset, config, split = (name.split(':') + ['', ''])[:3]
    rows = datasets.load_dataset(dataset, config or None, split=split or 'train', cache_dir=cache)
    yield from rows_of_tables(rows.with_format('arrow').iter(batch_size=1000), field)


def rows_of_tables(tables: Iterable, field: str) -> Iterator[dict]:
    """Yield a column of Arrow tables."""
    objects = (row for table in tables for row in table.to_pylist())
    yield from rows_of_fields(objects, field)


# -----------------------------------------------------------------------------
# Text files, alone or in a tar.


def rows_of_text(path: str, field: str) -> Iterator[dict]:
    """Yield a text file as one document."""
    with open_unpacked(path) as file:
        yield row_of(file.read().decode('utf-8-sig'))


def rows_of_tar(path: str, field: str, file=None) -> Iterator[dict]:
    """Yield the .txt files in a tar and in its .xz tars, with white space as in OpenWebText."""
    with tarfile.open(path, 'r|*', file) as tar:
        for member in tar:
            if member.isdir():
                continue
            is_known = member.name.endswith(('.xz', '.txt'))
            why = why_skipped(member.name, member.isreg(), is_known)
            if why:
                yield {'text': '', 'why': why}
            elif member.name.endswith('.xz'):
                yield from rows_of_tar(path, field, tar.extractfile(member))
            else:
                with reading(member.name):
                    text = tar.extractfile(member).read().decode('utf-8-sig')
                yield row_of(re.sub(r'\n{3,}', '\n\n', text).strip())


READERS = {
    '.jsonl': rows_of_json,
    '.json': rows_of_json,
    '.parquet': rows_of_parquet,
    '.tar': rows_of_tar,
    '.txt': rows_of_text,
    '.md': rows_of_text,
    '': rows_of_text}


def reader_of(path: str) -> Callable | None:
    """Return the reader of files with this extension; None if there is none."""
    unpacked = re.sub(r'\.[gx]z$', '', path.lower())
    return READERS.get(Path(unpacked).suffix)


def is_hidden(path: str) -> bool:
    """Tell whether a file, or a folder on the way to it, is hidden, like ._NAME of macOS."""
    return any(part.startswith('.') for part in Path(path).parts)


def why_skipped(name: str, is_file: bool, is_known: bool) -> str:
    """Say why a file of a folder, or a member of a tar, is not read; an empty text if it is."""
    if is_hidden(name):
        return 'hidden'
    if not is_file:
        return 'not a file'
    return '' if is_known else 'of an unknown kind'


# -----------------------------------------------------------------------------
# The files of folders, the documents of a source.


def files_in(paths: list[str]) -> tuple[list[str], Counter]:
    """List files and, for folders, all files below them; counts those skipped, by reason."""
    files = []
    skipped = Counter()
    for path in paths:
        if os.path.isdir(path):
            files += sorted(files_below(path, skipped)) or [path]
        else:
            files.append(path)
    return files, skipped


def files_below(path: str, skipped: Counter) -> Iterator[str]:
    """Yield the files below a folder, also behind links; count those skipped, by reason.

    A hidden folder counts once.
    """
    seen = set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        if os.path.realpath(folder) in seen:  # two links, or one that leads back
            skipped['a folder that was read already'] += 1
            subfolders.clear()
            continue
        seen.add(os.path.realpath(folder))
        skipped['hidden'] += sum(map(is_hidden, subfolders))
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]
        for name in names:
            file = os.path.join(folder, name)
            why = why_skipped(name, os.path.isfile(file), reader_of(file) is not None)
            if why:
                skipped[why] += 1
            else:
                yield file


def rows_of(source: str, field: str, cache: str) -> Iterator[dict]:
    """Yield a row for each document of a file or of hub:OWNER/DATASET[:CONFIG[:SPLIT]]."""
    if source.startswith('hub:'):
        yield from rows_of_hub(source.removeprefix('hub:'), field, cache)
    else:
        yield from reader_of(source)(source, field)


def read_texts(source: str, field: str, cache: str):
    """Read the texts of a source that rows_of takes, by way of a folder cache.

    Returns a datasets.Dataset on disk with one column, text, and counts of the rows that are
    skipped, by reason.
    """
    from datasets import Dataset, Features, Value
    features = Features(text=Value('string'), why=Value('string'))
    arguments = dict(source=source, field=field, cache=cache)
    with reading(source):
        rows = Dataset.from_generator(rows_of, features, cache, gen_kwargs=arguments)
    skipped = Counter(rows['why'][:])
    del skipped['']
    texts = rows.filter(lambda why: not why, input_columns='why')
    return texts.select_columns('text'), skipped


def openwebtext_files() -> list[str]:
    """Download OpenWebText to the Hub's cache: its Parquet files if whole, else its archives."""
    import huggingface_hub as hub
    repo = 'Skylion007/openwebtext'
    with reading('OpenWebText', 'connect to the internet, or use --text FILE...'):
        names = sorted(file.rfilename for file in hub.HfApi().dataset_info(repo).siblings)
        parquet = [name for name in names if name.endswith('.parquet')]
        is_whole = any(name.endswith(f'-of-{len(parquet):05d}.parquet') for name in parquet)
        archives = [name for name in names if name.endswith('.tar')]
        files = []
        for name in parquet if is_whole else archives:
            files.append(hub.hf_hub_download(repo, name, repo_type='dataset'))
        return files
