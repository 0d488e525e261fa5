"""Claims about rucksack/paper/similarity.py, checked by hand."""

import csv
import math
from pathlib import Path

import pandas
import pytest
import torch
from helpers import toy_loaded
from torch.nn import functional as F

from rucksack.errors import UserError
from rucksack.loaded import load_model
from rucksack.paper import similarity
from rucksack.paper.similarity import read_pairs, similarities, similarity_data
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
def test_vectors_of_a_word_are_those_of_its_tokens_in_a_text(word):
    """Words of scripts without spaces are read without one, as edits read them."""
    loaded = load_model('english', 'cpu')
    ids = torch.tensor(tokens_of(loaded.encoding, word))
    expected = torch.cat([loaded.model.wte(ids)[:, None], loaded.model.senses(ids)], dim=1).mean(0)
    assert torch.equal(similarity.word_vectors(loaded, word), expected)


def test_bars_are_standard_errors():
    """Of n independent pairs, Spearman's correlation has a standard error of 1 / sqrt(n - 1)."""
    x, people = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).tolist()
    bars = similarity.standard_errors(pandas.DataFrame({'x': x, 'people': people}))
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
    found = similarities(loaded, pandas.DataFrame([('nurse', 'xy', 1.0)]))
    wanted = [of_embeddings, *by_sense, min(by_sense), 1.0]
    assert len(xy) > 1
    assert found.loc[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_one_column_is_about_half_of_the_first_set():
    """One sense can be chosen on half of the toy world's adjectives."""
    loaded = toy_loaded()
    pairs = similarity_data(loaded, None, None)['adjectives']
    found = similarities(loaded, pairs[:len(pairs) // 2])
    wanted = found.rank().corrwith(found['people'].rank())
    rows = pandas.DataFrame(similarity.similarity_rows(loaded, None, None))
    assert rows['half of adjectives'].tolist() == pytest.approx(wanted.tolist()[:-1])


PUBLISHED = {  # the form of each published set
    'SimLex-999.txt': 'word1\tword2\tPOS\tSimLex999\tconc(w1)\nold\tnew\tA\t1.58\t2.72\n',
    'SimVerb-3500.txt': 'old\tnew\tV\t1.58\tSYNONYMS\n',
    'RG65.csv': 'old;new;1.58  \n  \n',
    'WS353.csv': 'Word 1,Word 2,Human (mean)\nold,new,1.58\n'}


def test_pairs_are_read_in_the_form_of_each_set(tmp_path):
    """Pairs are read with the separators, headers and columns of the published files."""
    for file, content in PUBLISHED.items():
        (tmp_path / file).write_text(content)
    found = similarity_data(toy_loaded(), str(tmp_path), None)
    assert {name: pairs.to_numpy().tolist() for name, pairs in found.items()
            } == {Path(name).stem: [['old', 'new', 1.58]] for name in PUBLISHED}


PAIRS = [['tiger', 'cat', 7.35], ['null', 'NA', 0.5], ['king', 'queen', 8.0]]
ROWS = pandas.DataFrame(PAIRS, columns=['a', 'b', 'c'])
FORMS = {
    'in quotes': ROWS.to_csv(quoting=csv.QUOTE_ALL, index=False),
    'of pandas, numbered': pandas.DataFrame(PAIRS).to_csv(index=False),
    'without a header': ROWS.to_csv(header=False, index=False),
    'of Excel in German': '\ufeff' + ROWS.to_csv(sep=';', decimal=',', index=False),
    'with spaces': ROWS.to_csv(index=False, quoting=csv.QUOTE_ALL).replace(',', ', ')}


@pytest.mark.parametrize('form', FORMS)
def test_pairs_are_read_as_people_and_programs_write_them(form, tmp_path):
    """Separators, quotes, a header and decimal commas are told from the words and scores."""
    (tmp_path / 'mine.csv').write_text(FORMS[form])
    pairs = read_pairs(tmp_path / 'mine.csv', None)
    assert sorted(pairs.to_numpy().tolist()) == sorted(PAIRS)


@pytest.mark.parametrize('content, fact', [
    ('tiger,cat,7,6,6.5\nking,queen,5,8,6.5\n', '--field'),  # ratings and their mean
    ('a,b,c,n\ntiger,cat,,3\nking,queen,8,5\n', '--field'),  # a score is missing
    (ROWS.to_csv(), '--field'),  # row numbers
    ('N,tiger,cat,7\nN,king,queen,8\n', '--field'),
    ('word1,word2,score\ntiger,cat,N,7\nking,queen,N,8\n', 'fields'),
    ('word1,word2,score\ntiger,cat,7\n,,7\n', 'no two words'),
    ('0,tiger,7\n1,king,8\n', 'no two words'),  # row numbers in place of words
    ('tiger\tcat\t7\n"king\tqueen\t8\nold\tnew"\t2\n', 'quote'),
    ('tiger;cat;7,35;1,5\nking;queen;8,2;1,7\n', 'separators')])
def test_what_could_be_read_otherwise_is_refused(content, fact, tmp_path):
    """One line asks for the columns, or says which line cannot be read."""
    (tmp_path / 'mine.csv').write_text(content)
    with pytest.raises(UserError, match=fact):
        read_pairs(tmp_path / 'mine.csv', None)


def test_field_chooses_the_columns(tmp_path):
    """--field has the numbers of the two words and the score, from 1."""
    (tmp_path / 'mine.csv').write_text('N,tiger,cat,7,6,6.5\nN,king,queen,5,8,6\n')
    pairs = read_pairs(tmp_path / 'mine.csv', [2, 3, 6])
    assert pairs.to_numpy().tolist() == [['tiger', 'cat', 6.5], ['king', 'queen', 6]]
