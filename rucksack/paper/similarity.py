"""Table 4: how similar two words are, by each sense and by the embeddings."""

import re
from pathlib import Path

import pandas
import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.cli import progress
from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.table import Table
from rucksack.words import inside_text

ScoredPairs = list[tuple[str, str, float]]  # two words and how similar people find them

SETS = ['SimLex-999.txt', 'SimVerb-3500.txt', 'RG65.csv', 'WS353.csv']  # as in the paper
RESAMPLES = 200
SCORE = r'[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?'  # as people write scores: 7, 7., .7, 7e-1


def read_pairs(path: Path) -> ScoredPairs:
    """Read word pairs, one per line: two words and their score, the first number after them.

    Fields are separated by tabs, semicolons or commas. A first line without a number is a header.
    """
    pairs = []
    with user_errors(path, 'each line is WORD, WORD, SCORE, split by tabs, semicolons or commas'):
        lines = path.read_text('utf-8-sig').splitlines()
        separator = max('\t;,', key=lines[0].count)
        for line in filter(str.strip, lines):
            fields = [field.strip() for field in line.split(separator)]
            numbers = [field for field in fields[2:] if re.fullmatch(SCORE, field)]
            if numbers:
                pairs.append((fields[0], fields[1], float(numbers[0])))
            elif line != lines[0]:
                raise ValueError(f'{line!r} has no score')
        if not pairs:
            raise ValueError('it has no pairs')
    return pairs


def similarity_data(loaded: LoadedModel, data: str | None) -> dict[str, ScoredPairs]:
    """Read word pairs by set: from one file, or from the paper's four sets in a folder.

    Without data, a toy model gets the toy world's pairs. Raises UserError if there are none.
    """
    if data is None and loaded.is_toy:
        n = len(toy.ADJECTIVES.split(','))
        return {'adjectives': toy.SYNONYMS[:n], 'adverbs': toy.SYNONYMS[n:]}
    files = []
    if data:
        files = [Path(data)]
        if files[0].is_dir():
            files = [file for name in SETS for file in files[0].rglob(name)]
    if not files:
        raise UserError('similarity needs --data with a file of WORD, WORD, SCORE or a folder with '
                        f'{" or ".join(SETS)} (given: {data}); these files are in training/data of '
                        'https://github.com/john-hewitt/backpacks-flash-attn')
    return {file.stem: read_pairs(file) for file in files}


@torch.no_grad()
def word_vectors(loaded: LoadedModel, word: str) -> Tensor:
    """Compute the embedding of a word, then its senses: (1 + k, d), the mean over its tokens."""
    ids = torch.tensor(loaded.encode(inside_text(word)), device=loaded.device)
    vectors = loaded.model.wte(ids)[:, None]  # (tokens, 1, d)
    if loaded.config.n_sense:
        C = loaded.model.senses(ids)  # (tokens, k, d)
        vectors = torch.cat([vectors, C], dim=1)  # (tokens, 1 + k, d)
    return vectors.mean(0)


def similarities(loaded: LoadedModel, pairs: ScoredPairs) -> dict[str, Tensor]:
    """Measure how similar the two words of n pairs are, (n,) each.

    There is one row for each sense (Eq. 13), one for the least similar sense (Eq. 14), and one for
    the embeddings.
    """
    firsts, seconds, _ = zip(*pairs)
    vectors = {word: word_vectors(loaded, word) for word in {*firsts, *seconds}}
    a = torch.stack([vectors[word] for word in firsts])  # (n, 1 + k, d)
    b = torch.stack([vectors[word] for word in seconds])
    cosines = F.cosine_similarity(a, b, dim=-1).cpu()  # (n, 1 + k)
    by_sense = cosines[:, 1:]  # (n, k)
    rows = {f'sense {l}': column for l, column in enumerate(by_sense.T)}
    if rows:
        rows['minimum'] = by_sense.amin(1)
    rows[f'embeddings, {loaded}'] = cosines[:, 0]
    return rows


def correlations(found: pandas.DataFrame) -> pandas.Series:
    """Compute Spearman's correlation of each column with the last, the reference scores."""
    return found.rank().corr().iloc[:-1, -1]


def bars(found: pandas.DataFrame) -> pandas.Series:
    """Estimate the standard errors of correlations by bootstrap over pairs."""
    drawn = [correlations(found.sample(frac=1, replace=True, random_state=i))
             for i in range(RESAMPLES)]
    return pandas.DataFrame(drawn).std()


def similarity_table(models: list[LoadedModel], data: str | None) -> Table:
    """Make Table 4: Spearman's correlation with reference scores, and its standard error."""
    sets = similarity_data(models[0], data)
    first = next(iter(sets))
    rows = []
    notes = ['±: standard error, by bootstrap over pairs. A word of several tokens gets '
             "the mean of its tokens' vectors."]
    for loaded in models:
        numbers = {}
        for name, pairs in progress(sets.items(), f'similarity, {loaded.name}'):
            found = pandas.DataFrame(similarities(loaded, pairs))
            found['people'] = [score for _, _, score in pairs]
            numbers[name] = correlations(found)
            numbers[f'{name} ±'] = bars(found)
            if loaded.config.n_sense and name == first:
                half = correlations(found[:len(found) // 2])
        frame = pandas.DataFrame(numbers)
        rows += frame.reset_index().to_numpy().tolist()
        of_senses = frame.filter(regex='^sense ', axis=0)
        if len(of_senses):
            best = of_senses[list(sets)].fillna(-1).idxmax()
            rows.append(['best sense of each set', *best.reindex(frame.columns)])
            chosen = half[of_senses.index].fillna(-1).idxmax()
            notes.append(f'The best sense on the first half of {first}: {chosen}.')
    title = "Similarity (Table 4): Spearman's correlation with scores of word pairs"
    columns = {'vectors': ''} | dict.fromkeys(numbers, '.3f')
    return Table(title, columns, rows, notes)
