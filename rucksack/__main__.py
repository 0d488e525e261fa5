"""The scripts as subcommands: rucksack sample ARGUMENTS, or python -m rucksack sample ARGUMENTS."""

from functools import partial
from importlib import import_module

from rucksack.cli import Parser, run_cli

SCRIPTS = ('prepare', 'train', 'sample', 'edit', 'eval')


def run(argv: list[str]) -> None:
    """Run the script named by the first argument, and pass it the rest."""
    parser = Parser(prog='rucksack', description='Run a script; see rucksack SCRIPT --help.')
    parser.add_argument('script', choices=SCRIPTS, metavar='|'.join(SCRIPTS))
    script = parser.parse_args(argv[:1]).script
    import_module(f'rucksack.{script}').main(argv[1:])


main = partial(run_cli, 'rucksack', run)

if __name__ == '__main__':
    main()
