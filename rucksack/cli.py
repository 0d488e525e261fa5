"""Command lines: one-line errors, flags, progress bars, signals; and where the package is."""

import argparse
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rucksack.errors import UserError

HOME = Path(__file__).parent  # has model.py, senses.py, the scripts, config/ and pretrained/
if not (HOME / 'model.py').exists():  # in a clone, not installed
    HOME = HOME.parent
CLOSED_PIPE = errno.EINVAL if os.name == 'nt' else errno.EPIPE


def printable(text: str) -> str:
    """Replace the characters that control a terminal or its text direction with spaces."""
    return re.sub('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]', ' ', text)


def run_cli(
        script: str,
        run: Callable[[list[str]], int | None],
        argv: list[str] | None = None) -> None:
    """Run a script; exit with 2 for errors the user can fix, 130 on Ctrl-C, else what run returns.

    A FloatingPointError, with which training stops itself, is 1. argv defaults to the arguments on
    the command line.
    """
    code = 0
    if argv is None:
        argv = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='replace')  # for a terminal without UTF-8
    try:
        code = run(argv)
        print(end='', flush=True)
    except (UserError, OSError, FloatingPointError, KeyboardInterrupt) as error:
        # On Windows, an error of a file may have the same errno.
        if (isinstance(error, OSError) and error.errno == CLOSED_PIPE
                and not (error.filename or getattr(error, 'winerror', None))):
            discard_output()  # the reader, such as head, has exited; Python would complain
        else:
            code = {FloatingPointError: 1, KeyboardInterrupt: 130}.get(type(error), 2)
            line = printable(str(error) or 'interrupted')
            print(f'{script}: {" ".join(line.split())}', file=sys.stderr)
    if code:
        sys.exit(code)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Note Ctrl-C and SIGTERM in a list, after a 0; a second one stops the program at once."""
    noted = [0]

    def note(number: int, frame) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)

    handlers = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def discard_output() -> None:
    """Discard standard output from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line."""

    def error(self, message: str) -> None:
        """Raise UserError instead of printing the usage and exiting."""
        raise UserError(f'{message}; see --help')


def number(kind: type, low: float) -> Callable[[str], float]:
    """Make an argparse type: a number of at least low."""
    def parse(text: str) -> float:
        value = kind(text)
        if not value >= low:  # not a number (nan) is not
            raise UserError(f'{text!r} is not a number >= {low}')
        return value

    parse.__name__ = kind.__name__  # so that argparse says "invalid int value"
    return parse


def progress(items, what: str):
    """Iterate over items with a progress bar, drawn every two seconds (in a log, every minute)."""
    from tqdm import tqdm  # comes with datasets
    seconds = 2 if sys.stderr.isatty() else 60
    return tqdm(items, what, delay=seconds, mininterval=seconds, leave=False)
