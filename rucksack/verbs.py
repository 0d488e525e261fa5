"""What verbs share: flags, the model with its prompts and edit, and printed tables."""

import argparse
from pathlib import Path

from torch import Tensor

from rucksack.cli import Parser, printable
from rucksack.edits.lines import make_edit, parse_lines
from rucksack.errors import UserError
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.words import PROMPT, read_prompts, word_list


def csv_path(path: str) -> Path:
    """Check that a table may be written to path."""
    return output_path('the table', path, CSV_BEGINS)


FLAGS = {
    '--from': dict(dest='source', metavar='MODEL', help='checkpoint, folder or Hub name '
                   '[the newest Backpack in out/, else english]'),
    '--start': dict(metavar='TEXT', action='append', help='the prompt, or @FILE with one prompt '
                    f'per line; repeatable [{PROMPT}]'),
    '--edit': dict(metavar='LINE', nargs='+', action='extend', default=[],
                   help='edit senses, as sample.py does (its --help lists the forms)'),
    '--words': dict(metavar='LIST', type=word_list, action='extend', default=[],
                    help='nurse,teacher,guard or @FILE with one word per line'),
    '--device': dict(metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]'),
    '--csv': dict(metavar='FILE', type=csv_path, help='also write all rows to a .csv file')}


def make_parser(verb: str, description: str, *flags: str) -> Parser:
    """Make a verb's parser with some of FLAGS; the verb adds what it alone takes."""
    parser = Parser(prog=f'rucksack {verb}', description=description,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(flag, **FLAGS[flag])
    return parser


def parse_look(verb: str, description: str, asked: str, *flags: str, argv: list[str]
               ) -> argparse.Namespace:
    """Parse the words asked about, and flags: those given, --from, --device and --csv."""
    parser = make_parser(verb, description, *flags, '--from', '--device', '--csv')
    parser.add_argument('asked', metavar=asked, nargs='+')
    return parser.parse_args(argv)


def word_and_senses(text: str) -> tuple[str, str]:
    """Split WORD:SENSES, as in nurse:3-5; raises UserError for * and for a list of words."""
    word, _, which = text.partition(':')
    words = word_list(word)
    if len(words) > 1 or words == ['*']:
        raise UserError(f'{text!r} does not name one word; write, for example, nurse:3-5')
    return words[0], which


def load_and_edit(flags: argparse.Namespace) -> tuple[LoadedModel, dict[str, Tensor]]:
    """Load a model, read its prompts and make its edit; also returns the prompts, ids (1, T)."""
    loaded = load_model(flags.source, flags.device)
    texts = read_prompts(flags.start)
    prompts = read_and_edit(loaded, texts, flags.edit)
    return loaded, dict(zip(texts, prompts))


def read_and_edit(loaded: LoadedModel, texts: list[str], lines: list[str]) -> list[Tensor]:
    """Read prompts, ids (1, T) each, and make the model's edit; print what to know of all three."""
    print(loaded.about())
    prompts = [loaded.read_prompt(text) for text in texts]
    if lines:
        loaded.edit, notices = make_edit(
            parse_lines(lines), loaded.backpack, loaded.encoding, prompts)
        for notice in notices:
            print(printable(notice))
    return prompts


def show_tables(tables: dict[str, Table], csv_file: Path | None) -> None:
    """Write tables to a file, if one is given, and print them, with their names if several."""
    if csv_file:  # before printing: piping into head ends the program
        write_csv(csv_file, tables)
    for name, table in tables.items():
        if len(tables) > 1:
            print(f'\n{name}', end='')
        print(table)
