"""The senses that best separate words A from B, or that favour some words.

    python -m rucksack find she/he                      ranks the sense numbers (section 6.2)
    python -m rucksack find @pairs.txt                  the same, on average over pairs A/B
    python -m rucksack find she/he --words nurse,king   how far each sense of these words does it
    python -m rucksack find music+guitar                the senses that favour both words (Eq. 17)
"""

from argparse import Namespace

import torch
from torch import Tensor

from rucksack.loaded import LoadedModel
from rucksack.looks.ranking import ranking
from rucksack.model import Backpack
from rucksack.senses import separation
from rucksack.table import Table
from rucksack.verbs import look
from rucksack.vocabulary import bag_ids, over_vocabulary, parse_bag, scores_of_bags
from rucksack.words import parse_pair, token_texts, tokens_of, word_ids, word_list


def find(loaded: LoadedModel, text: str, words: list[str]) -> Table:
    """Find the senses that most favour a bag of words or, if text has A/B, that separate pairs.

    With words, show how far each sense of these words separates the pairs.
    """
    parts = word_list(text)
    if not words and not any('/' in part for part in parts):
        return favour(loaded, parse_bag(text))
    pairs = [word_ids(loaded.encoding, parse_pair(part)) for part in parts]
    a, b = torch.tensor(pairs).T.tolist()
    if words:
        return separate_words(loaded, text, words, a, b)
    return separate(loaded, text, a, b)


def separate(loaded: LoadedModel, text: str, a: list[int], b: list[int]) -> Table:
    """Rank senses by how strongly they separate pairs of ids, on average over the vocabulary.

    A long sense separates any two words by many logits. So we divide this mean by the sense's
    spread, the standard deviation of what it adds to the logits of all words.
    """
    model = loaded.backpack
    covariance = model.wte.weight[:loaded.config.n_vocab].T.cov()  # (d, d)
    spread = over_vocabulary(model, spreads, covariance=covariance).mean(0)  # (k,)
    scores = over_vocabulary(model, separation, a=a, b=b)  # (V, k)
    sizes = scores.abs()
    mean_sizes = sizes.mean(0)  # (k,)
    ratio = mean_sizes / spread
    order = ratio.argsort(descending=True)
    ids = sizes.topk(8, dim=0).indices.T[order]  # (k, 8)
    most = scores.T[order].gather(1, ids)
    numbers = order.tolist()
    cells = zip(numbers, mean_sizes[order].tolist(), ratio[order].tolist())
    title = (f'How far each sense separates {text} (+/-): mean absolute value over all words, its '
             "ratio to the spread of the sense's logits, and the most extreme words")
    columns = {'sense': 'd', 'mean': '.2f', 'ratio': '.2f'}
    return ranking(loaded, title, columns, cells, ids, most)


@torch.no_grad()
def spreads(model: Backpack, ids: Tensor, covariance: Tensor) -> Tensor:
    """Compute the standard deviation of the V logits that each sense of ids (n,) adds: (n, k).

    That is sqrt(C S C^T), where S (d, d) is the covariance of the embeddings.
    """
    C = model.senses(ids)  # (n, k, d)
    variance = (C @ covariance * C).sum(-1)
    return variance.sqrt()


def separate_words(loaded: LoadedModel, text: str, words: list[str], a: list[int], b: list[int]
                   ) -> Table:
    """Measure how far each sense of each word separates pairs, C . (E_a - E_b): a row per word."""
    last_ids = [tokens_of(loaded.encoding, word)[-1] for word in words]
    ids = torch.tensor(last_ids, device=loaded.device)  # (words,)
    scores = separation(loaded.backpack, ids, a=a, b=b)  # (words, k)
    columns = {'word': ''}
    for l in range(loaded.config.n_sense):
        columns[f's{l}'] = '+.2f'
    rows = []
    for word, of_senses in zip(words, scores.tolist()):
        rows.append([word, *of_senses])
    title = f'How far each sense of these words separates {text} (+/-), in logits at weight 1'
    return Table(title, columns, rows)


def favour(loaded: LoadedModel, bag: list[str]) -> Table:
    """Find the senses that most favour a bag of words (Eq. 17), and the words they raise."""
    model = loaded.backpack
    scores, = scores_of_bags(model, [bag_ids(loaded.encoding, bag)])  # (V, k)
    best = scores.flatten().topk(20)  # out of V * k
    w, l = torch.unravel_index(best.indices, scores.shape)  # (20,) each
    C = model.senses(w)[range(20), l]  # (20, d)
    top = model.project(C)[:, :model.config.n_vocab].topk(5)  # (20, 5), of (20, V)
    tokens = token_texts(loaded.encoding, w.tolist())
    affinities = best.values.tolist()
    cells = zip(affinities, tokens, l.tolist())
    title = f'The senses that most favour {"+".join(bag)} (Eq. 17), and the words they raise most'
    columns = {'affinity': '.2f', 'token': repr, 'sense': 'd'}
    return ranking(loaded, title, columns, cells, top.indices, top.values)


def tables(loaded: LoadedModel, flags: Namespace) -> dict[str, Table]:
    """Make a table for each pair, file of pairs or bag."""
    return {f'find {text}': find(loaded, text, flags.words) for text in flags.asked}


main = look('find', __doc__, 'A/B|A+B', tables, '--words')
