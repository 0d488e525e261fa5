"""Files that appear whole or not at all, and folders that one process locks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rucksack.errors import UserError


def output_path(flag: str, path: str | None, begins: str) -> Path | None:
    """Return the path of a file to write, or None if path is None.

    Raises UserError if the file exists and does not begin like ours: a typo must not replace a
    person's own file.
    """
    if path is None:
        return None
    file = Path(path)
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        raise UserError(f'{flag} {path}: give the name of a file in a folder that exists')
    check_temporary(flag, file)
    contents = b''
    if file.exists():
        with open(file, 'rb') as opened:
            contents = opened.read(len(begins.encode()))
    if contents and contents != begins.encode():
        raise UserError(f'{flag} would replace {path}, which is a different kind of file; '
                        'give another name')
    return file


def temporary_of(path: Path) -> Path:
    """Name the file to write before it becomes path, or the file that the link path points to."""
    return Path(f'{os.path.realpath(path)}.partial')


def check_temporary(flag: str, path: Path) -> None:
    """Raise UserError if a file has the temporary name that atomic will use for path."""
    temporary = temporary_of(path)
    if temporary.is_file():
        raise UserError(f'{temporary} is in the way of {flag}; move it')


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, PATH.partial, which becomes path when complete.

    A link at path stays, and the file that it points to is replaced.
    """
    path = Path(os.path.realpath(path))
    temporary = temporary_of(path)
    try:
        yield temporary
        with open(temporary, 'r+b') as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())  # on disk before it gets its name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write a text file that appears only when complete."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding='utf-8', errors='replace')


def save_tensors(path: Path, state: dict) -> None:
    """Write a checkpoint with torch.save. Raises OSError if the disk is full."""
    import torch
    with atomic(path) as temporary, open(temporary, 'wb') as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch hides the OSError of a full disk
            raise error.__context__ or error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder if needed, and lock it; raises UserError if another process has locked it.

    While locked, it holds an empty file, .lock, which all machines that share the disk can see. If
    the process is killed, that file stays but no longer locks anything. Folders made here are
    removed at the end if they are empty.
    """
    from filelock import FileLock, Timeout  # comes with torch
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / '.lock'
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f'another process is writing to {folder}; wait, or choose another folder')
    try:
        yield
    finally:
        with suppress(OSError):  # on Windows, release removes it
            file.unlink()
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
