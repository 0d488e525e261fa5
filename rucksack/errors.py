"""Errors for people: one line that says what was given, what is allowed, what to run."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error the user can fix. It should say what was given, what is allowed, what to run."""


class LocalError(UserError):
    """A UserError that a single process of torchrun can have; each process prints its own."""


def one_line(error: object) -> str:
    """Return what an exception says in one line, at most 300 characters."""
    text = str(error) or type(error).__name__
    text, _, _ = text.partition('In PyTorch 2.6')  # where torch advises to run what is in the file
    return ' '.join(text.split())[:300]


@contextmanager
def reading(what: object, hint: str = '', problem: str = 'cannot be read') -> Iterator[None]:
    """Turn any error in reading a file into a UserError: what it is, the library's words, a hint.

    Damaged files and failing downloads raise errors of many types; that of a library in Rust is no
    Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise UserError(f'{what}: {cause}')
        kind = type(cause).__name__
        line = f'{what} {problem} ({kind}: {one_line(cause)})'
        raise UserError(f'{line}; {hint}' if hint else line)
