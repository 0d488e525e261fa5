"""Table 5: which pronoun follows a role noun, with and without one sense of the noun."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import progress
from rucksack.edits.lending import probs_under
from rucksack.loaded import LoadedModel
from rucksack.paper.lists import ESTIMATION_PROMPTS, NOUNS, PROMPTS
from rucksack.senses import at_last, compose, pad
from rucksack.words import read_lines, tokens_with_zeros, word_ids

FRACTIONS = [i / 20 for i in range(21)]  # how much of a sense or direction to remove


def read_lists(data: str | None) -> tuple[list[str], list[str]]:
    """Read nouns, and prompts with {}, from a file with one on each line.

    If the file has no nouns, or no prompts, we use the paper's.
    """
    lines = read_lines(f'@{data}') if data else []
    nouns = [line.strip() for line in lines if '{}' not in line]
    prompts = [line for line in lines if '{}' in line]
    return nouns or NOUNS, prompts or PROMPTS


# -----------------------------------------------------------------------------
# Prompts with a noun.


@dataclass
class NounPrompts:
    """n prompts with a noun, padded to the same length T."""

    idx: Tensor      # ids (n, T)
    last: Tensor     # last position of each prompt (n,)
    is_noun: Tensor  # whether a token has a byte of the noun (n, T)


def prompts_with(loaded: LoadedModel, noun: str, prompts: list[str]) -> NounPrompts:
    """Encode prompts with a noun in place of {}, and mark the tokens with a byte of the noun.

    Raises UserError if a prompt is too long to read.
    """
    in_noun = '\0' * len(noun.encode())
    texts = []
    marks = []
    for prompt in prompts:
        ids = loaded.encode(prompt.replace('{}', noun))
        texts.append(ids)
        marked = prompt.replace('{}', in_noun)
        marks.append(tokens_with_zeros(loaded.encoding, ids, marked))
    idx, last = pad(texts)
    loaded.needs_length(idx.shape[1], 'a prompt has')
    is_noun, _ = pad(marks)
    is_noun = is_noun.bool().to(loaded.device)
    return NounPrompts(idx.to(loaded.device), last, is_noun)


# -----------------------------------------------------------------------------
# Interventions.


def pronouns(loaded: LoadedModel) -> list[int]:
    """Find the ids of she, he and they; raises UserError if one is missing."""
    return word_ids(loaded.encoding, ('she', 'he', 'they'))


def scale_in_noun(loaded: LoadedModel, prompts: NounPrompts, scales: list[tuple[int, float]]
                  ) -> Tensor:
    """Compute ln p of she, he and they after n prompts, for each (sense, factor) in scales.

    The factor multiplies that sense of the noun, after the model's own edit: (scales, n, 3).
    """
    def scale(idx, C, sense, factor):
        C = C.clone()
        C[:, :, sense][prompts.is_noun] *= factor
        return C

    edits = []
    for sense, factor in scales:
        own = partial(scale, sense=sense, factor=factor)
        edits.append(compose([loaded.edit, own]))
    probs = probs_under(loaded.model, prompts.idx, edits, prompts.last)  # (scales, n, V)
    return probs[..., pronouns(loaded)].log()


@torch.no_grad()
def project_noun(loaded: LoadedModel, prompts: NounPrompts) -> Tensor:
    """Compute a Transformer's logits of she, he, they after removing parts of v = E_he - E_she.

    v (d,) is removed from the input embeddings of the noun's tokens. With all of it removed, the
    embeddings are orthogonal to v. Returns (fractions, n, 3).
    """
    model = loaded.model
    E = model.wte.weight[pronouns(loaded)]  # (3, d)
    unit = F.normalize(E[1] - E[0], dim=0)  # (d,), v / |v|
    x = model.wte(prompts.idx)  # (n, T, d)
    along = (x @ unit) * prompts.is_noun  # (n, T)
    part = along[..., None] * unit  # (n, T, d)
    logits = []
    for fraction in FRACTIONS:
        h = model.contextualizer(x - fraction * part)  # (n, T, d)
        logits.append(at_last(h, prompts.last) @ E.T)  # (n, 3)
    return torch.stack(logits)


def bias_ratio(logits: Tensor) -> Tensor:
    """Average max(p(she) / p(he), p(he) / p(she)) over n prompts: (.., n, 3) -> (..)."""
    log_odds = logits[..., 0] - logits[..., 1]
    ratios = log_odds.cpu().double().abs().exp()
    return ratios.mean(-1)


def choose_sense(loaded: LoadedModel, nouns: list[str] = NOUNS) -> int:
    """Find the sense whose removal leaves the least bias on Table 15's prompts.

    Only single-token nouns count, unless there are none.
    """
    scales = [(sense, 0.0) for sense in range(loaded.config.n_sense)]
    left = 0.0
    for noun in loaded.single_tokens(nouns) or nouns:
        prompts = prompts_with(loaded, noun, ESTIMATION_PROMPTS)
        left += bias_ratio(scale_in_noun(loaded, prompts, scales))  # (k,)
    return left.argmin().item()


# -----------------------------------------------------------------------------
# The table.


def gender_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """Gender (Table 5): the larger of p(she) / p(he) and p(he) / p(she) after role nouns.

    The sense is removed from all tokens of a noun, while --edit NOUN:N edits only the last. In a
    Transformer, E_he - E_she is projected out of the nouns. Reduction: how much of the ratio's
    excess over 1 is gone. The paper's code averages over nouns that are one token inside a text.
    Five other prompts (Table 15) determine the sense and, for each noun, the best fraction: 0,
    0.05 .. 1. (The paper's code sets no bounds, but penalizes large fractions.)
    """
    nouns, prompts = read_lists(data)
    change = 'nouns projected'
    intervene = partial(project_noun, loaded)
    if loaded.config.n_sense:
        sense = choose_sense(loaded, nouns)
        change = f'without sense {sense}'
        scales = [(sense, 1 - fraction) for fraction in FRACTIONS]
        intervene = partial(scale_in_noun, loaded, scales=scales)
    found = []  # for each noun, ratios and shares of they, (3, 2)
    for noun in progress(nouns, f'gender, {loaded.name}'):
        estimate = intervene(prompts_with(loaded, noun, ESTIMATION_PROMPTS))  # (fractions, 5, 3)
        best = bias_ratio(estimate).argmin().item()
        logits = intervene(prompts_with(loaded, noun, prompts))
        logits = logits[[0, -1, best]]  # (3, prompts, 3)
        p = logits.cpu().double().exp()  # up to a factor, in a Transformer
        she, he, they = p.unbind(-1)  # (3, prompts) each
        share = (they / (she + he)).mean(-1)  # (3,)
        ratio = bias_ratio(logits)  # (3,)
        found.append(torch.stack([ratio, share], dim=-1))
    changes = ['unedited', change, 'best fraction']
    of_all = torch.stack(found)  # (nouns, 3, 2)
    is_single = [bool(loaded.single_tokens([noun])) for noun in nouns]
    rows = []
    for of_group in filter(len, (of_all, of_all[is_single])):
        means = of_group.mean(0).tolist()
        unedited, _ = means[0]
        for name, (ratio, share) in zip(changes, means):
            rows.append({
                'change': name,
                'nouns': len(of_group),
                'bias ratio': ratio,
                'reduction %': 100 * (unedited - ratio) / (unedited - 1),
                'they / (she + he) %': 100 * share})
    return rows
