"""Claims about rucksack/paper/similarity.py, checked by hand."""

import math

import pandas
import pytest
import torch
from helpers import toy_loaded
from torch.nn import functional as F

from rucksack.loaded import load_model
from rucksack.paper import similarity
from rucksack.paper.similarity import similarities, similarity_data
from rucksack.words import tokens_of


def test_correlations_are_spearmans():
    """Ranks (1, 2.5, 2.5, 4, 5) and (3, 1, 2, 4.5, 4.5) have a correlation of 6 / 9.5."""
    found = {'ties': [1, 2, 2, 4, 5], 'opposite': [3, 5, 4, 1, 1], 'constant': [1] * 5,
             'people': [3, 1, 2, 5, 5]}
    column = similarity.correlations(pandas.DataFrame(found))
    assert column['ties'] == pytest.approx(6 / 9.5)
    assert column['opposite'] == pytest.approx(-1)
    assert math.isnan(column['constant'])


@pytest.mark.parametrize('word', ['nurse', '国', '日本'])
def test_the_vectors_of_a_word_are_those_of_its_tokens_inside_a_text(word):
    """Words of scripts without spaces are read without one, as edits read them."""
    loaded = load_model('english', 'cpu')
    ids = torch.tensor(tokens_of(loaded.encoding, word))
    expected = torch.cat([loaded.model.wte(ids)[:, None], loaded.model.senses(ids)], dim=1).mean(0)
    assert torch.equal(similarity.word_vectors(loaded, word), expected)


def test_bars_are_standard_errors():
    """Of n independent pairs, Spearman's correlation has a standard error of 1 / sqrt(n - 1)."""
    x, people = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).tolist()
    bars = similarity.bars(pandas.DataFrame({'x': x, 'people': people}))
    assert bars['x'] == pytest.approx(199 ** -0.5, rel=0.15)


def test_similarity_is_the_cosine_of_each_sense():
    """Eq. 13, Eq. 14 and embeddings match values found by hand; several tokens are averaged."""
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
    """The best sense of a set is the one whose similarities agree most with people's."""
    *rows, (label, *best) = similarity.similarity_table([toy_loaded(name='sense x')], None).rows
    of_senses = [row for row in rows if row[0].startswith('sense ')]
    assert label == 'best sense of each set'
    for column in (1, 3):
        assert best[column - 1] == max(of_senses, key=lambda row: row[column])[0]


def test_the_one_sense_is_chosen_on_half_of_the_first_set():
    """The chosen sense agrees best with people on half of the toy world's adjectives."""
    loaded = toy_loaded()
    pairs = similarity_data(loaded, None)['adjectives']
    half = pairs[:len(pairs) // 2]
    frame = pandas.DataFrame(similarities(loaded, half))[[f'sense {l}' for l in range(4)]]
    people = pandas.Series([score for _, _, score in half])
    wanted = frame.rank().corrwith(people.rank()).idxmax()
    notes = similarity.similarity_table([loaded], None).notes
    assert notes[-1].endswith(f': {wanted}.')


FORMS = {  # name -> file, its contents, the pair in it
    'SimLex-999': (
        'SimLex-999.txt', 'word1\tword2\tPOS\tSimLex999\tconc(w1)\nold\tnew\tA\t1.58\t2.72\n',
        ('old', 'new', 1.58)),
    'SimVerb-3500': (
        'SimVerb-3500.txt', 'take\tremove\tV\t6.81\tSYNONYMS\n', ('take', 'remove', 6.81)),
    'RG65': ('RG65.csv', 'cord;smile;0.02  \n  \n', ('cord', 'smile', 0.02)),
    'WS353': ('WS353.csv', 'Word 1,Word 2,Human (mean)\nlove,sex,6.77\n', ('love', 'sex', 6.77))}


def test_pairs_are_read_in_the_form_of_each_set(tmp_path):
    """Pairs are read with the separators, headers and columns of the published files."""
    for file, content, _ in FORMS.values():
        (tmp_path / file).write_text(content)
    wanted = {name: [pair] for name, (_, _, pair) in FORMS.items()}
    assert similarity_data(toy_loaded(), str(tmp_path)) == wanted
