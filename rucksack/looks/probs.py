"""The probability that words come next, before and after an edit: a row for each prompt.

    python -m rucksack probs she,he --start "My {} said that" --words nurse,guard --edit "*:10"

Each of --words takes the place of {} in --start.
"""

from functools import partial

from torch import Tensor

from rucksack.cli import number, run_cli
from rucksack.errors import UserError
from rucksack.loaded import LoadedModel, load_model
from rucksack.looks.next_words import next_logits
from rucksack.table import Table, shortened
from rucksack.verbs import make_parser, read_and_edit, show_tables
from rucksack.words import read_prompts, word_ids, word_list


def probs(loaded: LoadedModel, texts: list[str], prompts: list[Tensor], words: list[str]) -> Table:
    """Show the probability that each word comes next, before and after the model's edit.

    Two words also get their log odds, ln(p(first) / p(second)), a difference of two logits.
    """
    ids = word_ids(loaded.encoding, words)
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
                row.append((logits[ids[0]] - logits[ids[1]]).item())
        rows.append(row)
    return Table('The probability that each word comes next (after: with the edit)', columns, rows)


def run(argv: list[str]) -> None:
    """Print one table."""
    parser = make_parser('probs', __doc__, '--from', '--start', '--words', '--edit', '--device',
                         '--csv')
    add = parser.add_argument
    add('asked', metavar='LIST', type=word_list, nargs='+', help='she,he or @FILE')
    add('--lender', metavar='MODEL', help='edit this Backpack instead, and change the --from model '
                                          'as much; both need the same vocabulary')
    add('--strength', metavar='B', type=number(float, 0),
        help='scale the changes that --lender makes by B [1]')
    flags = parser.parse_args(argv)
    if flags.strength is not None and not flags.lender:
        parser.error('--strength needs --lender')
    texts = read_prompts(flags.start)
    if flags.words:
        texts = with_words(texts, flags.words)
    loaded = load_model(flags.source, flags.device)
    if flags.lender:
        from rucksack.edits.lending import lend
        loaded = lend(loaded, load_model(flags.lender, flags.device), flags.strength)
    prompts = read_and_edit(loaded, texts, flags.edit)
    words = [word for words in flags.asked for word in words]
    show_tables({'probs': probs(loaded, texts, prompts, words)}, flags.csv)


def with_words(texts: list[str], words: list[str]) -> list[str]:
    """Write each word in place of {} in each text; raises UserError for a text without {}."""
    for text in texts:
        if '{}' not in text:
            raise UserError(f'--words: {text!r} has no {{}} to replace')
    return [text.replace('{}', word) for text in texts for word in words]


main = partial(run_cli, 'rucksack probs', run)
