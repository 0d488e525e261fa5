"""What every script stands on: errors, the command line, files."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm


class UserError(ValueError):
    """Something the user can mend; the scripts print it as one line and leave with exit code 2."""


# -----------------------------------------------------------------------------
# Weights from files, and a device to put them on.


def one_line(error: Exception) -> str:
    """What an exception says, as it fits into a message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:150]


def find_device(name: str) -> str:
    """The device to compute on; auto is CUDA, else MPS, else the CPU."""
    import torch
    if name == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f'device {name} cannot be used ({one_line(error)}); take auto or cpu')
    return name


def progress(items, what: str):
    """The items, on a terminal with a bar and the time left where they take more than two seconds."""
    return tqdm(items, what, delay=2, mininterval=1, leave=False, disable=None)


def printable(text: str) -> str:
    """A text as a terminal can show it: what controls one, in a corpus or a file of others, is a space."""
    return ''.join(c if c.isprintable() or c == '\n' else ' ' for c in text)


def fail(script: str, message: str, code: int = 2) -> None:
    """Say in one line, whatever characters the message quotes, what is wrong, and leave."""
    text = ' '.join(printable(message).split())
    print(f'{script}: {text if len(text) < 2000 else f"{text[:1000]} ... {text[-900:]}"}', file=sys.stderr)
    sys.exit(code)


def drop_unwritable_output() -> None:
    """Forget what standard output cannot take: Python would try again as it ends, and complain."""
    try:
        print(end='', flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An argparse parser that says what is wrong in one line, whatever characters it quotes."""

    def error(self, message: str) -> None:
        """Leave with exit code 2."""
        fail(self.prog, f'{message}; see python {self.prog} --help')

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, but not to take --flag=-- for an empty list of values."""
        for word in args or []:
            if word.startswith('-') and word.endswith('=--'):
                self.error(f'{word}: -- is no value')
        return super().parse_known_args(args, namespace)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_for(flag: str, path: str, suffix: str = '') -> Path:
    """Where a file that a flag names is to be written, not a link to it; UserError where it cannot be."""
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.exists() > file.is_file():
        raise UserError(f'{flag} {path} is no file, or there is no folder to write it to; name another')
    if not file.name.lower().endswith(suffix):  # a browser goes by it, and nothing else is overwritten
        raise UserError(f'{flag} {path} does not end in {suffix}; name a file that does')
    return file


def write_file(path: Path, text: str) -> None:
    """Write a file that has its name only when complete."""
    unfinished = path.with_name(f'.partial-{os.getpid()}')
    try:
        unfinished.write_text(text, encoding='utf-8')
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# -----------------------------------------------------------------------------
# The command line.


def number(kind: type, low: float, high: float = 1 << 31):
    """An argparse type: a number from low to high."""
    def parse(text: str):
        """The number that the text is."""
        try:
            if low <= (value := kind(text)) <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f'{text[:40]!r} is no {kind.__name__} from {low} to {high}')
    return parse


SEVERAL = dict(nargs='+', action='extend', default=[])  # a flag that takes several values and repeats


def answer(script: str, run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run a script: what the user can mend is one line and exit code 2, an interruption exit code 130."""
    try:
        run(args)
        print(end='', flush=True)
    except BrokenPipeError:  # the reader, as head does, has seen enough
        drop_unwritable_output()
    except (UserError, OSError) as error:
        drop_unwritable_output()
        fail(script, str(error))
    except KeyboardInterrupt:
        sys.exit(130)
