"""What every script stands on: one kind of error, one wrapper for it, files that appear whole, a device."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path


class UserError(ValueError):
    """Something the user can mend: what was given, what is allowed, what to run."""


def printable(text: str) -> str:
    """A text as a terminal can show it: control characters become spaces."""
    return ''.join(c if c.isprintable() or c == '\n' else ' ' for c in text)


def one_line(error: object) -> str:
    """The first line of what an exception says, at most 200 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def fail(script: str, message: str, code: int = 2) -> None:
    """Leave with a message of one line on standard error."""
    print(f'{script}:', ' '.join(printable(message).split())[:2000], file=sys.stderr)
    sys.exit(code)


def run_cli(script: str, run: Callable[[list[str]], int | None], argv: list[str]) -> None:
    """Run a script: exit code 2 and one line for what the user can mend, 130 after Ctrl-C, else its own."""
    getattr(sys.stdout, 'reconfigure', dict)(errors='replace')  # for terminals without unicode
    try:
        if code := run(argv):
            sys.exit(code)
        print(end='', flush=True)
    except BrokenPipeError:  # the reader, as head does, has seen enough; Python would complain as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:  # in every process of torchrun; the first of a node prints it
        fail(script, str(error)) if os.environ.get('LOCAL_RANK', '0') == '0' else sys.exit(2)
    except KeyboardInterrupt:
        fail(script, 'interrupted', 130)


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and with --top-k and --top_k as two spellings of one flag."""

    def error(self, message: str) -> None:
        """Leave with exit code 2."""
        fail(self.prog, f'{message}; see python {self.prog} --help')

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, after each flag is spelled as it was declared."""
        spelled = {flag.replace('_', '-'): flag for flag in self._option_string_actions}
        words = [word.partition('=') for word in args or []]
        args = [spelled.get(flag.replace('_', '-'), flag) + sign + value for flag, sign, value in words]
        return super().parse_known_args(args, namespace)


def number(kind: type, low: float, high: float = 1 << 31) -> Callable[[str], float]:
    """An argparse type: a number from low to high."""
    def parse(text: str) -> float:
        if not low <= (value := kind(text)) <= high:
            raise ValueError
        return value
    parse.__name__ = f'{kind.__name__} from {low} to {high}'  # for argparse's message
    return parse


def progress(items, what: str):
    """The items, behind a progress bar with the time left once they take more than two seconds."""
    from tqdm import tqdm  # comes with datasets
    return tqdm(items, what, delay=2, mininterval=1, leave=False, disable=None)


def find_device(name: str) -> str:
    """The device to compute on; auto is CUDA, else MPS, else the CPU. UserError if it cannot be used."""
    import torch
    if name == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    try:
        torch.ones(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f'device {name} cannot be used ({one_line(error)}); use auto or cpu')
    return name


def bfloat16_unit(device: str) -> str:
    """What makes products in bfloat16 several times as fast as in float32 on a device; '' if nothing does."""
    import torch
    if device.startswith('cuda'):
        return 'tensor cores' * torch.cuda.is_bf16_supported(including_emulation=False)
    if device == 'cpu' and torch.cpu._is_amx_tile_supported():
        return 'AMX'
    return 'AVX512-BF16' * (device == 'cpu' and torch.cpu._is_avx512_bf16_supported())


def output_path(flag: str, path: str | None, suffix: str) -> Path | None:
    """The path of a file to write; UserError for another suffix, so that a slip overwrites no checkpoint."""
    file = Path(os.path.realpath(path or '.'))
    if path is not None and (file.suffix.lower() != suffix or file.is_dir() or not file.parent.is_dir()):
        raise UserError(f'{flag} {path}: give a name that ends in {suffix}, in a folder that exists')
    return file if path else None


def write_file(path: Path, text: str) -> None:
    """Write a file that has its name only when complete."""
    unfinished = path.with_name(f'.partial-{os.getpid()}')
    try:
        unfinished.write_text(text, encoding='utf-8')
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def lock_folder(folder: Path, busy: str) -> int:
    """Lock a folder until the descriptor returned is closed; UserError(busy) if another process has it."""
    import fcntl  # Linux, macOS or WSL
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # other kinds come from file systems without locks
        if isinstance(error, BlockingIOError):
            raise UserError(busy)
    return descriptor
