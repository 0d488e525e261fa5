"""Claims about rucksack/similarity.py, by hand."""

import math

import pytest
import torch
from conftest import SHARED
from subjects import toy_subject
from torch.nn import functional as F

from rucksack import similarity


def test_spearman_with_ties_is_the_known_value():
    """The ranks are, by hand, (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5), and their correlation 6 / 9.5."""
    x, y = torch.tensor([1.0, 2, 2, 4, 5]), torch.tensor([3.0, 1, 2, 5, 5])
    assert similarity.spearman(x, y) == pytest.approx(6 / 9.5)
    assert similarity.spearman(x, -x) == pytest.approx(-1)
    assert math.isnan(similarity.spearman(x, torch.ones(5)))


def test_similarity_is_the_cosine_of_each_sense():
    """Eq. 13, 14 and the embeddings by hand; a word of several tokens is their mean."""
    s = toy_subject()
    ids = [torch.tensor(s.encode(f' {word}')) for word in ('nurse', 'xy')]  # xy: bytes
    cosines = F.cosine_similarity(*(s.model.senses(word).mean(0) for word in ids)).tolist()
    embeddings = F.cosine_similarity(*(s.model.wte(word).mean(0) for word in ids), dim=0).item()
    found = torch.stack([*similarity.similarities(s, [('nurse', 'xy', 1.0)]).values()])
    assert found.tolist() == [[pytest.approx(x, abs=1e-5)] for x in (*cosines, min(cosines), embeddings)]


@pytest.mark.skipif(not SHARED.is_dir(), reason='the real data files are not here')
def test_the_real_pairs_are_read():
    """SimLex-999, SimVerb-3500, RG65 and WS353 have as many pairs as their names say."""
    found = similarity.similarity_data(toy_subject(), str(SHARED), or_toy=False)
    assert [*map(len, found.values())] == [int(name.lstrip('RGSLVW')) for name in found] and len(found) == 4
