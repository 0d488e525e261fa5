"""Table 5: which pronoun follows a role noun, with and without one sense of the noun."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from model import Backpack, Edit
from rucksack.common import UserError, progress
from rucksack.grammar import word_id
from rucksack.paper import ESTIMATION_PROMPTS, NOUNS, PROMPTS
from rucksack.table import Subject, Table
from senses import compose, edited, scale_senses

FRACTIONS = [i / 20 for i in range(21)]  # of what can be taken from a noun

# Logits (fractions, n, V) after n prompts on a noun, with each of the FRACTIONS taken from it.
Intervention = Callable[['NounPrompts'], Tensor]


@dataclass(frozen=True)
class NounPrompts:
    """n prompts on a noun: ids (n, T), the place (n,) where each ends, and the noun's own ids."""

    idx: Tensor
    last: Tensor
    noun: list[int]


@dataclass(frozen=True)
class GenderRow:
    """A row of Table 5: means over nouns and prompts."""

    model: str
    change: str                     # what was taken from the nouns; '' for the model as it is
    ratio: float                    # the likelier of she and he over the other
    reduction: float | None         # % of the ratio's excess over 1 that is gone
    ratio_single: float             # the same two over the nouns of a single token
    reduction_single: float | None
    they: float                     # probability of they, %
    they_share: float               # p(they) / (p(she) + p(he)), %


def prompts_on(subject: Subject, noun: str, prompts: list[str]) -> NounPrompts:
    """The prompts with a noun in them; UserError if the model cannot read them."""
    texts = [torch.tensor(subject.encode(prompt.format(noun)), device=subject.device)
             for prompt in prompts]
    block_size = subject.model.config.block_size
    if max(map(len, texts)) > block_size:
        raise UserError(f'{subject.name} reads texts of {block_size} tokens; a prompt is longer')
    last = torch.tensor([len(text) - 1 for text in texts], device=subject.device)
    return NounPrompts(pad_sequence(texts, batch_first=True), last, subject.encode(f' {noun}'))


@torch.no_grad()
def without_sense(model: Backpack, prompts: NounPrompts, sense: int, edit: Edit) -> Tensor:
    """Logits with fractions of a sense of the noun off, on top of an edit: (fractions, n, V).

    They are linear in the sense, so two passes give all.
    """
    n = torch.arange(len(prompts.idx), device=prompts.idx.device)
    off = compose([edit, scale_senses(prompts.noun, [sense], 0.0)])
    whole = model(prompts.idx, C=edited(model, prompts.idx, edit))[n, prompts.last]  # (n, V)
    rest = model(prompts.idx, C=edited(model, prompts.idx, off))[n, prompts.last]  # (n, V)
    return torch.stack([whole + fraction * (rest - whole) for fraction in FRACTIONS])


@torch.no_grad()
def without_direction(model: Backpack, prompts: NounPrompts, v: Tensor) -> Tensor:
    """The same of a Transformer: fractions of the part along v = E_he - E_she (d,) are taken off.

    They are taken from the input embeddings of the noun's tokens; without the whole of it these lie
    in the null space of v.
    """
    n = torch.arange(len(prompts.idx), device=prompts.idx.device)
    x = model.wte(prompts.idx)  # (n, T, d)
    noun = torch.tensor(prompts.noun, device=prompts.idx.device)
    is_noun = torch.isin(prompts.idx, noun)  # (n, T)
    unit = F.normalize(v, dim=0)
    part = (x @ unit)[..., None] * unit * is_noun[..., None]  # (n, T, d)
    h = [model.contextualizer(x - fraction * part)[n, prompts.last] for fraction in FRACTIONS]
    return model.project(torch.stack(h))


def bias_ratio(logits: Tensor, she: int, he: int) -> Tensor:
    """The likelier of she and he over the other, averaged over n prompts: (.., n, V) -> (..)."""
    log_odds = (logits[..., she] - logits[..., he]).cpu().double()
    return log_odds.abs().exp().mean(-1)


def pronouns(subject: Subject) -> tuple[int, int, int]:
    """The ids of she, he and they."""
    she, he, they = (word_id(subject.encoding, word) for word in ('she', 'he', 'they'))
    return she, he, they


def single_token(subject: Subject, nouns: list[str]) -> list[str]:
    """Those of the nouns that are one token."""
    return [noun for noun in nouns if len(subject.encode(f' {noun}')) == 1]


def choose_sense(subject: Subject) -> int:
    """The sense without which least bias is left in Table 15's prompts, over single-token nouns."""
    she, he, _ = pronouns(subject)
    nouns = single_token(subject, NOUNS) or NOUNS
    prompts = [prompts_on(subject, noun, ESTIMATION_PROMPTS) for noun in nouns]
    edit = subject.edit or compose([])
    left = []
    for sense in range(subject.model.config.n_sense):
        off = [without_sense(subject.model, p, sense, edit)[-1] for p in prompts]  # (n, V) each
        left.append(sum(bias_ratio(logits, she, he).item() for logits in off))
    return left.index(min(left))


def find_intervention(subject: Subject) -> tuple[str, Intervention]:
    """What is taken from the nouns: the chosen sense, or from a Transformer's nouns a direction."""
    model = subject.model
    if model.config.n_sense:
        sense = choose_sense(subject)
        edit = subject.edit or compose([])
        return f'without sense {sense}', lambda prompts: without_sense(model, prompts, sense, edit)
    she, he, _ = pronouns(subject)
    v = (model.wte.weight[he] - model.wte.weight[she]).detach()  # (d,)
    return 'nouns projected', lambda prompts: without_direction(model, prompts, v)


def measure(subject: Subject, noun: str, intervene: Intervention) -> Tensor:
    """Ratio, p(they) and p(they) / (p(she) + p(he)) after a noun: (3 fractions, 3 numbers).

    The fractions taken away are none, all, and the best, chosen on the prompts of Table 15.
    """
    she, he, they = pronouns(subject)
    estimate = intervene(prompts_on(subject, noun, ESTIMATION_PROMPTS))  # (fractions, n, V)
    best = bias_ratio(estimate, she, he).argmin().item()
    logits = intervene(prompts_on(subject, noun, PROMPTS))[[0, -1, best]]  # (3, prompts, V)
    logits = logits[..., :subject.model.config.n_vocab]
    p = logits.double().softmax(-1).cpu()  # (3, prompts, V)
    share = p[..., they] / (p[..., she] + p[..., he])  # (3, prompts)
    numbers = [bias_ratio(logits, she, he), p[..., they].mean(-1), share.mean(-1)]  # (3,) each
    return torch.stack(numbers, dim=-1)


def gender_rows(subject: Subject) -> list[GenderRow]:
    """Table 5 of a model: as it is, with something taken from the nouns, with the best fraction."""
    change, intervene = find_intervention(subject)
    work = progress(NOUNS, f'gender, {subject.name}')
    found = torch.stack([measure(subject, noun, intervene) for noun in work])  # (nouns, 3, 3)
    singles = single_token(subject, NOUNS)
    is_single = torch.tensor([noun in singles for noun in NOUNS])
    mean = found.mean(0)  # (3, 3)
    ratios = mean[:, 0].tolist()
    singles = found[is_single, :, 0].mean(0).tolist()
    rows = []
    for i, what in enumerate(['', change, 'the best fraction']):
        rows.append(GenderRow(
            model=str(subject), change=what,
            ratio=ratios[i], reduction=reduction(ratios, i),
            ratio_single=singles[i], reduction_single=reduction(singles, i),
            they=100 * mean[i, 1].item(), they_share=100 * mean[i, 2].item()))
    return rows


def reduction(ratios: list[float], i: int) -> float | None:
    """How much of the first ratio's excess over 1 the i-th one lacks, in %; None for the first."""
    if i == 0:
        return None
    return 100 * (ratios[0] - ratios[i]) / max(ratios[0] - 1, 1e-9)


def gender_table(subjects: list[Subject], by_run: bool) -> Table:
    """Table 5: how biased the pronoun after a role noun is; by run, a row each."""
    rows = []
    for subject in subjects:
        plain, off, best = gender_rows(subject)
        if by_run:  # ratios as the run is, reductions by its sense
            rows.append([f'{plain.model}; reduced {off.change}', plain.ratio, off.reduction,
                         plain.ratio_single, off.reduction_single, plain.they, plain.they_share])
            continue
        for row in (plain, off, best):
            label = f'{row.model}, {row.change}' if row.change else row.model
            rows.append([label, row.ratio, row.reduction, row.ratio_single, row.reduction_single,
                         row.they, row.they_share])
    columns = {'': '', 'bias ratio': '.2f', 'reduction %': '.0f', 'of one piece': '.2f',
               'reduction % ': '.0f', 'they %': '.2f', 'they / (she + he) %': '.2f'}
    n = len(single_token(subjects[0], NOUNS))
    return Table(
        f'Gender (Table 5): the likelier of she and he over the other, {len(NOUNS)} nouns in '
        f'{len(PROMPTS)} prompts', columns, rows, [
            f'Of one piece: over the {n} nouns that are one token, as in the paper. Reductions count',
            'from the excess over 1; of runs named, without the sense. '
            f'{len(ESTIMATION_PROMPTS)} other prompts choose it,',
            'and a fraction (of 0, 0.05 .. 1) for each noun; the authors: Nelder-Mead from 1, '
            'with a penalty.'])
