"""Claims about rucksack/paper/similarity.py, by hand."""

import math

import pytest
import torch
from helpers import toy_loaded
from torch.nn import functional as F

from rucksack.paper import similarity
from rucksack.paper.similarity import similarities, similarity_data


def test_correlations_are_spearmans(monkeypatch):
    """By hand, ranks (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5) correlate by 6 / 9.5."""
    x = torch.tensor([1.0, 2, 2, 4, 5])
    found = {'ties': x, 'opposite': torch.tensor([3.0, 5, 4, 1, 1]), 'constant': torch.ones(5)}
    monkeypatch.setattr(similarity, 'similarities', lambda loaded, pairs: found)
    pairs = [('a', 'b', score) for score in (3, 1, 2, 5, 5)]
    column = similarity.correlations(None, pairs)
    assert column['ties'] == pytest.approx(6 / 9.5)
    assert column['opposite'] == pytest.approx(-1)
    assert math.isnan(column['constant'])


def test_similarity_is_the_cosine_of_each_sense():
    """Eq. 13, Eq. 14 and the embeddings by hand; a word of several tokens is their mean."""
    loaded = toy_loaded()
    nurse = torch.tensor(loaded.encode(' nurse'))
    xy = torch.tensor(loaded.encode(' xy'))  # spelled in bytes
    senses_of_nurse = loaded.model.senses(nurse).mean(0)
    senses_of_xy = loaded.model.senses(xy).mean(0)
    by_sense = F.cosine_similarity(senses_of_nurse, senses_of_xy).tolist()
    embedding_of_nurse = loaded.model.wte(nurse).mean(0)
    embedding_of_xy = loaded.model.wte(xy).mean(0)
    of_embeddings = F.cosine_similarity(embedding_of_nurse, embedding_of_xy, dim=0).item()
    found = similarities(loaded, [('nurse', 'xy', 1.0)])
    wanted = [*by_sense, min(by_sense), of_embeddings]
    assert len(xy) > 1
    assert torch.cat([*found.values()]).tolist() == pytest.approx(wanted, abs=1e-5)


def test_the_best_sense_of_each_set_is_named():
    """It is the one whose similarities agree most with people's."""
    *rows, (label, *best) = similarity.similarity_table([toy_loaded(name='sense x')], None).rows
    of_senses = [row for row in rows if row[0].startswith('sense ')]
    assert label == 'the best'
    for column, name in enumerate(best, 1):
        assert name == max(of_senses, key=lambda row: row[column])[0]


FORMS = {  # name -> file, its contents, the pair in it
    'SimLex-999': (
        'SimLex-999.txt', 'word1\tword2\tPOS\tSimLex999\tconc(w1)\nold\tnew\tA\t1.58\t2.72\n',
        ('old', 'new', 1.58)),
    'SimVerb-3500': (
        'SimVerb-3500.txt', 'take\tremove\tV\t6.81\tSYNONYMS\n', ('take', 'remove', 6.81)),
    'RG65': ('RG65.csv', 'cord;smile;0.02  \n  \n', ('cord', 'smile', 0.02)),
    'WS353': ('WS353.csv', 'Word 1,Word 2,Human (mean)\nlove,sex,6.77\n', ('love', 'sex', 6.77))}


def test_pairs_are_read_in_the_form_of_each_set(tmp_path):
    """Separators, headers and columns are those of the published files."""
    for file, content, _ in FORMS.values():
        (tmp_path / file).write_text(content)
    wanted = {name: [pair] for name, (_, _, pair) in FORMS.items()}
    assert similarity_data(toy_loaded(), str(tmp_path)) == wanted
