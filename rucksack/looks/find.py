"""The senses that best separate words A from B (section 6.2).

    python -m rucksack find she/he
    python -m rucksack find @pairs.txt  on average over pairs A/B
"""

import torch
from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.looks.ranking import ranking
from rucksack.model import Backpack
from rucksack.senses import separation
from rucksack.table import Table
from rucksack.verbs import look_at_words
from rucksack.vocabulary import over_vocabulary
from rucksack.words import parse_pair, word_ids, word_list


def find(loaded: LoadedModel, text: str) -> Table:
    """Rank senses by how strongly they separate pairs A/B, on average over the vocabulary.

    A long sense separates any two words by many logits. So we divide this mean by the sense's
    spread, the standard deviation of what it adds to the logits of all words.
    """
    model = loaded.backpack
    pairs = [
        word_ids(loaded.encoding, parse_pair(part))
        for part in word_list(text)]
    a, b = torch.tensor(pairs).T  # (pairs,) each
    E = model.wte.weight[:loaded.config.n_vocab]  # (V, d)
    spread = over_vocabulary(model, spreads, covariance=E.T.cov())  # (V, k)
    scores = over_vocabulary(model, separation, a=a, b=b)  # (V, k)
    size = scores.abs().mean(0)  # (k,)
    ratio = size / spread.mean(0)
    order = ratio.argsort(descending=True)
    cells = zip(order.tolist(), size[order].tolist(), ratio[order].tolist())
    scores = scores.T[order]  # (k, V)
    ids = scores.abs().topk(8).indices  # (k, 8)
    title = (f'How far each sense separates {text} (+/-): mean absolute value over all words, its '
             "ratio to the spread of the sense's logits, and the most extreme words")
    columns = {
        'sense': 'd',
        'mean': '.2f',
        'ratio': '.2f'}
    return ranking(
        loaded, title, columns, cells, ids,
        scores=scores.gather(1, ids))


@torch.no_grad()
def spreads(model: Backpack, ids: Tensor, covariance: Tensor) -> Tensor:
    """Compute the standard deviation of the V logits that each sense of ids (n,) adds: (n, k).

    That is sqrt(C S C^T), where S (d, d) is the covariance of the embeddings.
    """
    C = model.senses(ids)  # (n, k, d)
    variance = (C @ covariance * C).sum(-1)
    return variance.sqrt()


main = look_at_words('find', __doc__, 'A/B', find)
