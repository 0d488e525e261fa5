"""The tables of sample.py: what senses say, and what makes a prediction."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack import senses
from rucksack.cli import progress
from rucksack.edits import SensesOf, find_senses
from rucksack.loaded import Subject
from rucksack.model import Backpack
from rucksack.senses import Edit
from rucksack.table import Table, Token
from rucksack.words import (
    bag_ids,
    describe,
    over_vocabulary,
    pieces_of,
    quoted,
    scores_of_bags,
    token_text,
    word_forms,
    word_id,
)

# -----------------------------------------------------------------------------
# Looking at senses.


def ranking(subject: Subject, title: str, columns: dict[str, str], rows: list[tuple]) -> Table:
    """Make a table from rows (cells, ids (n,), scores (n,)).

    The cells go under columns; n words with their scores follow.
    """
    n = len(rows[0][1])
    ranks = {str(i + 1): word_and_score for i in range(n)}
    lines = []
    for cells, ids, scores in rows:
        words = [token(subject, v) for v in ids.tolist()]
        lines.append([*cells, *zip(words, scores.tolist())])
    return Table(title, columns | ranks, lines, clip=True)


def token(subject: Subject, v: int) -> Token:
    """Return the text of the token with the id v, for a table."""
    return Token(token_text(subject.encoding, v))


def word_and_score(pair: tuple[str, float]) -> str:
    """Format a word and its score as one cell."""
    word, score = pair
    return f'{word!r:.20} {score:+.2f}'


def show(subject: Subject, word: str, chosen: SensesOf | None, edit: Edit | None) -> Table:
    """Show the norm of each sense of a word, and the words it moves most (Tables 1, 3).

    chosen are the senses to show; None: all.
    """
    model = subject.model
    encoding = subject.encoding
    pieces = pieces_of(encoding, word)
    idx = torch.tensor([pieces], device=subject.device)  # (1, T)
    C = senses.senses_after(model, idx, edit)[0, -1]  # (k, d)
    ids, logits = senses.extremes(model, C, 8)  # (k, 16) each
    numbers = range(len(C))
    what = describe(encoding, word)
    if chosen:
        _, numbers, description = find_senses(chosen, model, encoding)
        if chosen.pair:
            what = description
    rows = []
    for l in numbers:
        norm = C[l].norm().item()
        rows.append(([l, norm, '+'], ids[l, :8], logits[l, :8]))
        rows.append(([l, norm, '-'], ids[l, 8:], logits[l, 8:]))
    title = (f'{what}: the words that each sense raises (+) and lowers (-) most, '
             'in logits at weight 1')
    return ranking(subject, title, {'sense': 'd', 'norm': '.1f', 'sign': ''}, rows)


def separate(subject: Subject, pairs: list[tuple[str, str]]) -> Table:
    """Rank senses by how strongly they separate pairs of words, on average over the vocabulary."""
    model = subject.model
    scores = over_vocabulary(model, 'separating', mean_separation(subject, pairs))  # (V, k)
    mean_size = scores.abs().mean(0)  # (k,)
    rows = []
    for l in mean_size.argsort(descending=True).tolist():
        ids = scores[:, l].abs().topk(8).indices  # (8,)
        cells = [l, mean_size[l].item()]
        rows.append((cells, ids, scores[ids, l]))
    title = (f'How far each sense separates {plus_and_minus(subject, pairs)}: mean absolute value '
             'over all words, and the most extreme words')
    return ranking(subject, title, {'sense': 'd', 'mean': '.2f'}, rows)


def separate_words(subject: Subject, pairs: list[tuple[str, str]], words: list[str]) -> Table:
    """Measure how far each sense of each word separates pairs, C . (E_a - E_b): a row per word."""
    last_pieces = [pieces_of(subject.encoding, word)[-1] for word in words]
    ids = torch.tensor(last_pieces, device=subject.device)
    score = mean_separation(subject, pairs)
    rows = []
    for word, scores in zip(words, score(subject.model, ids)):
        rows.append([word, *scores.tolist()])
    title = (f'How far each sense of these words separates {plus_and_minus(subject, pairs)}, '
             'in logits at weight 1')
    columns = {'word': ''} | sense_columns(subject)
    return Table(title, columns, rows)


def mean_separation(subject: Subject, pairs: list[tuple[str, str]]) -> Callable:
    """Make the function (model, ids (n,)) -> mean separation over the pairs (n, k)."""
    firsts, seconds = zip(*pairs)
    a = word_ids(subject, firsts)
    b = word_ids(subject, seconds)
    return lambda model, ids: senses.separation(model, ids, a, b).mean(-1)


def word_ids(subject: Subject, words: Sequence[str]) -> list[int]:
    """Find the ids of words; UserError unless each is one token."""
    return [word_id(subject.encoding, word) for word in words]


def plus_and_minus(subject: Subject, pairs: list[tuple[str, str]]) -> str:
    """Name the words that a score separates, for a title."""
    a, b = word_ids(subject, pairs[0])
    first_pair = f'{quoted(subject.encoding, a)} (+) from {quoted(subject.encoding, b)} (-)'
    if len(pairs) == 1:
        return first_pair
    return f'{len(pairs)} pairs (the mean; the first is {first_pair})'


def sense_columns(subject: Subject) -> dict[str, str]:
    """Make a column for each sense: s0, s1 and so on."""
    numbers = range(subject.model.config.n_sense)
    return {f's{l}': '+.2f' for l in numbers}


def speak_for(subject: Subject, words: list[str]) -> Table:
    """Find the senses that most favour a bag of words (Eq. 17), and what they raise."""
    model = subject.model
    bag = bag_ids(subject.encoding, words)
    scores = scores_of_bags(model, [bag])[..., 0]  # (V, k)
    rows = []
    for place in scores.flatten().topk(20).indices.tolist():  # of V * k
        w, l = divmod(place, scores.shape[1])
        C = model.senses(torch.tensor(w, device=subject.device))  # (k, d)
        ids, logits = senses.extremes(model, C[l], 5)  # (10,) each
        cells = [scores[w, l].item(), token(subject, w), l]
        rows.append((cells, ids[:5], logits[:5]))
    title = (f'The senses that most favour {"+".join(words)} (Eq. 17), '
             'and the words they raise most')
    return ranking(subject, title, {'score': '.2f', 'word': '<', 'sense': 'd'}, rows)


def similar(subject: Subject, word: str) -> Table:
    """Find the words most like a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    w = word_id(subject.encoding, word)
    compare = partial(senses.similarity, w=w)
    cosines = over_vocabulary(subject.model, 'comparing', compare)  # (V, k)
    cosines[w] = -1  # a word is not its own neighbour
    kinds = {str(l): column for l, column in enumerate(cosines.T)}  # (V,) each
    kinds['min'] = cosines.amin(-1)
    rows = []
    for name, cosine in kinds.items():
        top = cosine.topk(8)
        rows.append(([name], top.indices, top.values))
    title = (f'{word}: the most similar words, by the cosine of each sense (Eq. 13) '
             'and by their minimum (Eq. 14)')
    return ranking(subject, title, {'sense': ''}, rows)


# -----------------------------------------------------------------------------
# Explaining the prediction.


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and its ids (1, T)."""

    text: str
    idx: Tensor
    template: str = ''  # the text with {} in place of a word
    word: str = ''      # that word


def shortened(text: str) -> str:
    """Shorten a long prompt to its end, on one line, for a table."""
    text = text.replace('\n', ' ')
    return text if len(text) <= 60 else '...' + text[-57:]


def probabilities(subject: Subject, prompts: list[Prompt], words: list[str], edit: Edit | None
                  ) -> Table:
    """Show the probability that each word comes next, one row per prompt, before and after an edit.

    Two words also get their log odds, ln(p(first) / p(second)).
    """
    ids = word_ids(subject, words)
    edits = {'': None}
    if edit is not None:
        edits[' after'] = edit
    columns = {'prompt': shortened}
    rows = [[prompt.text] for prompt in prompts]
    for when, one in edits.items():
        columns |= {f'p({word}){when}': '.4f' for word in words}
        if len(ids) == 2:
            columns[f'log odds{when}'] = '+.3f'
        for prompt, row in zip(progress(prompts, 'prompts'), rows):
            probs = senses.next_word_probs(subject.model, prompt.idx, one)[0]  # (V,)
            p = probs[ids]  # (words,)
            row.extend(p.tolist())
            if len(ids) == 2:
                log_odds = p[0].log() - p[1].log()
                row.append(log_odds.item())
    title = 'The probability that each word comes next (after: with the edit)'
    return Table(title, columns, rows)


def adds(subject: Subject, pairs: list[tuple[str, str]], prompts: list[Prompt], edit: Edit | None
         ) -> Table:
    """Sum what each sense of a word adds to the log odds of pairs after a prompt with this word.

    There is one row per word: for each sense, the sum of alpha * C . (E_a - E_b) over the word's
    occurrences, if the prompt has any; then the sum over all other tokens; then the log odds.
    """
    model = subject.model
    E = model.wte.weight.detach()  # (V, d)
    firsts, seconds = zip(*pairs)
    v = (E[word_ids(subject, firsts)] - E[word_ids(subject, seconds)]).mean(0)  # (d,)
    rows = []
    for prompt in prompts:
        C = senses.senses_after(model, prompt.idx, edit)  # (1, T, k, d)
        alpha, scores = senses.explain(model, prompt.idx, v, C)  # (1, T, k) each
        terms = (alpha * scores)[0]  # (T, k)
        forms = word_forms(subject.encoding, prompt.word)
        is_word = senses.occurrences(prompt.idx, forms).flatten()  # (T,)
        by_sense = terms[is_word].sum(0)  # (k,)
        total = terms.sum()
        rest = total - by_sense.sum()
        if not is_word.any():
            by_sense.fill_(math.nan)  # printed as -
        rows.append([prompt.word, *by_sense.tolist(), rest.item(), total.item()])
    what = plus_and_minus(subject, pairs)
    title = f'How far each sense of the word separates {what} after "{prompts[0].template}"'
    columns = {'word': ''} | sense_columns(subject)
    columns |= {'other tokens': '+.2f', 'log odds': '+.2f'}
    return Table(title, columns, rows)


def next_words(subject: Subject, title: str, idx: Tensor, edits: dict[str, Edit | None]) -> Table:
    """Find the likeliest next words under n edits, and those whose probability changes most.

    The first and the last edit get bars.
    """
    names = list(edits)
    predictions = [
        senses.next_word_probs(subject.model, idx, edit) for edit in edits.values()]
    probs = torch.cat(predictions)  # (n, V)
    first_and_last = probs[[0, -1]]  # (2, V)
    likeliest = first_and_last.topk(10).indices  # (2, 10)
    moves = first_and_last.diff(dim=0)[0].abs().topk(6)
    moving = moves.indices[moves.values > 1e-4]
    ids = torch.cat([likeliest.flatten(), moving]).unique()
    likeliest_first = probs[:, ids].amax(0).argsort(descending=True, stable=True)
    rows = []
    for v in ids[likeliest_first].tolist():
        rows.append([token(subject, v), *probs[:, v].tolist()])
    columns = {'next word': ''} | dict.fromkeys(names, '.3f')
    return Table(title, columns, rows, bars=(names[0], names[-1]))


def sweep(subject: Subject, scaled: SensesOf, idx: Tensor, edit: Edit | None) -> Table:
    """Show the next words as senses go from off to full weight, on top of the edit (Figure 3)."""
    words, numbers, what = find_senses(scaled, subject.model, subject.encoding)
    edits = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        scale = senses.scale_senses(words, numbers, factor)
        edits[f'{factor:g}'] = senses.compose([edit, scale] if edit else [scale])
    title = f'The next words with {what} scaled by 0 to 1'
    return next_words(subject, title, idx, edits)


TERMS = 15  # that explain prints


def terms(model: Backpack, encoding: Encoding, idx: Tensor, direction: Tensor,
          C: Tensor | None = None) -> dict[str, np.ndarray]:
    """List the T * k terms of senses.explain for a text idx (1, T), with their labels.

    Returns arrays by name, as pandas.DataFrame takes them: adds = alpha * C.E, then alpha, C.E
    (the score C . direction), and the token, its position and the number of the sense.
    """
    alpha, scores = senses.explain(model, idx, direction, C)  # (1, T, k) each
    _, T, k = alpha.shape
    tokens = np.array([Token(token_text(encoding, v)) for v in idx[0].tolist()], dtype=object)
    return {
        'adds': (alpha * scores).flatten().cpu().numpy(),
        'alpha': alpha.flatten().cpu().numpy(),
        'C.E': scores.flatten().cpu().numpy(),
        'token': tokens.repeat(k),
        'position': np.arange(T).repeat(k),
        'sense': np.tile(np.arange(k), T)}


def explain(subject: Subject, words: list[str], idx: Tensor, edit: Edit | None) -> Table:
    """List all terms alpha * C . E of the logit of A, or of the logit of A minus B's.

    The table prints the largest 15. words are [A], [A, B], or [] for the likeliest word.
    """
    model = subject.model
    probs = senses.next_word_probs(model, idx, edit)[0]  # (V,)
    ids = word_ids(subject, words)
    if not ids:
        ids = [probs.argmax().item()]
    E = model.wte.weight.detach()  # (V, d)
    v = E[ids[0]]  # (d,)
    if len(ids) == 2:
        v = v - E[ids[1]]
    C = senses.senses_after(model, idx, edit)  # (1, T, k, d)
    found = terms(model, subject.encoding, idx, v, C)  # (T * k,) each
    adds = found['adds']
    order = np.abs(adds).argsort()[::-1]  # largest first
    rows = [list(row) for row in zip(*(column[order].tolist() for column in found.values()))]
    others = adds[order][TERMS:]
    notes = [f'{others.sum():+.3f}  the other {len(others)} terms', f'{adds.sum():+.3f}  in all']
    logits = ' minus the logit of '.join(quoted(subject.encoding, w) for w in ids)
    chances = '; '.join(f'{probs[w]:.3f}, rank {(probs > probs[w]).sum() + 1}' for w in ids)
    title = f'The logit of {logits}, term by term: alpha * C.E (probability {chances})'
    columns = {
        'adds': '+.3f',
        'alpha': '.3f',
        'C.E': '+.2f',
        'token': '<',
        'position': 'd',
        'sense': 'd'}
    return Table(title, columns, rows, notes, most=TERMS)
