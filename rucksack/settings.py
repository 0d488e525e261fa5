"""Settings: a dataclass, filled from config files (key = value lines), then from --key=value."""

import argparse
import ast
import difflib
from dataclasses import field, fields, replace
from pathlib import Path

from rucksack.cli import HOME, Parser, number
from rucksack.errors import UserError, user_errors


def setting(default, meaning: str, low: float = 0, high: float = 2_147_483_648,
            choices: tuple | None = None):
    """Make a field of a settings dataclass; its metadata holds its flag's argparse options."""
    kind = type(default)
    help = f'{meaning} [{default}]'.replace('%', '%%')  # argparse formats it
    options = {'help': help, 'choices': choices}
    if kind is bool:
        options |= {'type': true_or_false, 'nargs': '?', 'const': True}
    elif kind is not str:  # argparse's default type is str
        options['type'] = number(kind, low, high)
    return field(default=default, metadata=options)


def true_or_false(text: str) -> bool:
    """Parse True or False, for argparse."""
    if text not in ('True', 'False'):
        raise ValueError
    return text == 'True'


def parse(parser: Parser, words: list[str]) -> dict:
    """Parse words into a dict of settings and 'configs'; raises UserError for unknown ones."""
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        flag = unknown[0].partition('=')[0]
        nearest = difflib.get_close_matches(flag, parser._option_string_actions, 1, cutoff=0)
        raise UserError(f'unknown setting {flag}; did you mean {nearest[0]}? See --help')
    return vars(args)


def read_config(path: str | Path, parser: Parser) -> dict:
    """Read the settings in a config file; its key = value lines are parsed, never executed.

    A relative path that does not exist here may name a config that comes with the package.
    """
    if not Path(path).exists() and (HOME / path).exists():
        path = HOME / path
    words = []
    with user_errors(path, 'a config file has only key = value lines, and a flag is --key=value'):
        for line in ast.parse(Path(path).read_text(encoding='utf-8-sig')).body:
            name, = line.targets
            try:
                value = ast.literal_eval(line.value)
            except ValueError:
                raise UserError(f'{ast.unparse(line)!r} has an expression; write its value')
            words.append(f'--{ast.unparse(name)}={value}')
        return parse(parser, words)


def parse_settings(kind: type, argv: list[str]) -> tuple[object, set[str], list[str]]:
    """Read the settings of a dataclass from config files, then from flags.

    Returns the settings, the names set by flags, and the paths of the config files.
    """
    parser = Parser('train.py', 'train.py [config.py ...] [--key=value ...]',
                    'Train a Backpack or its baseline Transformer.',
                    allow_abbrev=False, argument_default=argparse.SUPPRESS)  # no defaults
    parser.add_argument('configs', nargs='*', metavar='config.py', help='key = value lines')
    for f in fields(kind):
        parser.add_argument(f'--{f.name}', **f.metadata)
    flags = parse(parser, argv)
    configs = flags.pop('configs', [])
    settings = {}
    for path in configs:
        settings |= read_config(path, parser)
    return kind(**settings | flags), set(flags), configs


def with_decided(settings, flags: set[str], decided: dict):
    """Replace the settings that a checkpoint decides.

    Raises UserError if a flag contradicts one, unless the flag is auto or -1: then the run chooses.
    """
    for name in sorted(flags & decided.keys()):
        value = getattr(settings, name)
        if value not in (decided[name], 'auto', -1):
            raise UserError(f'it has {name}={decided[name]}; drop --{name}={value}')
    return replace(settings, **decided)
