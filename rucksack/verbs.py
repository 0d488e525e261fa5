"""What verbs share: flags, the model with its prompts and edit, and printed tables."""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor

from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits.lines import Change, make_edit, parse_lines
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.table import CSV_BEGINS, write_csv
from rucksack.words import PROMPT, read_prompts, word_list

FLAGS = {
    '--from': dict(
        dest='source',
        metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]'),
    '--start': dict(
        metavar='TEXT',
        action='append',
        help=f'the prompt, or @FILE with one prompt per line; repeatable [{PROMPT}]'),
    '--edit': dict(
        metavar='LINE',
        nargs='+',
        action='extend',
        default=[],
        help='edit senses, as sample.py does (its --help lists the forms)'),
    '--lender': dict(
        metavar='MODEL',
        help='edit this Backpack instead, and change the --from model by the same amount; both '
             'need the same vocabulary'),
    '--strength': dict(
        metavar='B',
        type=number(float, 0),
        help='scale the changes that --lender makes by B [1]'),
    '--words': dict(
        metavar='LIST',
        type=word_list,
        action='extend',
        default=[],
        help='nurse,teacher,guard or @FILE with one word per line'),
    '--device': dict(
        metavar='D',
        default='auto',
        help='auto, cpu, cuda, cuda:N or mps [auto]'),
    '--csv': dict(
        metavar='FILE',
        type=partial(output_path, 'the table', begins=CSV_BEGINS),
        help='also write all rows to a .csv file')}


def make_parser(verb: str, description: str, *flags: str) -> Parser:
    """Make a verb's parser with some of FLAGS; the verb adds what it alone takes."""
    parser = Parser(
        prog=f'rucksack {verb}',
        description=description,
        formatter_class=RawDescriptionHelpFormatter)
    for flag in flags:
        names = [flag, '--senses-off'] if flag == '--edit' else [flag]
        parser.add_argument(*names, **FLAGS[flag])
    return parser


def look(verb: str, description: str, asked: str, make_tables: Callable, *own_flags: str
         ) -> Callable:
    """Make the main function of a verb that prints make_tables(loaded, flags), a table by name.

    asked names its arguments, such as WORD. Every such verb has --from, --device and --csv.
    """
    def run(argv):
        parser = make_parser(verb, description, *own_flags, '--from', '--device', '--csv')
        n_asked = '*' if verb == 'explain' else '+'  # without a word, the likeliest next one
        parser.add_argument('asked', metavar=asked, nargs=n_asked, default=[''])
        parser.set_defaults(lender=None, strength=None)
        flags = parser.parse_args(argv)
        if flags.strength is not None and not flags.lender:
            parser.error('--strength needs --lender')
        loaded = load_model(flags.source, flags.device)
        if flags.lender:
            from rucksack.edits.lending import lend
            lender = load_model(flags.lender, flags.device)
            loaded = lend(loaded, lender, flags.strength)
        print(loaded.about())
        tables = make_tables(loaded, flags)
        if flags.csv:  # before printing: piping into head ends the program
            write_csv(flags.csv, tables)
        for name, table in tables.items():
            if len(tables) > 1:
                print(f'\n{name}', end='')
            print(table)
    return partial(run_cli, f'rucksack {verb}', run)


def look_at_words(verb: str, description: str, asked: str, make_table: Callable) -> Callable:
    """Make the main function of a verb that prints make_table(loaded, word) for each word."""
    def tables(loaded, flags):
        return {
            f'{verb} {word}': make_table(loaded, word)
            for word in flags.asked}
    return look(verb, description, asked, tables)


def look_at_prompts(verb: str, description: str, asked: str, make_table: Callable) -> Callable:
    """Make the main function of a verb that prints a table for each word and prompt.

    make_table takes the model, after --edit, a word, a prompt, ids (1, T), and all prompts.
    """
    def tables(loaded, flags):
        texts = read_prompts(flags.start)
        prompts = read_and_edit(loaded, texts, flags.edit)
        found = {}
        for word in flags.asked:
            for text, idx in zip(texts, prompts):
                found[f'{verb} {word}: {text}'] = make_table(loaded, word, idx, prompts)
        return found
    return look(verb, description, asked, tables, '--start', '--edit')


def read_and_edit(loaded: LoadedModel, texts: list[str], lines: list[str]) -> list[Tensor]:
    """Read prompts, ids (1, T) each, and make the model's edit; print what to know of it."""
    prompts = [loaded.read_prompt(text) for text in texts]
    if lines:
        edit_model(loaded, parse_lines(lines), prompts)
    return prompts


def edit_model(loaded: LoadedModel, changes: list[Change], prompts: Collection[Tensor] = ()
               ) -> None:
    """Make the model's edit of parsed lines, and print what to know of it."""
    loaded.edit, notices = make_edit(changes, loaded.backpack, loaded.encoding, prompts)
    for notice in notices:
        print(printable(notice))
