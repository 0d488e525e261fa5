"""Read documents for prepare.py: text files, JSON lines, Parquet, tars, datasets of the Hub.

A reader yields a row for each document, {'text': .., 'why': ..}; why says why a row has no text.
"""

import codecs
import gzip
import json
import lzma
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rucksack.cli import UserError, quiet_hub, reading

FORMATS = ('.jsonl, .json, .parquet, .tar, or UTF-8 text (.txt, .md or no extension), '
           'each also as .gz or .xz')
TEXT_TYPES = ('string', 'large_string', 'null')  # of a column; null: it has no value


# -----------------------------------------------------------------------------
# Files.


def kind_of(path: str) -> str | None:
    """Return what a file with this extension holds: json, parquet, tar or text; None if unknown."""
    kinds = {'.jsonl': 'json', '.json': 'json', '.parquet': 'parquet', '.tar': 'tar',
             '.txt': 'text', '.md': 'text', '.tokens': 'text', '.raw': 'text', '': 'text'}
    unpacked = re.sub(r'\.[gx]z$', '', path.lower())
    return kinds.get(Path(unpacked).suffix)


def open_unpacked(path: str):
    """Open a file to read its bytes, unpacked if it is a .gz or .xz."""
    if path.lower().endswith('.gz'):
        return gzip.open(path)
    if path.lower().endswith('.xz'):
        return lzma.open(path)
    return open(path, 'rb')


def files_in(path: str) -> tuple[list[str], Counter]:
    """List a file or, for a folder, the files below it of a known kind, also behind links.

    Counts the files that are skipped, by reason; a hidden folder counts once.
    """
    skipped = Counter()
    if not os.path.isdir(path):
        return [path], skipped
    files = []
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
            if is_hidden(name):
                skipped['hidden'] += 1
            elif not os.path.isfile(file):
                skipped['not a file'] += 1
            elif kind_of(file) is None:
                skipped['of an unknown kind'] += 1
            else:
                files.append(file)
    return sorted(files) or [path], skipped


def is_hidden(name: str) -> bool:
    """Tell whether a path, or a folder in it, is hidden, like the ._NAME files of macOS."""
    return any(part.startswith('.') for part in Path(name).parts)


# -----------------------------------------------------------------------------
# Rows of a file.


def row_of(text: str | None) -> dict:
    """Make the row of a document, which may have no text."""
    return {'text': text or '', 'why': '' if text else 'empty'}


def rows_of_text(path: str, field: str) -> Iterator[dict]:
    """Yield a text file as one document."""
    with open_unpacked(path) as file:
        yield row_of(file.read().decode('utf-8-sig'))


def rows_of_json(path: str, field: str) -> Iterator[dict]:
    """Yield a field of each object in a file: one object a line, or a list of objects."""
    is_found = False
    with open_unpacked(path) as file:
        start = file.read(100).removeprefix(codecs.BOM_UTF8)
        file.seek(0)
        lines = file
        if start.lstrip()[:1] == b'[':
            lines = [json.dumps(item) for item in json.loads(file.read())]
        n = 0
        for line in lines:
            if not line.strip():
                continue
            n += 1
            with reading(f'row {n}', problem='is no JSON object with text'):
                row = json.loads(line)
                text = row.get(field)
                is_found = is_found or field in row
                if text is not None:
                    check_text(text, row, field)
            yield row_of(text)
    if n and not is_found:
        raise UserError(f'no row has a field "{field}"{others(row)}')


def check_text(text: object, row: dict, field: str) -> None:
    """Raise an error unless a value is text that UTF-8 can express."""
    if not isinstance(text, str):
        raise UserError(f'"{field}" is of type {type(text).__name__}, not text{others(row)}')
    text.encode()  # UnicodeEncodeError for half of a surrogate pair


def others(row: dict) -> str:
    """Offer the fields of a row that hold text."""
    names = [name for name, value in row.items() if isinstance(value, str)]
    return f'; choose one with --field: {", ".join(names)}' if names else ''


def rows_of_tar(path: str, field: str, file=None) -> Iterator[dict]:
    """Yield the .txt files in a tar and in its .xz tars, with white space as in OpenWebText."""
    with tarfile.open(path, 'r|*', file) as tar:
        for member in tar:
            if member.isdir():
                continue
            if is_hidden(member.name):
                yield {'text': '', 'why': 'hidden'}
            elif not member.isreg():
                yield {'text': '', 'why': 'not a file'}
            elif member.name.endswith('.xz'):
                yield from rows_of_tar(path, field, tar.extractfile(member))
            elif not member.name.endswith('.txt'):
                yield {'text': '', 'why': 'of an unknown kind'}
            else:
                with reading(member.name):
                    text = tar.extractfile(member).read().decode('utf-8-sig')
                yield row_of(re.sub(r'\n{3,}', '\n\n', text).strip())


# -----------------------------------------------------------------------------
# Datasets of one column, text.


def read_texts(source: str, field: str, cache: str):
    """Read the texts of a file or of hub:OWNER/DATASET[:CONFIG[:SPLIT]].

    Returns a datasets.Dataset on disk with one column, text, and counts of the rows that are
    skipped, by reason.
    """
    import datasets
    is_hub = source.startswith('hub:')
    kind = 'parquet' if is_hub else kind_of(source)
    with reading(source, 'give OWNER/DATASET[:CONFIG[:SPLIT]]' if is_hub else f'give {FORMATS}'):
        if is_hub:
            rows = load_hub(source.removeprefix('hub:'), cache)
        elif kind == 'parquet':
            rows = load_parquet(source, cache)
        else:
            readers = {'text': rows_of_text, 'json': rows_of_json, 'tar': rows_of_tar}
            text = datasets.Value('string')
            rows = datasets.Dataset.from_generator(
                readers[kind], datasets.Features({'text': text, 'why': text}),
                cache, gen_kwargs={'path': source, 'field': field})
        rows.data.validate(full=True)  # UTF-8 too, which not every builder checks
    if kind == 'parquet':
        rows = select_text(rows, source, field)
    texts = rows.filter(lambda text: bool(text), input_columns='text')
    skipped = Counter({'empty': len(rows) - len(texts)})
    if kind != 'parquet':
        reasons = rows.filter(lambda why: bool(why), input_columns='why')
        skipped = Counter(reasons['why'])
    return texts.select_columns('text'), skipped


def load_hub(name: str, cache: str):
    """Read the rows of OWNER/DATASET[:CONFIG[:SPLIT]] into a datasets.Dataset on disk."""
    import datasets
    quiet_hub()
    dataset, config, split = (name.split(':') + ['', ''])[:3]
    return datasets.load_dataset(dataset, config or None, split=split or 'train', cache_dir=cache)


def load_parquet(path: str, cache: str):
    """Read the rows of a Parquet file, which may be packed, into a datasets.Dataset on disk."""
    import datasets
    download_config = datasets.DownloadConfig(cache_dir=cache)
    unpacked = datasets.DownloadManager(download_config=download_config).extract(path)
    return datasets.Dataset.from_parquet(unpacked, cache_dir=cache)


def select_text(rows, source: str, field: str):
    """Select a column of text and call it text; UserError offers the columns that are."""
    types = {name: getattr(feature, 'dtype', 'list') for name, feature in rows.features.items()}
    if types.get(field) not in TEXT_TYPES:
        found = f'is of type {types[field]}, not text' if field in types else 'is not there'
        names = [name for name, kind in types.items() if kind in TEXT_TYPES]
        raise UserError(f'{source}: the column "{field}" {found}; '
                        f'choose one with --field: {", ".join(names) or "no column is text"}')
    return rows.select_columns(field).rename_columns({field: 'text'})


def openwebtext_files() -> list[str]:
    """Find OpenWebText in the Hub's cache, or download it.

    Returns its Parquet files, or its archives if the repository lacks some Parquet files.
    """
    import huggingface_hub as hub
    repo = 'Skylion007/openwebtext'
    with reading('OpenWebText', 'connect to the internet, or use --text FILE...'):
        names = sorted(file.rfilename for file in hub.HfApi().dataset_info(repo).siblings)
        names = [name for name in names if name.endswith('.parquet')]
        is_whole = any(name.endswith(f'-of-{len(names):05d}.parquet') for name in names)
        if not is_whole:
            names = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(21)]
        return [hub.hf_hub_download(repo, name, repo_type='dataset') for name in names]
