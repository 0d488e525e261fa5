"""Table 4: how similar two words are, by each sense and by the embeddings."""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.common import UserError, one_line
from rucksack.table import Subject, Table

Pairs = list[tuple[str, str, float]]  # two words and how similar people find them

SIMILARITY = {  # name in the paper -> file, separator, column of the score, header lines
    'SL999': ('SimLex-999.txt', '\t', 3, 1),
    'SV3500': ('SimVerb-3500.txt', '\t', 3, 0),
    'RG65': ('RG65.csv', ';', 2, 0),
    'WS353': ('WS353.csv', ',', 2, 1),
}


def read_pairs(path: Path, separator: str, column: int, header: int) -> Pairs:
    """The word pairs in a file, one a line; UserError if it holds none."""
    pairs = []
    try:
        for line in path.read_text('utf-8-sig').splitlines()[header:]:
            if line:
                row = line.split(separator)
                pairs.append((row[0].strip(), row[1].strip(), float(row[column])))
    except (ValueError, IndexError) as error:
        raise UserError(f'{path} holds no pairs of words with a score ({one_line(error)}); '
                        'take another file')
    if not pairs:
        raise UserError(f'{path} holds no pairs of words with a score; take another file')
    return pairs


def pairs_of_the_toy() -> dict[str, Pairs]:
    """The near-synonyms of the toy world, whose true likeness is known."""
    adverbs = toy.ADVERBS.replace(',', '').split()
    return {
        'adjectives': [pair for pair in toy.SYNONYMS if pair[0] not in adverbs],
        'adverbs': [pair for pair in toy.SYNONYMS if pair[0] in adverbs]}


def read_similarity(data: str) -> dict[str, Pairs]:
    """Those of the paper's four sets that are in a folder, or in a file."""
    files = {path.name: path for path in [Path(data), *Path(data).rglob('*')]}
    return {name: read_pairs(files[file], *form) for name, (file, *form) in SIMILARITY.items()
            if file in files}


def similarity_data(subject: Subject, data: str | None, or_toy: bool) -> dict[str, Pairs]:
    """Pairs by set, from data; for the toy its own without data or, if or_toy, with other data."""
    found = read_similarity(data) if data else {}
    if not found and subject.is_toy and (or_toy or not data):
        return pairs_of_the_toy()
    if not found:
        names = ' or '.join(file for file, *_ in SIMILARITY.values())
        raise UserError(f'it takes --data, a folder with {names}; they are in '
                        'https://github.com/john-hewitt/backpacks-flash-attn, in training/data')
    return found


def ranks(x: Tensor) -> Tensor:
    """The rank of each of n numbers (n,), from 1 on; equal ones share the mean of their ranks."""
    _, place, counts = x.unique(return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum(0) - (counts - 1) / 2
    return mean_ranks[place].double()


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation: Pearson's of the ranks of n numbers and n others; NaN if all are equal."""
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


@torch.no_grad()
def word_vectors(subject: Subject, word: str) -> Tensor:
    """The embedding of a word, then its senses: (1 + k, d), the mean over its tokens."""
    ids = torch.tensor(subject.encode(f' {word}'), device=subject.device)
    vectors = subject.model.wte(ids)[:, None]  # (tokens, 1, d)
    if subject.model.config.n_sense:
        vectors = torch.cat([vectors, subject.model.senses(ids)], dim=1)  # (tokens, 1 + k, d)
    return vectors.mean(0)


def similarities(subject: Subject, pairs: Pairs) -> dict[str, Tensor]:
    """How similar the words of n pairs are, (n,) each.

    By every sense (Eq. 13), by the least similar of their senses (Eq. 14), and by their embeddings.
    """
    words = {word for pair in pairs for word in pair[:2]}
    vectors = {word: word_vectors(subject, word) for word in words}
    a = torch.stack([vectors[pair[0]] for pair in pairs])  # (n, 1 + k, d)
    b = torch.stack([vectors[pair[1]] for pair in pairs])
    cosines = F.cosine_similarity(a, b, dim=-1).cpu()  # (n, 1 + k)
    by_sense = cosines[:, 1:]
    rows = {f'sense {l}': by_sense[:, l] for l in range(by_sense.shape[1])}
    if rows:
        rows['minimum'] = by_sense.amin(1)
    rows[f'embeddings, {subject}'] = cosines[:, 0]
    return rows


def correlations(subject: Subject, pairs: Pairs) -> dict[str, float]:
    """Spearman's correlation of each kind of similarity with the truth."""
    truth = torch.tensor([score for _, _, score in pairs])
    return {row: spearman(x, truth) for row, x in similarities(subject, pairs).items()}


def best_sense(column: dict[str, float], k: int) -> tuple[int, float]:
    """The best of the first k rows, and its correlation; NaN counts as the worst."""
    values = [-1.0 if math.isnan(x) else x for x in list(column.values())[:k]]
    return values.index(max(values)), max(values)


def similarity_table(subjects: list[Subject], data: str | None, by_run: bool,
                     or_toy: bool) -> Table:
    """Table 4: Spearman's correlation with people or the toy's truth; by run, the best sense's."""
    sets = similarity_data(subjects[0], data, or_toy)
    k = subjects[0].model.config.n_sense
    columns: dict[str, dict] = {}
    best = ['the best']
    for name, pairs in sets.items():
        columns[name] = {}
        for subject in subjects:
            found = correlations(subject, pairs)
            if by_run:
                heads = subject.model.config.n_sense or 1
                columns[name][str(subject)] = best_sense(found, heads)[1]
            else:
                columns[name] |= found
        if not by_run:
            best.append(f'sense {best_sense(columns[name], k)[0]}')
    rows = [[row, *(column[row] for column in columns.values())] for row in columns[name]]
    if not by_run:
        rows.insert(k, best)
    counts = ', '.join(f'{len(pairs)} {name}' for name, pairs in sets.items())
    return Table(
        f"Similarity (Table 4): Spearman's correlation with the truth for word pairs ({counts})",
        {'': '', **dict.fromkeys(columns, '.3f')}, rows, ['A word of several tokens is their mean.'])
