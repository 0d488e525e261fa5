"""Files that appear whole or not at all, and folders that one process locks."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from rucksack.errors import UserError


def output_path(flag: str, path: str, begins: str) -> Path:
    """Return the path of a file to write; it must be new, or begin like ours.

    Raises OSError if its folder cannot be written to.
    """
    file = Path(path).expanduser()
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise UserError(f'{flag} {path}: give the name of a file in a folder that exists')
    TemporaryFile(dir=file.parent).close()
    ours = begins.encode()
    contents = b''
    if file.exists():
        with open(file, 'rb') as opened:  # which may be large
            contents = opened.read(len(ours))
    if contents not in (b'', ours):
        raise UserError(f'{flag} would replace {path}, which is a different kind of file; '
                        'give another name')
    return file


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, .NAME.partial, which becomes path when complete.

    A link at path stays, and the file that it points to is replaced.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f'.{path.name}.partial')
    try:
        yield temporary
        with open(temporary, 'r+b') as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())  # on disk before it gets its name
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(new: Path, old: Path) -> None:
    """Rename new to old. Windows refuses while a program reads old: wait up to two seconds."""
    for _ in range(20):
        with suppress(OSError):  # PermissionError if it is open, WinError 1224 if it is mapped
            os.replace(new, old)
            return
        time.sleep(0.1)
    os.replace(new, old)


def write_file(path: Path, text: str) -> None:
    """Write a text file that appears only when complete, with the same bytes on every system."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding='utf-8', errors='replace', newline='\n')


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and lock it; raises TimeoutError if another process has locked it.

    While locked, it holds an empty file, .lock, which all machines that share the disk can see; the
    file of a killed process locks nothing. Folders made here are removed at the end if empty.
    """
    from filelock import FileLock  # comes with torch
    made = [
        path for path in (folder, *folder.parents)
        if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / '.lock'
    lock = FileLock(file)
    lock.acquire(timeout=0)
    try:
        yield
    finally:
        with suppress(OSError):  # on Windows, release removes it
            file.unlink()
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
