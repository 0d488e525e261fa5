"""The next words as senses of WORD are scaled from 0 to 1 (Figure 3).

    python -m rucksack sweep nurse:10
"""

from torch import Tensor

from rucksack.edits.lines import find_senses
from rucksack.loaded import LoadedModel
from rucksack.looks.next_words import next_words
from rucksack.senses import compose, scale_senses
from rucksack.table import Table
from rucksack.verbs import look_at_prompts
from rucksack.words import edit_targets, word_and_senses


def sweep(loaded: LoadedModel, text: str, idx: Tensor, prompts: list[Tensor]) -> Table:
    """Show the next words after idx (1, T) while senses are scaled, after the model's edit."""
    word, which = word_and_senses(text)
    numbers, why = find_senses(word, which, loaded.backpack, loaded.encoding, prompts)
    words = edit_targets(loaded.encoding, word)
    edits = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        scale = scale_senses(words, numbers, factor)
        edits[str(factor)] = compose([loaded.edit, scale])
    return next_words(loaded, f'The next words with {why or text} scaled from 0 to 1', idx, edits)


main = look_at_prompts('sweep', __doc__, 'WORD[:SENSES]', sweep)
