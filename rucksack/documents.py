"""Read documents: text files, JSON lines, Parquet, the tars of OpenWebText, and Hub datasets.

A reader of a format yields each document of a file: a text, or null or '' if it is empty.
"""

import gzip
import json
import lzma
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np

from rucksack.errors import UserError, user_errors
from rucksack.tokenizer import END_OF_TEXT

FORMATS = ('.jsonl, .ndjson, .json or UTF-8 text (.txt, .md or no extension), also as .gz or .xz, '
           'or .parquet')
CHOOSE_FIELD = 'choose the field that holds the text with --field of prepare.py'
LONGEST = 20_000  # characters; longer documents are cut

Texts = Iterator[str]


def open_text(path: Path):
    """Open a file of UTF-8 text, with or without a byte order mark; unpack .gz and .xz."""
    openers = {'.gz': gzip.open, '.xz': lzma.open}
    opener = openers.get(path.suffix.lower(), open)
    return opener(path, 'rt', encoding='utf-8-sig', newline='\n')


def read_text(path: Path, field: str) -> Texts:
    """Yield the documents of a text file: one, or several separated by END_OF_TEXT."""
    with open_text(path) as file:
        text = file.read()
    if '\0' in text:
        raise ValueError('it contains NUL bytes')
    if END_OF_TEXT not in text:
        yield text
    else:
        yield from map(str.strip, text.split(END_OF_TEXT))


def read_json(path: Path, field: str) -> Texts:
    """Yield a field of each object in a file with one object per line."""
    with open_text(path) as file:
        for n, line in enumerate(filter(str.strip, file), 1):
            with user_errors(f'row {n}', CHOOSE_FIELD):
                text = json.loads(line)[field]
            yield text


def read_parquet(path: Path, field: str) -> Texts:
    """Yield a column of a Parquet file; no other column is read."""
    from pyarrow.parquet import ParquetFile  # comes with datasets
    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1000, columns=[field]):
            yield from batch[field].to_pylist()


# -----------------------------------------------------------------------------
# OpenWebText.


def read_tar(path: Path, file=None) -> Texts:
    """Yield the .txt files in a tar and in its .xz tars; runs of blank lines become one."""
    with tarfile.open(path, 'r|', file) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if member.name.endswith('.xz'):
                inner = lzma.open(content)
                yield from read_tar(path, inner)
                inner.read()  # up to its checksum
            elif member.name.endswith('.txt'):
                text = content.read().decode()
                yield re.sub(r'(\r?\n){3,}', '\n\n', text).strip()
        if tar.fileobj.read(512) != bytes(512):  # tarfile stops at a broken header as at the end
            raise tarfile.ReadError('it is cut or damaged')


def read_openwebtext() -> Texts:
    """Yield the texts of OpenWebText: its Parquet files on the Hub if complete, else its tars."""
    import huggingface_hub as hub
    repo = 'Skylion007/openwebtext'
    with user_errors('OpenWebText', 'connect to the internet, or use --text FILE...'):
        names = sorted(hub.list_repo_files(repo, repo_type='dataset'))
        files = [name for name in names if name.endswith('.parquet')]
        is_whole = any(name.endswith(f'-of-{len(files):05d}.parquet') for name in files)
        if not is_whole:
            files = [name for name in names if name.endswith('.tar')]
        files = [hub.hf_hub_download(repo, name, repo_type='dataset') for name in files]
    for file in files:
        with user_errors(file, 'remove it to download it again'):
            texts = read_parquet(file, 'text') if is_whole else read_tar(file)
            yield from cleaned(texts)


# -----------------------------------------------------------------------------
# Files and folders.

READERS = {
    '.jsonl': read_json,
    '.ndjson': read_json,
    '.json': read_json,
    '.parquet': read_parquet,
    '.txt': read_text,
    '.md': read_text,
    '': read_text}


def kind_of(path: Path) -> str:
    """Return the extension of a file, without .gz or .xz."""
    name = re.sub(r'\.[gx]z$', '', path.name.lower())
    return Path(name).suffix


def files_at(path: Path, seen: set) -> Iterator[Path]:
    """Yield a file, or all files below a folder whose kind is known, links included.

    seen has the numbers of files and folders that were found before, and gets the others.
    """
    status = path.stat()
    number = (status.st_dev, status.st_ino or os.path.realpath(path))  # some drives have no st_ino
    if number in seen:
        return
    seen.add(number)
    if not path.is_dir():
        yield path
        return
    inside = sorted(path.glob('[!.]*'))  # without hidden files, such as ._NAME from macOS
    known = [
        item for item in inside
        if item.is_dir() or kind_of(item) in READERS]
    if known != inside:
        print(f'{path}: skipped {len(inside) - len(known):,} files of unknown kinds')
    for item in known:
        yield from files_at(item, seen)


def cleaned(texts: Iterable) -> Texts:
    """Leave out empty texts, and turn \\r\\n into \\n; what is not text raises an error."""
    for text in texts:
        if text not in (None, ''):
            yield text.replace('\r\n', '\n')


def read_documents(path: Path, field: str = 'text') -> Texts:
    """Yield the texts in a file that are not empty; a file of an unknown kind is plain text."""
    with user_errors(path, f'give {FORMATS}; {CHOOSE_FIELD}'):
        reader = READERS.get(kind_of(path), read_text)
        yield from cleaned(reader(path, field))


def read_hub(dataset: str, field: str) -> Texts:
    """Yield the texts in a column of OWNER/DATASET[:CONFIG[:SPLIT]] on the Hub."""
    import datasets
    name, _, part = dataset.partition(':')
    config, _, split = part.partition(':')
    with user_errors(dataset):
        rows = datasets.load_dataset(name, config or None, split=split or 'train')
    with user_errors(dataset, CHOOSE_FIELD):
        for batch in rows.select_columns([field]).iter(batch_size=1000):
            yield from cleaned(batch[field])


def read_all(paths: list[str], datasets: list[str], field: str, seen: set) -> Texts:
    """Yield the texts in files, in folders and in datasets of the Hub; see files_at.

    Raises UserError if a path does not exist, or if no file is left.
    """
    files = []
    for path in paths:
        files += sorted(files_at(Path(path).expanduser(), seen), key=str)
    if paths and not files:
        raise UserError(f'there are no new files to read in {", ".join(paths)}; give {FORMATS}')
    sources = [read_documents(path, field) for path in files]
    sources += [read_hub(dataset, field) for dataset in datasets]
    return chain.from_iterable(sources)


def cut(texts: Iterable[str]) -> Texts:
    """Cut documents over LONGEST characters into pieces, so that text of all kinds is held out.

    They are cut at paragraphs, lines or words. If there are fewer than 100 documents, a piece is at
    most a hundredth of the text, but 100 characters or more.
    """
    texts = iter(texts)
    first = list(islice(texts, 100))
    size = LONGEST
    if len(first) < 100:
        hundredth = sum(map(len, first)) // 100
        size = min(size, max(100, hundredth))
    ends = [r'\Z', r'\n\s*\n', r'\n', r'\s', '.']  # the first that matches
    piece = re.compile('|'.join(f'.{{0,{size}}}{end}' for end in ends), re.DOTALL)
    for text in chain(first, texts):
        yield from filter(None, piece.findall(text))


def held_out(n: int, name: str, seed: int) -> np.ndarray:
    """Choose which of n documents to hold out: (n,), bool."""
    n_held = max(n / 100, min(n / 10, 10))
    if name == 'openwebtext':
        n_held = 0.0005 * n
    order = np.random.default_rng(seed).permutation(n)
    is_held = np.zeros(n, bool)
    is_held[order[:max(1, round(n_held))]] = True
    return is_held
