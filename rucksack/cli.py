"""Handle command lines, progress bars and signals, and locate the package."""

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rucksack.errors import UserError

HOME = Path(__file__).parent  # has model.py, senses.py, the scripts, config/ and pretrained/
if not (HOME / 'model.py').exists():  # in a clone, not installed
    HOME = HOME.parent


def printable(text: str) -> str:
    """Replace the characters that control a terminal or its text direction with spaces."""
    return re.sub('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]', ' ', text)


def complain(script: str, message: str) -> None:
    """Print one line on standard error."""
    line = ' '.join(printable(message).split())
    print(f'{script}: {line}', file=sys.stderr)


def run_cli(script: str, run: Callable[[list[str]], int | None], argv: list[str] | None = None
            ) -> None:
    """Run a script; exit with 2 for errors the user can fix, 130 on Ctrl-C, else what run returns.

    argv defaults to the arguments on the command line.
    """
    code = 0
    if argv is None:
        argv = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='replace')  # for a terminal without UTF-8
    with suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see interrupts.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get('WORLD_SIZE', '1') == '1':  # torchrun ends processes that wait for others
        for name in ('SIGTERM', 'SIGHUP'):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            with suppress(ValueError):  # not in the main thread
                if number and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                    signal.signal(number, leave)
    try:
        code = run(argv)
        print(end='', flush=True)
    except BrokenPipeError:  # the reader, such as head, has exited; Python would complain
        discard_output()
    except (UserError, OSError) as error:
        code = 2
        complain(script, str(error))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and 'allocate' not in str(error):
            raise
        code = 2
        complain(script, 'out of memory; use a smaller model or shorter texts or, for train.py, '
                         'lower --batch_size and raise --gradient_accumulation_steps to match')
    except KeyboardInterrupt:
        code = 130
        complain(script, 'interrupted')
    if code:
        sys.exit(code)


def leave(number: int, frame) -> None:
    """Exit after a signal, so that temporary files are removed on the way out."""
    sys.exit(128 + number)


def note_signals() -> list[int]:
    """Record Ctrl-C and SIGTERM in the returned list; a second one stops the program at once."""
    noted = [0]

    def note(number: int, frame) -> None:
        noted.append(number)
        forget_signals()

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return noted


def forget_signals() -> None:
    """Let Ctrl-C and SIGTERM stop the program again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def discard_output() -> None:
    """Discard standard output from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


PATHS = ('FILE', 'DIR', 'MODEL', 'PATH', None)  # None: the settings of train.py


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors that treats --top-k and --top_k as the same flag."""

    def error(self, message: str) -> None:
        """Raise UserError instead of printing the usage and exiting."""
        raise UserError(f'{message}; see --help')

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, with each flag spelled as it was declared.

        A shell does not expand ~ after = or @. Here, ~ means the home folder after @, and in the
        value of a flag whose metavar is one of PATHS.
        """
        actions = {flag.replace('_', '-'): (flag, action)
                   for flag, action in self._option_string_actions.items()}
        spelled = []
        for word in args:
            flag, sign, value = word.partition('=')
            if flag.replace('_', '-') in actions:
                flag, action = actions[flag.replace('_', '-')]
                if value.startswith('~/') and action.metavar in PATHS:
                    value = str(Path(value).expanduser())
            word = flag + sign + value
            spelled.append(re.sub('(^|(?<==))@~/', f'@{Path.home()}/', word, count=1))
        return super().parse_known_args(spelled, namespace)


def number(kind: type, low: float, high: float = 2_147_483_648) -> Callable[[str], float]:
    """Make an argparse type: a number from low to high (default: 2^31)."""
    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f'{text!r} is not in the range {low} to {high}')
        return value

    parse.__name__ = kind.__name__  # so that argparse says "invalid int value"
    return parse


def progress(items, what: str):
    """Iterate over items with a progress bar, drawn every two seconds (in a log, every minute)."""
    from tqdm import tqdm  # comes with datasets
    seconds = 2 if sys.stderr.isatty() else 60
    return tqdm(items, what, delay=seconds, mininterval=seconds, leave=False)


def quiet_hub(name: str) -> None:
    """Say what we ask the Hub for, and stop its client from printing a line for each retry."""
    import huggingface_hub  # comes with datasets
    print(f'asking the Hub for {name} ...', flush=True)
    huggingface_hub.utils.logging.set_verbosity_error()
