"""Settings: a dataclass, filled from config files (key = value lines), then from --key=value."""

import argparse
import ast
import difflib
from dataclasses import field, fields
from pathlib import Path

from rucksack import HOME
from rucksack.cli import Parser, UserError, number, reading


def setting(default, meaning: str, low: float = 0, choices: tuple | None = None):
    """Make a field of a settings dataclass: default, line of --help, least number, choices."""
    return field(default=default, metadata={'meaning': meaning, 'low': low, 'choices': choices})


def true_or_false(text: str) -> bool:
    """Parse True or False, for argparse."""
    if text not in ('True', 'False'):
        raise argparse.ArgumentTypeError(f'{text!r} is neither True nor False')
    return text == 'True'


class SettingsParser(Parser):
    """Parses --key=value into a dataclass's settings; omits those that are not given."""

    def __init__(self, kind: type):
        super().__init__('train.py', 'train.py [config.py ...] [--key=value ...]',
                         allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.add_argument('configs', nargs='*', metavar='config.py', default=[],
                          help='files of key = value lines')
        for f in fields(kind):
            options = {'type': f.type}
            if f.type is bool:
                options = {'type': true_or_false, 'nargs': '?', 'const': True}
            elif f.type is not str:
                options = {'type': number(f.type, f.metadata['low'])}
            meaning = f'{f.metadata["meaning"]} [{f.default}]'.replace('%', '%%')
            self.add_argument(f'--{f.name}', choices=f.metadata['choices'], help=meaning,
                              metavar=f.type.__name__, **options)

    def parse(self, words: list[str]) -> dict:
        """Parse settings in words, config files as 'configs'; UserError for an unknown one."""
        args, unknown = self.parse_known_intermixed_args(self.as_declared(words))
        if unknown:
            flag = unknown[0].partition('=')[0]
            nearest = difflib.get_close_matches(flag, self._option_string_actions, 1, cutoff=0)
            raise UserError(f'there is no {flag}; {nearest[0]} is the nearest, --help lists all')
        return vars(args)


def read_config(path: str | Path, parser: SettingsParser) -> dict:
    """Read the settings in a config file; its key = value lines are parsed, never executed.

    A relative path that does not exist here may be that of a config that comes with the package.
    """
    if not Path(path).exists() and (HOME / path).exists():
        path = HOME / path
    words = []
    with reading(path, 'a config file has only key = value lines, and a flag is --key=value'):
        for line in ast.parse(Path(path).read_text(encoding='utf-8-sig')).body:
            name, = line.targets
            words.append(f'--{name.id}={ast.literal_eval(line.value)}')
        settings = parser.parse(words)
    del settings['configs']
    return settings


def parse_settings(kind: type, argv: list[str]) -> tuple[dict, set[str], list[str]]:
    """Read the settings of a dataclass from config files, then from flags.

    Returns the settings given, the names set by flags, and the paths of the config files.
    """
    parser = SettingsParser(kind)
    flags = parser.parse(argv)
    configs = flags.pop('configs')
    settings = {}
    for path in configs:
        settings |= read_config(path, parser)
    return settings | flags, set(flags), configs
