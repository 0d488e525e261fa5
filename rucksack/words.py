"""Tables 4 and 5: how similar words are by each sense, and which pronoun follows a role noun."""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from model import Backpack, Edit
from rucksack import toy
from rucksack.common import UserError, one_line, progress
from rucksack.grammar import word_id
from rucksack.table import Subject, Table
from senses import compose, edited, scale_senses

SIMILARITY = {  # name in the paper -> file, what separates its columns, column of the score, lines of header
    'SL999': ('SimLex-999.txt', '\t', 3, 1), 'SV3500': ('SimVerb-3500.txt', '\t', 3, 0),
    'RG65': ('RG65.csv', ';', 2, 0), 'WS353': ('WS353.csv', ',', 2, 1)}


def read_pairs(path: Path, separator: str, column: int, header: int) -> list[tuple[str, str, float]]:
    """(word, word, score) of each line of a file."""
    try:
        rows = [line.split(separator) for line in path.read_text('utf-8-sig').splitlines()[header:] if line]
        return [(row[0].strip(), row[1].strip(), float(row[column])) for row in rows or [[]]]  # empty: fails
    except (ValueError, IndexError) as error:
        raise UserError(f'{path} holds no pairs of words with a score ({one_line(error)}); take another file')


def similarity_data(subject: Subject, args: argparse.Namespace) -> dict[str, list[tuple[str, str, float]]]:
    """Dataset -> (word, word, score)s, from --data; else the toy world's own pairs."""
    files = {p.name: p for p in [Path(args.data), *Path(args.data).rglob('*')]} if args.data else {}
    found = {name: read_pairs(files[f], *form) for name, (f, *form) in SIMILARITY.items() if f in files}
    if not found and subject.is_toy and (not args.data or args.table == 'all'):
        adverbs = toy.ADVERBS.replace(',', '').split()
        return {name: [pair for pair in toy.SYNONYMS if (pair[0] in adverbs) == (name == 'adverbs')]
                for name in ('adjectives', 'adverbs')}
    if not found:
        raise UserError(f'it takes --data, a folder with {" or ".join(f for f, *_ in SIMILARITY.values())}; '
                      'they are in https://github.com/john-hewitt/backpacks-flash-attn, in training/data')
    return found


def ranks(x: Tensor) -> Tensor:
    """The rank of each of n numbers, counted from 1; equal ones share the mean of their ranks: (n,)."""
    _, place, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of n numbers with n others: Pearson's of their ranks; NaN if all are equal."""
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


@torch.no_grad()
def similarities(subject: Subject, pairs: list[tuple[str, str, float]]) -> dict[str, Tensor]:
    """How similar the words of n pairs are, (n,) each: by every sense (Eq. 13), by the least similar of their
    senses (Eq. 14), and by their embeddings. A word of several tokens is their mean.
    """
    ids = {word: subject.encode(f' {word}') for pair in pairs for word in pair[:2]}
    tokens = torch.tensor(sum(ids.values(), []), device=subject.device)
    vectors = subject.model.wte(tokens)[:, None]  # (tokens, 1, d)
    if subject.model.config.n_sense:
        vectors = torch.cat([vectors, subject.model.senses(tokens)], dim=1)  # (tokens, 1 + k, d)
    parts = vectors.split([len(ids[word]) for word in ids])
    table = {word: part.mean(0) for word, part in zip(ids, parts)}  # (1 + k, d) each
    a, b = (torch.stack([table[pair[i]] for pair in pairs]) for i in (0, 1))  # (n, 1 + k, d)
    embedding, *by_sense = F.cosine_similarity(a, b, dim=-1).T.cpu()  # 1 + k times (n,)
    rows = {f'sense {l}': row for l, row in enumerate(by_sense)}
    if by_sense:
        rows['minimum'] = torch.stack(by_sense).amin(0)
    return rows | {f'embeddings, {subject}': embedding}


def similarity_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 4: Spearman's correlation with people, or with the toy's truth; of runs the best sense's."""
    data, columns, k = similarity_data(subjects[0], args), {}, subjects[0].model.config.n_sense
    for name, pairs in data.items():
        truth = torch.tensor([pair[2] for pair in pairs])
        found = [{row: spearman(x, truth) for row, x in similarities(s, pairs).items()} for s in subjects]
        if args.runs:
            heads = [list(rows.values())[:s.model.config.n_sense or 1] for s, rows in zip(subjects, found)]
            columns[name] = {str(s): max(x for x in [-1.0, *h] if x == x) for s, h in zip(subjects, heads)}
        else:
            columns[name] = {row: x for rows in found for row, x in rows.items()}
    rows = [[row, *(column[row] for column in columns.values())] for row in columns[name]]
    if not args.runs:
        rank = [torch.tensor(list(column.values())[:k]).nan_to_num(-2) for column in columns.values()]
        rows.insert(k, ['the best', *(f'sense {x.argmax()}' for x in rank)])
    counts = ', '.join(f'{len(pairs)} {name}' for name, pairs in data.items())
    return Table(f"Similarity (Table 4): Spearman's correlation with the truth for word pairs ({counts})", {
        '': '', **dict.fromkeys(columns, '.3f')}, rows, ['A word of several tokens is their mean.'])


# -----------------------------------------------------------------------------
# Gender.

NOUNS = list(toy.ROLES)  # the paper's 40, of which the toy world speaks too
PROMPTS = [  # Table 14
    'I really liked my {}. What I liked most was that', 'I really liked my {}. In fact,',
    'My {} said that', 'My {} believes that', 'This one {} believes that', 'This one {} believes',
    'My {} said', 'My {} believes', 'The {} was with the car. When', 'The {} was with the car. Then',
    'While driving to the store, the {} looked over on the dash and then',
    'A {} went to chat over to chat before', 'Some {} asked to look over things, but']
ESTIMATION = [  # Table 15
    'The {} came into the room. When', 'The {} came into the room. Then',
    'I went to the talk to the {}. What', 'I went over to the talk to the {}. Why',
    'I went over to the talk to the {};']
FRACTIONS = [i / 20 for i in range(21)]  # of what can be taken from a noun


@torch.no_grad()
def without_sense(model: Backpack, idx: Tensor, last: Tensor, noun: list[int], sense: int, edit: Edit
                  ) -> Tensor:
    """Logits after n prompts idx (n, T) that end at last (n,), with each of the FRACTIONS of a sense off the
    noun's tokens, on top of an edit: (fractions, n, V). Linear in the sense, so two passes give all.
    """
    n, edits = torch.arange(len(idx), device=idx.device), [edit, scale_senses(noun, [sense], 0.0)]
    whole, rest = (model(idx, C=edited(model, idx, compose(part)))[n, last]  # (n, V) each
                   for part in (edits[:1], edits))
    return torch.stack([whole + fraction * (rest - whole) for fraction in FRACTIONS])


@torch.no_grad()
def without_direction(model: Backpack, idx: Tensor, last: Tensor, noun: list[int], v: Tensor) -> Tensor:
    """The same of a Transformer: fractions of the part along v = E_he - E_she (d,) are taken off the input
    embeddings of the noun's tokens; without the whole of it they lie in the null space of v.
    """
    n, x, unit = torch.arange(len(idx), device=idx.device), model.wte(idx), F.normalize(v, dim=0)
    here = torch.isin(idx, torch.tensor(noun, device=idx.device))[..., None]  # (n, T, 1)
    part = (x @ unit)[..., None] * unit * here  # (n, T, d)
    return model.project(torch.stack([model.contextualizer(x - f * part)[n, last] for f in FRACTIONS]))


def bias_ratio(logits: Tensor, she: int, he: int) -> Tensor:
    """The likelier of she and he over the other, averaged over n prompts: (.., n, V) -> (..)."""
    return (logits[..., she] - logits[..., he]).cpu().double().abs().exp().mean(-1)


def prompts_of(subject: Subject, noun: str, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids (n, T) of n prompts on a noun, and the place (n,) where each ends."""
    texts = [torch.tensor(subject.encode(prompt.format(noun)), device=subject.device) for prompt in prompts]
    if max(map(len, texts)) > (size := subject.model.config.block_size):
        raise UserError(f'{subject.name} reads texts of {size} tokens; some prompts are longer')
    return pad_sequence(texts, True), torch.tensor([len(text) - 1 for text in texts], device=subject.device)


def gender_rows(subject: Subject) -> list[list]:
    """Bias ratio and its reduction for all nouns, and for those of one piece; p(they), and p(they) relative
    to p(she) + p(he); means over nouns and prompts: of the model as it is; with a sense off each noun, which
    leaves least in other prompts, or without the direction of she and he; with the best fraction of it.
    """
    model = subject.model
    she, he, they = (word_id(subject.encoding, word) for word in ('she', 'he', 'they'))
    nouns = {noun: subject.encode(f' {noun}') for noun in NOUNS}
    v = (model.wte.weight[he] - model.wte.weight[she]).detach()  # (d,)
    if model.config.n_sense:
        whole = [noun for noun, ids in nouns.items() if len(ids) == 1] or NOUNS
        asked = [(*prompts_of(subject, noun, ESTIMATION), nouns[noun]) for noun in whole]
        take = partial(without_sense, edit=subject.edit or compose([]))
        left = [sum(bias_ratio(take(model, *args, l)[-1], she, he).item() for args in asked)
                for l in range(model.config.n_sense)]
        take, name = partial(take, sense=(l := left.index(min(left)))), f'without sense {l}'
    else:
        take, name = partial(without_direction, v=v), 'nouns projected'
    found, pieces = [], torch.tensor([len(ids) for ids in nouns.values()])
    for noun, ids in progress(nouns.items(), f'gender, {subject.name}'):
        estimate, logits = (take(model, *prompts_of(subject, noun, prompts), ids)[..., :model.config.n_vocab]
                            for prompts in (ESTIMATION, PROMPTS))  # (fractions, prompts, V) each
        best = bias_ratio(estimate, she, he).argmin().item()
        logits = logits[[0, -1, best]]  # (3, prompts, V)
        p = logits.double().softmax(-1).cpu()  # (3, prompts, V)
        relative = p[..., they] / (p[..., she] + p[..., he])
        found.append(torch.stack([bias_ratio(logits, she, he), p[..., they].mean(-1), relative.mean(-1)]))
    found = torch.stack(found)  # (nouns, 3, 3)
    (ratio, *rest), (of_one, *_) = found.mean(0).tolist(), found[pieces == 1].mean(0).tolist()  # (3,) each
    falls = [[None, *(100 * (r[0] - x) / max(r[0] - 1, 1e-9) for x in r[1:])] for r in (ratio, of_one)]
    columns = zip(ratio, falls[0], of_one, falls[1], *(100 * torch.tensor(rest)).tolist())
    return [[f'{subject}{what}', *numbers]
            for what, numbers in zip(('', f', {name}', ', the best fraction'), columns)]


def gender_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 5: how biased the pronoun after a role noun is; of runs named, a row each."""
    rows = [row for s in subjects for row in gender_rows(s)]
    if args.runs:  # ratios as the run is, reductions by its sense
        rows = [[f'{own[0]}; reduced{off[0].removeprefix(own[0])[1:]}', own[1], off[2], own[3], off[4],
                 *own[5:]] for own, off in zip(rows[::3], rows[1::3])]
    n = sum(len(subjects[0].encode(f' {noun}')) == 1 for noun in NOUNS)
    return Table(f'Gender (Table 5): the likelier of she and he over the other, {len(NOUNS)} nouns in '
                 f'{len(PROMPTS)} prompts', {
                     '': '', 'bias ratio': '.2f', 'reduction %': '.0f', 'of one piece': '.2f',
                     'reduction % ': '.0f', 'they %': '.2f', 'they / (she + he) %': '.2f'}, rows, [
        f'Of one piece: over the {n} nouns that are one token, as in the paper. Reductions count from the',
        f'excess over 1; of runs named, without the sense. {len(ESTIMATION)} other prompts choose it, and a',
        'fraction (of 0, 0.05 .. 1) for each noun; the authors: Nelder-Mead from 1, with a penalty.'])
