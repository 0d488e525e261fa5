"""The words most similar to WORD, by each sense (Eq. 13) and by all (Eq. 14).

    python -m rucksack similar nurse
"""

import torch

from rucksack.loaded import LoadedModel
from rucksack.looks.ranking import ranking
from rucksack.senses import similarity
from rucksack.table import Table
from rucksack.verbs import look_at_words
from rucksack.vocabulary import over_vocabulary
from rucksack.words import word_id


def similar(loaded: LoadedModel, word: str) -> Table:
    """Find the words most similar to a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    w = word_id(loaded.encoding, word)
    cosines = over_vocabulary(loaded.backpack, similarity, w=w)  # (V, k)
    cosines[w] = -1  # a word is not its own neighbour
    smallest = cosines.amin(-1, keepdim=True)  # (V, 1)
    cosines = torch.cat([cosines, smallest], dim=-1)  # (V, k + 1)
    top = cosines.topk(8, dim=0)  # (8, k + 1)
    title = (f'{word}: the most similar words, by the cosine of each sense (Eq. 13) and by their '
             'minimum (Eq. 14)')
    cells = [[name] for name in [*range(loaded.config.n_sense), 'min']]
    return ranking(
        loaded, title, {'sense': ''}, cells,
        ids=top.indices.T,
        scores=top.values.T)


main = look_at_words('similar', __doc__, 'WORD', similar)
