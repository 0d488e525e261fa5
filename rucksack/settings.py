"""Settings from config files and from --key=value."""

import ast
import difflib
import math
from dataclasses import field, fields

from rucksack.common import UserError, one_line


def setting(default, meaning: str):
    """A field of Settings with its line of --help."""
    return field(default=default, metadata={'meaning': meaning})


# -----------------------------------------------------------------------------
# Settings from files and from the command line.


def typed(kind: type, name: str, value, source: str):
    """The value, as the type of the setting; UserError where its type is another or nothing has that name."""
    types = {f.name: f.type for f in fields(kind)}
    if name not in types:
        near = difflib.get_close_matches(name[:40], types, 1, cutoff=0)[0]
        raise UserError(f'{source}: there is no setting {name}; did you mean {near}? --help lists all')
    if type(value) is int and abs(value) >= 1 << 31:
        raise UserError(f'{source}: {name} is too large a number; it must be below 2**31')
    if types[name] is float and type(value) is int:
        value = float(value)
    if type(value) is not types[name] or (types[name] is float and not math.isfinite(value)):
        raise UserError(f'{source}: {name} is {value!r}; it must be of type {types[name].__name__}')
    return value


def read_config(kind: type, path: str) -> dict:
    """The settings in a config file: lines key = value with Python literals, parsed and never executed."""
    try:
        with open(path, encoding='utf-8-sig') as file:
            lines = ast.parse(text := file.read(1 << 20)).body
            if len(text) == 1 << 20:
                raise ValueError('it is too long')
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f'{path} cannot be read as a config file ({one_line(error)}); config/ has examples')
    values = {}
    for line in lines:
        source = f'{path}, line {line.lineno}'
        try:
            (target,) = line.targets
            name, value = target.id, ast.literal_eval(line.value)
        except (AttributeError, TypeError, ValueError, RecursionError, MemoryError):
            raise UserError(f'{source}: a config file holds only lines key = value, with plain values')
        values[name] = typed(kind, name, value, source)
    return values


def literal(text: str):
    """A number or truth value as Python writes it; anything else stays text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
