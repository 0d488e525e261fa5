"""The probability that words come next, before and after an edit: a row for each prompt.

    python -m rucksack probs she,he --start "My {} said that" --words nurse,guard --edit "*:10"

Each of --words takes the place of {} in --start.
"""

from argparse import Namespace

from torch import Tensor

from rucksack.errors import UserError
from rucksack.loaded import LoadedModel
from rucksack.looks.next_words import next_logits
from rucksack.table import Table, shortened
from rucksack.verbs import look, read_and_edit
from rucksack.words import read_prompts, word_id, word_list


def probs(loaded: LoadedModel, texts: list[str], prompts: list[Tensor], words: list[str]) -> Table:
    """Show the probability that each word comes next, before and after the model's edit.

    Two words also get their log odds, ln(p(first) / p(second)), a difference of two logits.
    """
    ids = [word_id(loaded.encoding, word) for word in words]
    edits = {'': None}
    if loaded.edit:
        edits[' after'] = loaded.edit
    columns = {'prompt': shortened}
    for when in edits:
        columns |= {f'p({word}){when}': '.4f' for word in words}
        if len(words) == 2:
            columns[f'log odds{when}'] = '+.3f'
    rows = []
    for text, idx in zip(texts, prompts):
        row = [text]
        for edit in edits.values():
            logits = next_logits(loaded.model, idx, edit)  # (V,)
            row += logits.softmax(-1)[ids].tolist()
            if len(words) == 2:
                first, second = logits[ids]
                row.append((first - second).item())
        rows.append(row)
    return Table('The probability that each word comes next (after: with the edit)', columns, rows)


def tables(loaded: LoadedModel, flags: Namespace) -> dict[str, Table]:
    """Make one table."""
    texts = read_prompts(flags.start)
    if flags.words:
        texts = with_words(texts, flags.words)
    words = [word for text in flags.asked for word in word_list(text)]
    prompts = read_and_edit(loaded, texts, flags.edit)
    distinct = list(dict.fromkeys(words))
    return {'probs': probs(loaded, texts, prompts, distinct)}


def with_words(texts: list[str], words: list[str]) -> list[str]:
    """Write each word in place of {} in each text; raises UserError for a text without {}."""
    for text in texts:
        if '{}' not in text:
            raise UserError(f'--words: {text!r} has no {{}} to replace')
    return [text.replace('{}', word) for text in texts for word in words]


main = look('probs', __doc__, 'LIST', tables, '--start', '--words', '--edit', '--lender',
            '--strength')
