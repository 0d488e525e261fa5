"""One HTML file that runs a model in the browser, with a slider for each sense.

    python -m rucksack page nurse.html --start "The nurse said that"
"""

from functools import partial

from rucksack.cli import run_cli
from rucksack.loaded import load_model
from rucksack.page import write_page
from rucksack.verbs import make_parser
from rucksack.words import PROMPT


def run(argv: list[str]) -> None:
    """Write the page, and print its size."""
    parser = make_parser('page', __doc__, '--from')
    parser.add_argument('file', metavar='FILE')
    parser.add_argument('--start', metavar='TEXT', default=PROMPT,
                        help=f'the text in its box [{PROMPT}]')
    flags = parser.parse_args(argv)
    loaded = load_model(flags.source, 'cpu')
    size = write_page(loaded, flags.start, flags.file)
    print(f'{loaded.about()}\n{flags.file}: {size}')


main = partial(run_cli, 'rucksack page', run)
