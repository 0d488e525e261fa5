"""Table 4: how similar two words are, by each sense and by the embeddings."""

from pathlib import Path

import pandas
import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.cli import progress
from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.paper.benchmarks import WHERE, find_files
from rucksack.words import inside_text

# The paper's sets, and the columns of the words and the score.
SETS = {
    'SimLex-999.txt': [1, 2, 4],
    'SimVerb-3500.txt': [1, 2, 4],
    'RG65.csv': [1, 2, 3],
    'WS353.csv': [1, 2, 3]}
RESAMPLES = 200


# -----------------------------------------------------------------------------
# Files of word pairs.


def numbers_in(cells: pandas.Series) -> pandas.Series:
    """Read the numbers in cells, with a decimal point or comma; NaN for any other text."""
    return pandas.to_numeric(cells.str.replace(',', '.'), errors='coerce')


def read_table(path: Path) -> pandas.DataFrame:
    """Read a table of text without its header; pandas finds the separator of its fields.

    Line 1 is a header if it has a word above numbers, or a number above words. Raises ValueError if
    a field may be several, or if a line has more fields than line 1.
    """
    table = pandas.read_csv(
        path,
        sep=None,
        engine='python',
        header=None,
        dtype=str,
        keep_default_na=False,
        skipinitialspace=True,
        encoding='utf-8-sig')
    if table.stack().str.contains('[\n\t;]').any():
        raise ValueError('a field has a line break, tab or semicolon, as if quotes or separators '
                         'were mixed')
    is_number = table.apply(numbers_in).notna()
    differs = is_number[1:] != is_number.iloc[0]
    if len(differs) and differs.all().any():
        return table[1:]
    return table


def read_pairs(path: Path, field: list[int] | None) -> pandas.DataFrame:
    """Read word pairs: two words and their score in each row.

    field has the numbers of these columns, from 1; without it, a file that is not in SETS must have
    no others. Raises UserError if it has, or for a row without two words and a score.
    """
    with user_errors(path, 'each line is WORD, WORD, SCORE, in UTF-8'):
        table = read_table(path)
        field = field or SETS.get(path.name)
        if not field and len(table.columns) > 3:
            raise UserError(f'which of its {len(table.columns)} columns are the two words and the '
                            'score? Give their numbers: --field WORD WORD SCORE')
        field = field or [1, 2, 3]
        first, second, score = [table[n - 1].str.strip() for n in field]
        pairs = pandas.DataFrame({
            'first': first,
            'second': second,
            'score': numbers_in(score)})
        is_bad = (pairs.eq('') | pairs.isna()).any(axis=1)
        is_bad |= first.str.isdecimal()  # row numbers
        if is_bad.any():
            row = is_bad.idxmax() + 1
            raise ValueError(f'row {row} has no two words and score in columns {field}')
    print(f'{path}: {len(pairs)} pairs, with scores in column {field[2]}')
    return pairs


def similarity_data(loaded: LoadedModel, data: str | None, field: list[int] | None
                    ) -> dict[str, pandas.DataFrame]:
    """Read word pairs by set: from one file, or from the paper's four sets in a folder.

    Without data, a toy model gets the toy world's pairs.
    """
    if data is None and loaded.is_toy:
        pairs = pandas.DataFrame(toy.SYNONYMS)
        n = len(toy.ADJECTIVES.split(','))
        return {'adjectives': pairs[:n], 'adverbs': pairs[n:]}
    if data is None:
        raise UserError(f'similarity needs --data; {WHERE}')
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
    return found.corr('spearman').iloc[:-1, -1]


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
