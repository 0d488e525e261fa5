"""Tables of words with scores, several in a line."""

from collections.abc import Iterable

from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.table import Table
from rucksack.words import token_texts


def ranking(loaded: LoadedModel, title: str, columns: dict, cells: Iterable, ids: Tensor,
            scores: Tensor) -> Table:
    """Make a table of ids (lines, n) and their scores (lines, n), with the first cells of lines."""
    rows = []
    for first_cells, row_ids, row_scores in zip(cells, ids.tolist(), scores.tolist()):
        tokens = token_texts(loaded.encoding, row_ids)
        words = [
            f'{word!r:.20} {score:+.2f}'
            for word, score in zip(tokens, row_scores)]
        rows.append([*first_cells, '  '.join(words)])
    return Table(title, columns | {'words': str}, rows)
