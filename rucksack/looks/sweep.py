"""The next words as senses of WORD are scaled from 0 to 1 (Figure 3).

    python -m rucksack sweep nurse:10
"""

from collections.abc import Collection
from functools import partial

from torch import Tensor

from rucksack.cli import run_cli
from rucksack.edits.lines import find_senses
from rucksack.loaded import LoadedModel
from rucksack.looks.next_words import next_words
from rucksack.senses import compose, scale_senses
from rucksack.table import Table
from rucksack.verbs import load_and_edit, parse_look, show_tables, word_and_senses
from rucksack.words import edit_targets


def sweep(loaded: LoadedModel, text: str, idx: Tensor, prompts: Collection[Tensor]) -> Table:
    """Show the next words after idx (1, T) while senses are scaled, after the model's edit."""
    model = loaded.backpack
    word, which = word_and_senses(text)
    numbers, why = find_senses(word, which, model, loaded.encoding, prompts)
    words = edit_targets(loaded.encoding, word)
    edits = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        scale = scale_senses(words, numbers, factor)
        edits[str(factor)] = compose([loaded.edit, scale])
    title = f'The next words with {why or text} scaled from 0 to 1'
    return next_words(loaded, model, title, idx, edits)


def run(argv: list[str]) -> None:
    """Print a table for each word and prompt."""
    flags = parse_look('sweep', __doc__, 'WORD[:SENSES]', '--start', '--edit', argv=argv)
    loaded, prompts = load_and_edit(flags)
    tables = {}
    for word in flags.asked:
        for text, idx in prompts.items():
            tables[f'sweep {word}: {text}'] = sweep(loaded, word, idx, prompts.values())
    show_tables(tables, flags.csv)


main = partial(run_cli, 'rucksack sweep', run)
