"""Table 4: how similar two words are, by each sense and by the embeddings."""

from pathlib import Path

import pandas
import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.cli import UserError, reading
from rucksack.loaded import Subject
from rucksack.table import Table

Pairs = list[tuple[str, str, float]]  # two words and how similar people find them

SIMILARITY = {  # name in the paper -> file, separator, column of the score, header lines
    'SL999': ('SimLex-999.txt', '\t', 3, 1),
    'SV3500': ('SimVerb-3500.txt', '\t', 3, 0),
    'RG65': ('RG65.csv', ';', 2, 0),
    'WS353': ('WS353.csv', ',', 2, 1),
}


def read_pairs(path: Path, separator: str, column: int, header: int) -> Pairs:
    """Read the word pairs in a file, one a line."""
    pairs = []
    with reading(path, 'choose another file with --data'):
        for line in path.read_text('utf-8-sig').splitlines()[header:]:
            if line.strip():
                row = [field.strip() for field in line.split(separator)]
                pairs.append((row[0], row[1], float(row[column])))
        if not pairs:
            raise ValueError('it has no pairs')
    return pairs


def similarity_data(subject: Subject, data: str | None) -> dict[str, Pairs]:
    """Read word pairs by set: each of the paper's four sets that data, a file or folder, contains.

    Without data, a model of the toy world gets that world's pairs. UserError if there are none.
    """
    if data is None and subject.is_toy:
        n = len(toy.ADJECTIVES.split(','))
        return {'adjectives': toy.SYNONYMS[:n], 'adverbs': toy.SYNONYMS[n:]}
    sets = {}
    if data is not None:
        paths = [Path(data), *Path(data).rglob('*')]
        files = {path.name: path for path in paths}
        for name, (file, *form) in SIMILARITY.items():
            if file in files:
                sets[name] = read_pairs(files[file], *form)
    if not sets:
        names = ' or '.join(file for file, _, _, _ in SIMILARITY.values())
        raise UserError(f'similarity needs --data FOLDER with {names} (given: {data}); they are in '
                        'https://github.com/john-hewitt/backpacks-flash-attn, in training/data')
    return sets


@torch.no_grad()
def word_vectors(subject: Subject, word: str) -> Tensor:
    """Compute the embedding of a word, then its senses: (1 + k, d), the mean over its tokens."""
    ids = torch.tensor(subject.encode(f' {word}'), device=subject.device)
    vectors = subject.model.wte(ids)[:, None]  # (tokens, 1, d)
    if subject.model.config.n_sense:
        C = subject.model.senses(ids)  # (tokens, k, d)
        vectors = torch.cat([vectors, C], dim=1)  # (tokens, 1 + k, d)
    return vectors.mean(0)


def similarities(subject: Subject, pairs: Pairs) -> dict[str, Tensor]:
    """Measure how similar the two words of n pairs are, (n,) each.

    There is one row for each sense (Eq. 13), one for the least similar sense (Eq. 14), and one for
    the embeddings.
    """
    firsts, seconds, _ = zip(*pairs)
    vectors = {word: word_vectors(subject, word) for word in {*firsts, *seconds}}
    a = torch.stack([vectors[word] for word in firsts])  # (n, 1 + k, d)
    b = torch.stack([vectors[word] for word in seconds])
    cosines = F.cosine_similarity(a, b, dim=-1).cpu()  # (n, 1 + k)
    by_sense = cosines[:, 1:]  # (n, k)
    rows = {f'sense {l}': column for l, column in enumerate(by_sense.T)}
    if rows:
        rows['minimum'] = by_sense.amin(1)
    rows[f'embeddings, {subject}'] = cosines[:, 0]
    return rows


def correlations(subject: Subject, pairs: Pairs) -> dict[str, float]:
    """Compute Spearman's correlation of each kind of similarity with the reference scores."""
    columns = {row: x.numpy() for row, x in similarities(subject, pairs).items()}
    found = pandas.DataFrame(columns)
    found['people'] = [score for _, _, score in pairs]
    correlation = found.corr(method='spearman')
    return correlation['people'].drop('people').to_dict()


def best_sense(column: dict[str, float], k: int) -> str:
    """Name the row of the best of k senses. NaN counts as worst."""
    senses = pandas.Series(column)[:k]
    return senses.fillna(-1).idxmax()


def similarity_table(subjects: list[Subject], data: str | None) -> Table:
    """Make Table 4: Spearman's correlation with reference scores."""
    sets = similarity_data(subjects[0], data)
    rows = []
    for subject in subjects:
        k = subject.model.config.n_sense
        columns = [correlations(subject, pairs) for pairs in sets.values()]
        for row in columns[0]:
            rows.append([row, *(column[row] for column in columns)])
        if k:
            rows.insert(k, ['the best', *(best_sense(column, k) for column in columns)])
    counts = ', '.join(f'{len(pairs)} {name}' for name, pairs in sets.items())
    title = f"Similarity (Table 4): Spearman's correlation with scores of word pairs ({counts})"
    columns = {'vectors': ''} | dict.fromkeys(sets, '.3f')
    return Table(title, columns, rows, ['A word of several tokens has the mean of their vectors.'])
