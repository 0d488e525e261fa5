"""Table 4: how similar two words are, by each sense and by the embeddings."""

from io import StringIO
from pathlib import Path

import pandas
import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.cli import progress
from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.paper.benchmarks import find_files
from rucksack.words import inside_text

# The paper's sets, and the columns of the words and the score.
SETS = {
    'SimLex-999.txt': [1, 2, 4],
    'SimVerb-3500.txt': [1, 2, 4],
    'RG65.csv': [1, 2, 3],
    'WS353.csv': [1, 2, 3]}
NAMES = r'(word|w)[ _]?[12]|score|similarity|rating|mean|average|human \(mean\)|simlex999'
RESAMPLES = 200


# -----------------------------------------------------------------------------
# Files of word pairs.


def numbers_in(cells: pandas.Series) -> pandas.Series:
    """Read the numbers in cells, with a decimal point or comma; NaN for any other text."""
    texts = cells.astype(str).str.replace(',', '.')
    return pandas.to_numeric(texts, errors='coerce')


def read_table(path: Path) -> pandas.DataFrame:
    """Read a table of text; its fields are separated by tabs, semicolons, commas or spaces.

    Line 1 is a header if it has a word above numbers, or a number above words. Raises ValueError if
    a line cannot be told from the next, or has more fields than line 1.
    """
    lines = path.read_text('utf-8-sig').splitlines()
    lines = [line for line in lines if line.strip('\t;, ')]
    if any(line.count('"') % 2 for line in lines):
        raise ValueError('a quoted field does not end on its line')
    separator = max('\t;,', key=lines[0].count)
    if separator not in lines[0]:
        separator = r'\s+'
    options = dict(
        sep=separator,
        dtype=str,
        keep_default_na=False,
        skipinitialspace=True)
    text = '\n'.join(lines)
    table = pandas.read_csv(StringIO(text), **options)
    in_header = numbers_in(table.columns.to_series()).notna()
    below = table.apply(numbers_in).notna().all()
    if table.empty or (in_header == below).all():
        table = pandas.read_csv(StringIO(text), header=None, **options)
    row_numbers = numbers_in(table.index.to_series())  # R omits their name
    if row_numbers.isna().any():
        raise ValueError('line 1 has fewer fields than others')
    return table.fillna('')


def find_columns(table: pandas.DataFrame) -> list[int]:
    """Find the columns of two words and their score, by name or else by kind, from 1.

    Raises UserError unless there are exactly two columns of words and one of numbers.
    """
    is_number = table.apply(numbers_in).notna().all()  # per column
    names = table.columns.astype(str)
    is_named = names.str.fullmatch(NAMES, case=False)
    has_name = ~names.str.startswith('Unnamed')  # row numbers have none
    for columns in (is_named, has_name):
        words_first = is_number[columns].sort_values(kind='stable')
        if words_first.tolist() == [False, False, True]:
            return [table.columns.get_loc(name) + 1 for name in words_first.index]
    first_row = enumerate(table.iloc[0], 1)
    listed = ', '.join(f'{n} {cell}' for n, cell in first_row)
    raise UserError('which columns are the two words and the score? Give --field with three of '
                    f'these numbers: {listed}')


def read_pairs(path: Path, field: list[int] | None) -> pandas.DataFrame:
    """Read word pairs: two words and their score in each row.

    field has the numbers of these columns, from 1. Raises UserError for a row that lacks one.
    """
    with user_errors(path, 'each line is WORD, WORD, SCORE'):
        table = read_table(path)
        field = field or SETS.get(path.name) or find_columns(table)
        positions = [n - 1 for n in field]
        pairs = table.iloc[:, positions]
        pairs = pairs.apply(lambda cells: cells.str.strip())
        pairs.columns = ['first', 'second', 'score']
        score = numbers_in(pairs['score'])
        is_blank = pairs.eq('').any(axis=1)
        bad = pairs[is_blank | score.isna()]
        if len(bad):
            example = bad.iloc[0].tolist()
            raise ValueError(f'{example} lacks a word or a score')
    print(f'{path}: {len(pairs)} pairs, with scores in column {field[2]}')
    return pairs.assign(score=score)


def similarity_data(loaded: LoadedModel, data: str | None, field: list[int] | None
                    ) -> dict[str, pandas.DataFrame]:
    """Read word pairs by set: from one file, or from the paper's four sets in a folder.

    Without data, a toy model gets the toy world's pairs.
    """
    if data is None and loaded.is_toy:
        pairs = pandas.DataFrame(toy.SYNONYMS)
        n = len(toy.ADJECTIVES.split(','))
        return {'adjectives': pairs[:n], 'adverbs': pairs[n:]}
    files = find_files(data, *SETS)
    return {file.stem: read_pairs(file, field) for file in files}


@torch.no_grad()
def word_vectors(loaded: LoadedModel, word: str) -> Tensor:
    """Compute the embedding of a word, then its senses: (1 + k, d), the mean over its tokens."""
    ids = loaded.encode(inside_text(word))
    ids = torch.tensor(ids, device=loaded.device)
    vectors = loaded.model.wte(ids)[:, None]  # (tokens, 1, d)
    if loaded.config.n_sense:
        C = loaded.model.senses(ids)  # (tokens, k, d)
        vectors = torch.cat([vectors, C], dim=1)  # (tokens, 1 + k, d)
    return vectors.mean(0)


def similarities(loaded: LoadedModel, pairs: pandas.DataFrame) -> pandas.DataFrame:
    """Measure how similar the two words of n pairs are: n rows, ending in people's scores.

    There is a column for the embeddings, one for each sense (Eq. 13), and one for the least similar
    sense (Eq. 14).
    """
    first, second, people = pairs.to_dict('list').values()
    vectors = {word: word_vectors(loaded, word) for word in first + second}
    a = torch.stack([vectors[word] for word in first])  # (n, 1 + k, d)
    b = torch.stack([vectors[word] for word in second])
    cosines = F.cosine_similarity(a, b, dim=-1).cpu()  # (n, 1 + k)
    senses = [f'sense {l}' for l in range(loaded.config.n_sense)]
    names = ['embeddings', *senses]
    found = pandas.DataFrame(cosines.numpy(), columns=names)
    if senses:
        found['minimum'] = found[senses].min(axis=1)
    found['people'] = people
    return found


def correlations(found: pandas.DataFrame) -> pandas.Series:
    """Compute Spearman's correlation of each column with the last, people's scores."""
    with_each_other = found.rank().corr()
    return with_each_other.iloc[:-1, -1]


def standard_errors(found: pandas.DataFrame) -> pandas.Series:
    """Estimate the standard errors of correlations by bootstrap over pairs."""
    drawn = []
    for i in range(RESAMPLES):
        pairs = found.sample(frac=1, replace=True, random_state=i)
        drawn.append(correlations(pairs))
    return pandas.DataFrame(drawn).std()


def similarity_rows(loaded: LoadedModel, data: str | None, field: list[int] | None
                    ) -> list[dict]:
    """Similarity (Table 4): Spearman's correlation with scores of word pairs.

    ±: standard error, by bootstrap over pairs. A word of several tokens gets the mean of its
    tokens' vectors. To choose one sense for all sets, use the first half of the first set.
    """
    sets = similarity_data(loaded, data, field)
    columns = {}
    for name, pairs in progress(sets.items(), f'similarity, {loaded.name}'):
        found = similarities(loaded, pairs)
        if not columns:
            columns[f'half of {name}'] = correlations(found[:len(found) // 2])
        columns[name] = correlations(found)
        columns[f'{name} ±'] = standard_errors(found)
    rows = pandas.DataFrame(columns).reset_index(names='vectors')
    return rows.to_dict('records')
