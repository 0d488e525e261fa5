"""The likeliest next words under one edit or several."""

import sys

import torch
from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.senses import Edit
from rucksack.table import Table
from rucksack.words import token_texts


@torch.no_grad()
def next_logits(model, idx: Tensor, edit: Edit | None) -> Tensor:
    """Compute the logits (V,) of the token after idx (1, T) under an edit.

    model is a Backpack or a rucksack.edits.lending.Lent, or without an edit a GPT.
    """
    if edit is None:
        logits = model(idx)  # (1, T, vocab_size)
    else:
        logits = model(idx, C=edit(idx, model.senses(idx)))
    return logits[0, -1, :model.config.n_vocab]


def next_words(loaded: LoadedModel, title: str, idx: Tensor, edits: dict[str, Edit | None]
               ) -> Table:
    """Show the likeliest next words under each edit."""
    logits = [next_logits(loaded.model, idx, edit) for edit in edits.values()]
    probs = torch.stack(logits).softmax(-1)  # (edits, V)
    ids = probs.amax(0).topk(12).indices  # (12,)
    words = token_texts(loaded.encoding, ids.tolist())
    rows = [
        [word, *p]
        for word, p in zip(words, probs.T[ids].tolist())]
    return Table(title, {'next word': repr} | dict.fromkeys(edits, '.3f'), rows)


def before_and_after(loaded: LoadedModel, idx: Tensor) -> Table:
    """Show the next words without and with the model's edit, as numbers and as bars."""
    edits = {'before': None, 'after': loaded.edit}
    table = next_words(loaded, 'The next word before and after the edit', idx, edits)
    table.columns |= {'before:': bar, 'after:': bar}
    for row in table.rows:
        row += row[1:]
    return table


def bar(p: float) -> str:
    """Draw a probability as a bar, of # where the output has no blocks (as in cp1252)."""
    block = '█'
    if block.encode(sys.stdout.encoding or 'utf-8', 'replace') == b'?':
        block = '#'
    return block * round(20 * p)
