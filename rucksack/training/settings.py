"""Settings: a dataclass, filled from config files (key = value lines), then from --key=value."""

import argparse
import ast
import difflib
from dataclasses import field, fields
from pathlib import Path

from rucksack import HOME
from rucksack.cli import Parser, UserError, number, reading


def setting(default, meaning: str, low: float = 0, high: float = 1 << 31, choices: tuple = ()):
    """Make a field of a settings dataclass: default, line of --help, range of a number, choices."""
    metadata = {'meaning': meaning, 'low': low, 'high': high, 'choices': choices or None}
    return field(default=default, metadata=metadata)


def true_or_false(text: str) -> bool:
    """Parse True or False, for argparse."""
    if text not in ('True', 'False'):
        raise argparse.ArgumentTypeError(f'{text!r} is neither True nor False')
    return text == 'True'


class SettingsParser(Parser):
    """Parses --key=value into a dataclass's settings; omits those that are not given."""

    def __init__(self, kind: type, prog: str, description: str):
        super().__init__(prog, f'{prog} [config.py ...] [--key=value ...]', description,
                         allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.add_argument('configs', nargs='*', metavar='config.py', default=[],
                          help='files of key = value lines')
        self.names = [f.name for f in fields(kind)]
        for f in fields(kind):
            options = {'type': f.type}
            if f.type is bool:
                options = {'type': true_or_false, 'nargs': '?', 'const': True}
            elif f.type is not str:
                options = {'type': number(f.type, f.metadata['low'], f.metadata['high'])}
            meaning = f'{f.metadata["meaning"]} [{f.default}]'.replace('%', '%%')
            self.add_argument(f'--{f.name}', choices=f.metadata['choices'], help=meaning,
                              metavar=f.type.__name__, **options)

    def parse(self, words: list[str]) -> dict:
        """Parse settings in words, config files as 'configs'; UserError for an unknown one."""
        args, unknown = self.parse_known_intermixed_args(self.as_declared(words))
        if unknown:
            name = unknown[0].partition('=')[0].lstrip('-')
            near = difflib.get_close_matches(name, self.names, 1, cutoff=0.75)
            hint = f'did you mean {near[0]}?' if near else '--help lists all'
            raise UserError(f'there is no setting {name}; {hint}')
        return vars(args)


def read_config(path: str | Path, parser: SettingsParser) -> dict:
    """Read the settings in a config file; its key = value lines are parsed, never executed.

    A relative path that does not exist here may be that of a config that comes with the package.
    """
    if not Path(path).exists() and (HOME / path).exists():
        path = HOME / path
    with reading(path, 'a config file has only key = value lines, and a flag is --key=value'):
        words = []
        for line in ast.parse(Path(path).read_text(encoding='utf-8-sig')).body:
            name, value = key_and_value(line)
            words.append(f'--{name}={value}')
        settings = parser.parse(words)
    del settings['configs']
    return settings


def key_and_value(line: ast.stmt) -> tuple[str, object]:
    """Parse a key = value line; UserError for any other code."""
    code = ast.unparse(line).splitlines()[0][:100]
    with reading(f'line {line.lineno}, {code},', problem='is not key = value'):
        target, = line.targets
        return target.id, ast.literal_eval(line.value)


def parse_settings(kind: type, prog: str, description: str, argv: list[str]
                   ) -> tuple[dict, set[str], list[str]]:
    """Read settings from config files, then from flags.

    Returns the settings given, the names set by flags, and the paths of the config files.
    """
    parser = SettingsParser(kind, prog, description)
    flags = parser.parse(argv)
    configs = flags.pop('configs')
    settings = {}
    for path in configs:
        settings |= read_config(path, parser)
    return settings | flags, set(flags), configs
