"""The senses that best separate words A from B, or that favour some words.

    python -m rucksack find she/he        ranks the sense numbers (section 6.2)
    python -m rucksack find @pairs.txt    the same, on average over pairs A/B
    python -m rucksack find music+guitar  the senses that favour both words (Eq. 17)
"""

from argparse import Namespace

import torch
from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.looks.ranking import ranking
from rucksack.model import Backpack
from rucksack.senses import extremes, separation
from rucksack.table import Table
from rucksack.verbs import look
from rucksack.vocabulary import bag_ids, over_vocabulary, parse_bag, scores_of_bags
from rucksack.words import parse_pair, token_texts, word_ids, word_list


def find(loaded: LoadedModel, text: str) -> Table:
    """Find the senses that most favour a bag of words or, if text has A/B, that separate pairs."""
    parts = word_list(text)
    if '/' not in ''.join(parts):
        return favour(loaded, parse_bag(text))
    pairs = [word_ids(loaded.encoding, parse_pair(part)) for part in parts]
    a, b = torch.tensor(pairs).T  # (pairs,) each
    return separate(loaded, text, a, b)


def separate(loaded: LoadedModel, text: str, a: Tensor, b: Tensor) -> Table:
    """Rank senses by how strongly they separate pairs of ids, on average over the vocabulary.

    A long sense separates any two words by many logits. So we divide this mean by the sense's
    spread, the standard deviation of what it adds to the logits of all words.
    """
    model = loaded.backpack
    E = model.wte.weight[:loaded.config.n_vocab]  # (V, d)
    spread = over_vocabulary(model, spreads, covariance=E.T.cov())  # (V, k)
    scores = over_vocabulary(model, separation, a=a, b=b)  # (V, k)
    size = scores.abs().mean(0)  # (k,)
    ratio = size / spread.mean(0)
    order = ratio.argsort(descending=True)
    cells = [(l, size[l].item(), ratio[l].item()) for l in order.tolist()]
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


def favour(loaded: LoadedModel, bag: list[str]) -> Table:
    """Find the senses that most favour a bag of words (Eq. 17), and the words they raise."""
    model = loaded.backpack
    bags = [bag_ids(loaded.encoding, bag)]
    scores, = scores_of_bags(model, bags)  # (V, k)
    best = scores.flatten().topk(20)  # out of V * k
    w, l = torch.unravel_index(best.indices, scores.shape)  # (20,) each
    C = model.senses(w)[range(20), l]  # (20, d)
    ids, logits = extremes(model, C, 5)  # (20, 10) each
    cells = zip(
        best.values.tolist(),
        token_texts(loaded.encoding, w.tolist()),
        l.tolist())
    title = f'The senses that most favour {"+".join(bag)} (Eq. 17), and the words they raise most'
    columns = {
        'affinity': '.2f',
        'token': repr,
        'sense': 'd'}
    return ranking(
        loaded, title, columns, cells,
        ids=ids[:, :5],
        scores=logits[:, :5])


def tables(loaded: LoadedModel, flags: Namespace) -> dict[str, Table]:
    """Make a table for each pair, file of pairs or bag."""
    return {f'find {text}': find(loaded, text) for text in flags.asked}


main = look('find', __doc__, 'A/B|A+B', tables)
