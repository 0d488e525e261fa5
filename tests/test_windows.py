"""Claims about systems other than Linux, tested on this one."""

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import ROOT

from rucksack import device
from rucksack.files import locked_folder, write_file

pytestmark = pytest.mark.usefixtures('folder')


def test_the_lock_of_a_killed_process_does_not_lock():
    """A killed process leaves its lock file, and the next process takes it over."""
    Path('out/run').mkdir(parents=True)
    Path('out/run/.lock').touch()
    with locked_folder(Path('out/run')):
        write_file(Path('out/run/mine.txt'), 'text')
    assert os.listdir('out/run') == ['mine.txt']


def test_a_file_is_flushed_while_open_for_writing(monkeypatch):
    """A file is open for writing when it is flushed, as Windows requires."""
    def fsync(number: int) -> None:
        os.write(number, b'x')  # OSError if it is not open for writing
        os.lseek(number, 0, os.SEEK_SET)

    monkeypatch.setattr(os, 'fsync', fsync)
    write_file(Path('mine.txt'), 'text')


def test_a_file_that_a_program_has_open_is_replaced_later(monkeypatch):
    """Windows refuses to replace an open file, so a rename is tried again."""
    real = os.replace
    refusals = iter([PermissionError, PermissionError])

    def replace(*paths) -> None:
        for refusal in refusals:
            raise refusal
        real(*paths)

    monkeypatch.setattr(os, 'replace', replace)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    write_file(Path('mine.txt'), 'text')
    assert os.listdir() == ['mine.txt']


def test_a_file_has_the_same_bytes_on_windows(monkeypatch):
    """Windows' text layer would write a line end as two bytes."""
    def write_text(path, text, encoding, errors, newline='\r\n') -> None:
        path.write_bytes(text.replace('\n', newline).encode(encoding, errors))

    monkeypatch.setattr(Path, 'write_text', write_text)
    write_file(Path('mine.txt'), 'two\nlines\n')
    assert Path('mine.txt').read_bytes() == b'two\nlines\n'


@pytest.mark.parametrize('system', ['win32', 'darwin'])
def test_no_system_but_linux_is_asked_for_glibc(system, monkeypatch):
    """Only Linux has a glibc: elsewhere, ctypes opens no library."""
    monkeypatch.setattr('sys.platform', system)
    monkeypatch.setattr(ctypes, 'CDLL', None)
    device.keep_freed_memory()


def test_a_checkout_by_git_for_windows_has_unix_line_endings():
    """Git leaves the newlines of scripts as they are, though Git for Windows sets autocrlf."""
    git = ['git', '-c', 'core.autocrlf=true', '-c', 'user.name=a', '-c', 'user.email=a']
    for name in ('.gitattributes', '.ci/run'):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, name)
    for words in ('init -q', 'add .', 'commit -qm all', 'clone -q . b'):
        subprocess.run([*git, *words.split()], check=True)
    assert b'\r' not in Path('b/.ci/run').read_bytes()
