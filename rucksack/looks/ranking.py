"""Tables of words with scores, in which a printed line has several words."""

from collections.abc import Iterable
from itertools import groupby

from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.table import Table
from rucksack.words import token_texts


class Ranking(Table):
    """A table whose rows end in a word and its score; rows equal but for these print as one."""

    def lines(self) -> list[str]:
        """Format the first columns, then all their words with scores."""
        columns = self.columns | {'words': str}
        del columns['word'], columns['score']
        rows = []
        for cells, group in groupby(self.rows, key=lambda row: row[:-2]):
            words = [f'{word!r:.20} {score:+.2f}' for *_, word, score in group]
            rows.append([*cells, '  '.join(words)])
        return Table('', columns, rows).lines()


def ranking(loaded: LoadedModel, title: str, columns: dict, cells: Iterable, ids: Tensor,
            scores: Tensor) -> Ranking:
    """Make a table of ids (lines, n) and their scores (lines, n), with the first cells of lines."""
    rows = []
    for first_cells, row_ids, row_scores in zip(cells, ids.tolist(), scores.tolist()):
        for word, score in zip(token_texts(loaded.encoding, row_ids), row_scores):
            rows.append([*first_cells, word, score])
    return Ranking(title, columns | {'word': repr, 'score': '+.2f'}, rows)
