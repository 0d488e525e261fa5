"""Table 5: which pronoun follows a role noun, with and without one sense of the noun."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.cli import progress
from rucksack.lending import probs_under
from rucksack.loaded import LoadedModel
from rucksack.paper_lists import ESTIMATION_PROMPTS, NOUNS, PROMPTS
from rucksack.senses import Edit, at_last, compose, extremes, pad, separation
from rucksack.table import Table
from rucksack.words import read_lines, token_texts, word_ids

FRACTIONS = [i / 20 for i in range(21)]  # how much of a sense or direction to remove


@dataclass(frozen=True)
class NounPrompts:
    """n prompts with a noun, padded to the same length T."""

    idx: Tensor      # ids (n, T)
    last: Tensor     # last position of each prompt (n,)
    is_noun: Tensor  # whether a token is part of the noun (n, T)


@dataclass(frozen=True)
class Lists:
    """The nouns, and the prompts that measure the bias after them."""

    nouns: list[str]
    prompts: list[str]


def read_lists(data: str | None) -> Lists:
    """Read a file with a noun, or a prompt with {}, on each line; repeated lines count once.

    If the file has no nouns, or no prompts, we use the paper's.
    """
    lines = read_lines(f'@{data}') if data else []
    nouns = dict.fromkeys(line.strip() for line in lines if '{}' not in line)
    prompts = dict.fromkeys(line for line in lines if '{}' in line)
    return Lists(list(nouns) or NOUNS, list(prompts) or PROMPTS)


def encoded(loaded: LoadedModel, noun: str, prompts: list[str]) -> list[list[int]]:
    """Encode the prompts with a noun in them; raises UserError if the model cannot read them."""
    texts = [loaded.encode(prompt.replace('{}', noun)) for prompt in prompts]
    loaded.needs_length(max(map(len, texts)), 'a prompt has')
    return texts


def estimation_prompts(loaded: LoadedModel, data: str | None) -> list[list[int]]:
    """Encode the prompts of Table 15 with each noun."""
    nouns = read_lists(data).nouns
    return [ids for noun in nouns for ids in encoded(loaded, noun, ESTIMATION_PROMPTS)]


def tokens_of_noun(loaded: LoadedModel, ids: list[int], noun: str, prompt: str) -> Tensor:
    """Tell which tokens ids (T,) of a prompt contain a byte of the noun: (T,)."""
    is_noun = []  # for each byte of the text
    for part in prompt.split('{}'):
        is_noun += [False] * len(part.encode())
        is_noun += [True] * len(noun.encode())  # after the last part, this is no token's
    found = []
    end = 0
    for token in loaded.encoding.decode_tokens_bytes(ids):
        start = end
        end += len(token)
        found.append(any(is_noun[start:end]))
    return torch.tensor(found)


def prompts_on(loaded: LoadedModel, noun: str, prompts: list[str]) -> NounPrompts:
    """Encode prompts with a noun and find it; raises UserError if the model cannot read them."""
    texts = encoded(loaded, noun, prompts)
    idx, last = pad(texts)
    places = [tokens_of_noun(loaded, ids, noun, prompt) for ids, prompt in zip(texts, prompts)]
    is_noun = pad_sequence(places, batch_first=True)  # (n, T)
    return NounPrompts(idx.to(loaded.device), last, is_noun.to(loaded.device))


def scale_in_noun(loaded: LoadedModel, prompts: NounPrompts, sense: int, factor: float) -> Edit:
    """Make an edit that multiplies a sense of the noun by factor, after the model's own edit."""
    def scale(idx: Tensor, C: Tensor) -> Tensor:
        C = C.clone()
        C[:, :, sense][prompts.is_noun] *= factor
        return C
    return compose([loaded.edit, scale])


def log_probs_under(loaded: LoadedModel, prompts: NounPrompts, edits: list[Edit]) -> Tensor:
    """Compute ln p of she, he and they after n prompts: (edits, n, 3)."""
    probs = probs_under(loaded.model, prompts.idx, edits, prompts.last)  # (edits, n, V)
    return probs[..., pronouns(loaded)].log()


def without_sense(loaded: LoadedModel, sense: int, prompts: NounPrompts) -> Tensor:
    """Compute ln p of she, he, they with fractions of a noun's sense removed: (fractions, n, 3)."""
    edits = [scale_in_noun(loaded, prompts, sense, 1 - fraction) for fraction in FRACTIONS]
    return log_probs_under(loaded, prompts, edits)


@torch.no_grad()
def without_direction(loaded: LoadedModel, prompts: NounPrompts) -> Tensor:
    """Compute a Transformer's logits of she, he, they after removing parts of v = E_he - E_she.

    v (d,) is removed from the input embeddings of the noun's tokens. With all of it removed, the
    embeddings are orthogonal to v. Returns (fractions, n, 3).
    """
    model = loaded.model
    E = model.wte.weight[pronouns(loaded)]  # (3, d)
    v = E[1] - E[0]  # (d,)
    unit = F.normalize(v, dim=0)
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
    log_odds = (logits[..., 0] - logits[..., 1]).cpu().double()
    return log_odds.abs().exp().mean(-1)


def pronouns(loaded: LoadedModel) -> list[int]:
    """Find the ids of she, he and they; raises UserError if one is missing."""
    return word_ids(loaded.encoding, ('she', 'he', 'they'))


def choose_sense(loaded: LoadedModel, nouns: list[str] = NOUNS) -> int:
    """Find the sense whose removal leaves the least bias on Table 15's prompts.

    Only single-token nouns count, unless there are none.
    """
    k = loaded.config.n_sense
    left = torch.zeros(k).double()
    for noun in loaded.single_tokens(nouns) or nouns:
        prompts = prompts_on(loaded, noun, ESTIMATION_PROMPTS)
        edits = [scale_in_noun(loaded, prompts, sense, 0.0) for sense in range(k)]
        left += bias_ratio(log_probs_under(loaded, prompts, edits))  # (k,)
    return left.argmin().item()


def measure(loaded: LoadedModel, noun: str, prompts: list[str],
            intervene: Callable[[NounPrompts], Tensor]) -> Tensor:
    """Measure the bias ratio and p(they) / (p(she) + p(he)) in % after a noun: (3 fractions, 2).

    The fractions removed are none, all, and the one that works best on the prompts of Table 15.
    """
    estimate = intervene(prompts_on(loaded, noun, ESTIMATION_PROMPTS))  # (fractions, n, 3)
    best = bias_ratio(estimate).argmin().item()
    logits = intervene(prompts_on(loaded, noun, prompts))[[0, -1, best]]  # (3, prompts, 3)
    she, he, they = logits.cpu().double().exp().unbind(-1)  # (3, prompts) each
    percent = 100 * (they / (she + he)).mean(-1)  # (3,)
    return torch.stack([bias_ratio(logits), percent], dim=-1)


def gender_rows(loaded: LoadedModel, lists: Lists) -> list[tuple]:
    """Make the rows of a model: unchanged, after the intervention, and after its best fraction.

    The intervention removes the chosen sense from nouns or, in a Transformer, the direction v.
    """
    change = 'nouns projected'
    intervene = partial(without_direction, loaded)
    if loaded.config.n_sense:
        sense = choose_sense(loaded, lists.nouns)
        change = f'without sense {sense}'
        intervene = partial(without_sense, loaded, sense)
    nouns = progress(lists.nouns, f'gender, {loaded.name}')
    found = torch.stack(
        [measure(loaded, noun, lists.prompts, intervene) for noun in nouns])  # (nouns, 3, 2)
    ratio, they_share = found.mean(0).T  # (3,) each
    singles = [lists.nouns.index(noun) for noun in loaded.single_tokens(lists.nouns)]
    ratio_single = found[singles, :, 0].mean(0)
    names = [str(loaded), f'{loaded}, {change}', f'{loaded}, the best fraction']
    numbers = [
        ratio, reductions(ratio), ratio_single, reductions(ratio_single), they_share]  # (3,) each
    return list(zip(names, *torch.stack(numbers).tolist()))


def reductions(ratio: Tensor) -> Tensor:
    """Compute how much of the first ratio's excess over 1 each ratio (n,) removes, in %."""
    return 100 * (ratio[0] - ratio) / (ratio[0] - 1)


PRONOUNS = {'she', 'her', 'hers', 'herself', 'he', 'him', 'his', 'himself'}


def pronoun_note(loaded: LoadedModel, nouns: list[str]) -> str:
    """Count the single-token nouns whose chosen sense is about pronouns (Table 13)."""
    sense = choose_sense(loaded, nouns)
    ids = torch.tensor(word_ids(loaded.encoding, nouns), device=loaded.device)  # (nouns,)
    C = loaded.model.senses(ids)[:, sense]  # (nouns, d)
    found, _ = extremes(loaded.model, C, 10)  # (nouns, 20)
    has_pronoun = 0
    for row in found.tolist():
        words = {word.strip().lower() for word in token_texts(loaded.encoding, row)}
        has_pronoun += not PRONOUNS.isdisjoint(words)
    she, he, _ = pronouns(loaded)
    strongest = separation(loaded.model, ids, she, he).abs().argmax(-1)  # (nouns,)
    return (f'Sense {sense} has a pronoun among the ten words that it raises or lowers most for '
            f'{has_pronoun} of {len(nouns)} single-token nouns (Table 13). It separates she from '
            f'he more than any other sense for {(strongest == sense).sum().item()}.')


def gender_table(models: list[LoadedModel], data: str | None) -> Table:
    """Make Table 5: how biased the pronoun after a role noun is; data is a file for read_lists."""
    lists = read_lists(data)
    rows = []
    for loaded in models:
        rows += gender_rows(loaded, lists)
    singles = models[0].single_tokens(lists.nouns)
    others = [noun for noun in lists.nouns if noun not in singles]
    title = ('Gender (Table 5): the larger of p(she) / p(he) and p(he) / p(she), '
             f'{len(lists.nouns)} nouns in {len(lists.prompts)} prompts')
    columns = {
        'model': '',
        'bias ratio': '.2f',
        'reduction %': '.0f',
        'single-token': '.2f',
        'its reduction %': '.0f',
        'they / (she + he) %': '.2f'}
    notes = [
        'Single-token: the average over nouns that are one token inside a text, as in the code of '
        'the paper.',
        f'Nouns of several tokens: {", ".join(others) or "none"}. The sense is removed from all '
        'their tokens, while --edit NOUN:N edits only the last.',
        "Reduction: how much of the ratio's excess over 1 is gone.",
        'Five other prompts (Table 15) determine the sense and, for each noun, the best fraction:',
        "0, 0.05 .. 1. (The paper's code sets no bounds, but penalizes large fractions.)"]
    if singles and models[0].config.n_sense:
        notes.append(pronoun_note(models[0], singles))
    return Table(title, columns, rows, notes)
