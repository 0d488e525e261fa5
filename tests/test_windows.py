"""Claims about systems other than Linux, tested on this one."""

import ctypes
import os
from pathlib import Path

import pytest

from rucksack import device
from rucksack.files import locked_folder, write_file

pytestmark = pytest.mark.usefixtures('folder')


def test_a_lock_leaves_nothing_behind():
    """A lock leaves neither its file nor the folders made for it."""
    with locked_folder(Path('out/run')):
        assert os.listdir('out/run') == ['.lock']
    assert os.listdir() == []


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


@pytest.mark.parametrize('system', ['win32', 'darwin'])
def test_no_system_but_linux_is_asked_for_glibc(system, monkeypatch):
    """Only Linux has a glibc: elsewhere, ctypes opens no library, or one without mallopt."""
    monkeypatch.setattr('sys.platform', system)
    monkeypatch.setattr(ctypes, 'CDLL', None)
    device.keep_freed_memory()
