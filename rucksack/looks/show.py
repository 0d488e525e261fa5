"""The ten words that each sense of WORD raises and lowers most (Tables 1 and 3).

    python -m rucksack show king:2,11     some senses; without :, all
    python -m rucksack show nurse:she/he  the sense that most separates she from he after the prompt
"""

from argparse import Namespace

import torch

from rucksack.edits.lines import find_senses
from rucksack.loaded import LoadedModel
from rucksack.looks.ranking import ranking
from rucksack.senses import extremes, senses_after
from rucksack.table import Table
from rucksack.verbs import look, read_and_edit
from rucksack.words import read_prompts, token_texts, tokens_of, word_and_senses

N = 10  # words on each side, as in Table 19


def show(loaded: LoadedModel, text: str, prompts: list) -> Table:
    """Show the words that senses of a word, as in nurse:3-5, move most after the model's edit."""
    word, which = word_and_senses(text)
    model = loaded.backpack
    numbers, _ = find_senses(word, which, model, loaded.encoding, prompts)
    tokens = tokens_of(loaded.encoding, word)
    idx = torch.tensor([tokens], device=loaded.device)  # (1, T)
    C = senses_after(model, idx, loaded.edit)[0, -1]  # (k, d)
    ids, logits = extremes(model, C[numbers], N)  # (senses, 2N) each
    cells = [(l, sign) for l in numbers for sign in '+-']  # two lines per sense
    token, = token_texts(loaded.encoding, tokens[-1:])
    title = (f'{word} ({token!r}): the words that each sense raises (+) and lowers (-) most, in '
             'logits at weight 1')
    columns = {'sense': 'd', 'sign': ''}
    return ranking(
        loaded, title, columns, cells,
        ids=ids.view(-1, N),
        scores=logits.view(-1, N))


def tables(loaded: LoadedModel, flags: Namespace) -> dict[str, Table]:
    """Make a table for each word."""
    texts = read_prompts(flags.start)
    prompts = read_and_edit(loaded, texts, flags.edit)
    return {f'show {text}': show(loaded, text, prompts) for text in flags.asked}


main = look('show', __doc__, 'WORD[:SENSES]', tables, '--start', '--edit')
