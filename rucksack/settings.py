"""Settings: any dataclass, filled from config files (lines key = value) and then from --key=value."""

import ast
import difflib
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path

from rucksack.common import Parser, UserError, one_line


def setting(default, meaning: str, low: float = 0, below: float = 1 << 31, of: tuple = ()):
    """A field of a dataclass of settings: its line of --help, and what a number or a text may be."""
    return field(default=default, metadata={'meaning': meaning, 'low': low, 'below': below, 'of': of})


def typed(kind: type, name: str, value, source: str):
    """The value in the type of the setting; UserError where it may not be that, or there is none."""
    known = {f.name: f for f in fields(kind)}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
        hint = f'did you mean {near[0]}?' if near else '--help lists all'
        raise UserError(f'{source}: there is no setting {name}; {hint}')
    of_type, may = known[name].type, known[name].metadata
    if type(value) is not of_type and not (of_type is float and type(value) is int):
        raise UserError(f'{source}: {name} is {value!r}; it must be of type {of_type.__name__}')
    if of_type in (int, float) and not may['low'] <= value < may['below']:
        raise UserError(f'{source}: {name} is {value}; it must be from {may["low"]} to below {may["below"]}')
    if may['of'] and value not in may['of']:
        raise UserError(f'{source}: {name} is {value!r}; it can be {", ".join(may["of"])}')
    return float(value) if of_type is float else value


def read_config(kind: type, path: str) -> dict:
    """The settings in a config file: lines key = value with Python literals, parsed and never executed."""
    if not Path(path).is_file():
        there = ', '.join(map(str, sorted(Path('config').glob('*.py'))))
        raise UserError(f'no such config file: {path}; there are {there or "none in config/"}')
    lines, source = [], path
    try:
        for line in ast.parse(Path(path).read_text(encoding='utf-8-sig')).body:
            source = f'{path}, line {line.lineno}'
            (target,), value = line.targets, ast.literal_eval(line.value)
            lines.append((target.id, value, source))
    except Exception as error:  # SyntaxError, ValueError, AttributeError, RecursionError, MemoryError ..
        raise UserError(f'{source}: a config file holds lines key = value, plain values ({one_line(error)})')
    return {name: typed(kind, name, value, source) for name, value, source in lines}


def parse_settings(kind: type, prog: str, description: str, argv: list[str]) -> tuple[dict, list, list]:
    """The settings given, the config files, and the flags. Alone, --overwrite is --overwrite=True."""
    parser = Parser(prog, f'{prog} [config.py ...] [--key=value ...]', description, allow_abbrev=False)
    parser.add_argument('configs', nargs='*', metavar='config.py', help='files of key = value lines')
    for f in fields(kind):
        parser.add_argument(f'--{f.name}', metavar=f.type.__name__,
                            help=f'{f.metadata["meaning"]} [{f.default}]'.replace('%', '%%'))
    alone = {f.name for f in fields(kind) if f.type is bool}
    argv = [f'{word}=True' if word.lstrip('-').replace('-', '_') in alone and after not in ('True', 'False')
            else word for word, after in zip(argv, [*argv[1:], ''])]
    args, unknown = parser.parse_known_intermixed_args(argv)
    for word in unknown:
        typed(kind, word.partition('=')[0].lstrip('-'), None, 'command line')
    values, flags = {}, []
    for path in args.configs:
        values |= read_config(kind, path)
    for f in fields(kind):
        if (text := getattr(args, f.name)) is not None:
            value = text
            with suppress(Exception):  # what is no literal stays text, and so of the wrong type
                value = text if f.type is str else ast.literal_eval(text)
            values[f.name] = typed(kind, f.name, value, 'command line')
            flags.append(f'--{f.name}={text}')
    return values, args.configs, flags
