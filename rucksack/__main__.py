"""The scripts as verbs: rucksack sample ARGUMENTS, or python -m rucksack sample ARGUMENTS."""

import sys
from importlib import import_module

from rucksack.cli import complain

SCRIPTS = ('prepare', 'train', 'sample', 'edit', 'eval')


def main() -> None:
    """Run the script that the first word names, with the other words as its arguments."""
    verb = ''.join(sys.argv[1:2])
    if verb not in SCRIPTS:
        complain('rucksack', f'{verb!r} is no command; write rucksack {"|".join(SCRIPTS)} --help')
        sys.exit(2)
    import_module(f'rucksack.{verb}').main(sys.argv[2:])


if __name__ == '__main__':
    main()
