"""Claims about systems other than Linux, tested on this one."""

import argparse
import ctypes
import errno
import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import ROOT, SMALL

from rucksack import cli, device, prepare, sample, train
from rucksack.errors import UserError
from rucksack.files import locked_folder, write_file
from rucksack.looks.next_words import bar

pytestmark = pytest.mark.usefixtures('folder')


def test_a_lock_leaves_nothing_behind():
    """A lock leaves neither its file nor the folders made for it."""
    with locked_folder(Path('out/run')):
        assert os.listdir('out/run') == ['.lock']
    assert os.listdir() == []


def test_a_folder_that_was_there_stays():
    """An empty folder of one's own is not removed with those that the lock made."""
    Path('out').mkdir()
    with locked_folder(Path('out/run')):
        pass
    assert os.listdir() == ['out']


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
    refusals = iter([PermissionError, OSError(errno.EINVAL, 'is mapped')])

    def replace(*paths) -> None:
        for refusal in refusals:
            raise refusal
        real(*paths)

    monkeypatch.setattr(os, 'replace', replace)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    write_file(Path('mine.txt'), 'text')
    assert os.listdir() == ['mine.txt']


@pytest.mark.parametrize('name, winerror, codes', [
    (None, None, []), ('*.txt', None, [2]), (None, 1224, [2])])
def test_only_a_closed_pipe_ends_silently(name, winerror, codes, monkeypatch, capsys):
    """On Windows, a file with a bad name, or one that is mapped, has the errno of a closed pipe."""
    error = OSError(errno.EINVAL, 'Invalid argument', name)
    error.winerror = winerror
    found = []
    monkeypatch.setattr(cli, 'CLOSED_PIPE', errno.EINVAL)
    monkeypatch.setattr(cli, 'discard_output', lambda: None)
    monkeypatch.setattr(sys, 'exit', found.append)
    cli.run_cli('prepare.py', Mock(side_effect=error), [])
    assert found == codes
    assert capsys.readouterr().err.count('\n') == len(codes)


def test_a_file_that_stays_open_is_not_replaced(monkeypatch):
    """After about two seconds the error shows, and no temporary file stays."""
    waits = []
    monkeypatch.setattr(os, 'replace', Mock(side_effect=PermissionError))
    monkeypatch.setattr(time, 'sleep', waits.append)
    with pytest.raises(PermissionError):
        write_file(Path('mine.txt'), 'text')
    assert sum(waits) == pytest.approx(2)
    assert os.listdir() == []


def test_a_file_has_the_same_bytes_on_windows(monkeypatch):
    """Windows' text layer would write a line end as two bytes."""
    def write_text(path, text, encoding, errors, newline='\r\n') -> None:
        path.write_bytes(text.replace('\n', newline).encode(encoding, errors))

    monkeypatch.setattr(Path, 'write_text', write_text)
    write_file(Path('mine.txt'), 'two\nlines\n')
    assert Path('mine.txt').read_bytes() == b'two\nlines\n'


@pytest.mark.parametrize('script', [prepare, sample, train])
def test_a_command_starts_under_a_home_with_backslashes(script, monkeypatch):
    """A home folder may contain backslashes."""
    monkeypatch.setenv('HOME', r'C:\Users\NAME')
    with pytest.raises(SystemExit) as stop:
        script.main(['--help'])
    assert not stop.value.code


def test_settings_need_no_intermixed_parsing(tiny, monkeypatch):
    """From Python 3.12.8 on, argparse's intermixed parsing does not call parse_known_args."""
    monkeypatch.setattr(argparse.ArgumentParser, 'parse_known_intermixed_args',
                        argparse.ArgumentParser.parse_known_args)
    train.main([*SMALL, '--max-iters=0'])
    assert os.listdir('out') == ['run']


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


@pytest.mark.parametrize('encoding, drawn', [('cp1252', '##'), ('utf-8', '██')])
def test_bars_are_signs_that_the_output_has(encoding, drawn, monkeypatch):
    """Where the output's encoding has no block, a bar is drawn with #."""
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding))
    assert bar(0.1) == drawn


def test_data_has_no_name_that_windows_would_change():
    """A dataset's name does not end in a dot, because Windows would drop it."""
    with pytest.raises(UserError, match=r"'mine\.'"):
        prepare.parse_args(['mine.', '--text', 'mine.txt'])
