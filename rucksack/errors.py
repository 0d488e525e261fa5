"""Errors for people: one line that says what was given, what is allowed, and what to run."""

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ArgumentTypeError, ValueError):
    """An error the user can fix; where a flag is parsed, argparse adds the name of the flag."""


@contextmanager
def user_errors(what: object, hint: str = '', problem: str = 'cannot be read') -> Iterator[None]:
    """Turn a library's error about a file into one line: the file, the library's words and a hint.

    Damaged files and failing downloads raise errors of many types, and a panic in a Rust library is
    not an Exception. A NameError, which no file can cause, keeps its traceback.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, NameError):
        raise
    except BaseException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            if cause is not error:  # raised by our code that a library ran: it names the file
                raise cause
            raise UserError(f'{what}: {cause}')
        kind = type(cause).__name__
        said, _, _ = str(cause).partition('In PyTorch 2.6')  # torch suggests running the file
        said = ' '.join(said.split())[:300]
        line = f'{what} {problem} ({kind}: {said})'
        raise UserError(f'{line}; {hint}' if hint else line)
