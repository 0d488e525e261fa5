"""The tables of sample.py: what senses predict, and how a prediction adds up."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack import senses
from rucksack.cli import progress
from rucksack.edits import SensesOf, find_senses
from rucksack.errors import UserError
from rucksack.lending import probs_under
from rucksack.loaded import LoadedModel
from rucksack.model import Backpack
from rucksack.senses import Edit
from rucksack.table import Table
from rucksack.words import (
    bag_ids,
    describe,
    over_vocabulary,
    quoted,
    scores_of_bags,
    token_texts,
    tokens_of,
    word_id,
    word_ids,
)

Pairs = list[tuple[str, str]]  # pairs of words
Prompts = list[tuple[str, Tensor]]  # texts to continue, each with its ids (1, T)
MOST_MOVED = 10  # words that --show prints on each side, as Table 19 does

# -----------------------------------------------------------------------------
# Looking at senses.


def ranking(loaded: LoadedModel, title: str, columns: dict[str, str], cells: Iterable,
            ids: Tensor, scores: Tensor) -> Table:
    """Make a table of words: each row has its cells, then its n ids as words with their scores."""
    ranks = {str(i + 1): word_and_score for i in range(ids.shape[1])}
    rows = []
    for first_cells, row_ids, row_scores in zip(cells, ids.tolist(), scores.tolist()):
        words = token_texts(loaded.encoding, row_ids)
        rows.append([*first_cells, *zip(words, row_scores)])
    return Table(title, columns | ranks, rows, fold=len(columns))


def word_and_score(pair: tuple[str, float]) -> str:
    """Format a word and its score as one cell."""
    word, score = pair
    return f'{word!r:.20} {score:+.2f}'


def show(loaded: LoadedModel, chosen: SensesOf, prompts: Prompts) -> Table:
    """Show the words that senses of a word move most (Tables 1, 3), after the model's edit.

    Raises UserError for *, because each word has its own senses.
    """
    if chosen.word == '*':
        raise UserError(f'--show {chosen.text!r}: * means every word; give one word')
    model = loaded.model
    encoding = loaded.encoding
    _, numbers, _ = find_senses(chosen, model, encoding, [idx for _, idx in prompts])
    idx = torch.tensor([tokens_of(encoding, chosen.word)], device=loaded.device)  # (1, T)
    C = senses.senses_after(model, idx, loaded.edit)[0, -1]  # (k, d)
    ids, logits = senses.extremes(model, C[numbers], MOST_MOVED)
    ids = ids.view(-1, MOST_MOVED)  # two rows per sense
    logits = logits.view(-1, MOST_MOVED)
    cells = [(l, sign) for l in numbers for sign in '+-']
    title = (f'{describe(encoding, chosen.word)}: the words that each sense raises (+) and lowers '
             '(-) most, in logits at weight 1')
    columns = {'sense': 'd', 'sign': ''}
    return ranking(loaded, title, columns, cells, ids, logits)


def separate(loaded: LoadedModel, text: str, pairs: Pairs) -> Table:
    """Rank senses by how strongly they separate pairs of words, on average over the vocabulary.

    A long sense separates any two words by many logits. So we divide this mean by the sense's
    spread, the standard deviation of what it adds to the logits of all words.
    """
    model = loaded.model
    E = model.wte.weight[:loaded.config.n_vocab]  # (V, d)
    d = E.shape[1]
    covariance = E.T.cov().view(d, d)  # torch gives () for d = 1
    spread = over_vocabulary(model, spreads, covariance=covariance).mean(0)  # (k,)
    scores = over_vocabulary(model, separation_of(loaded, pairs))  # (V, k)
    sizes = scores.abs()
    mean_sizes = sizes.mean(0)  # (k,)
    ratio = mean_sizes / spread
    order = ratio.argsort(descending=True)
    ids = sizes.topk(8, dim=0).indices  # (8, k)
    extremes = scores.gather(0, ids)  # (8, k)
    cells = zip(order.tolist(), mean_sizes[order].tolist(), ratio[order].tolist())
    title = (f'How far each sense separates {text} (+/-): mean absolute value over all words, its '
             "ratio to the spread of the sense's logits, and the most extreme words")
    columns = {'sense': 'd', 'mean': '.2f', 'ratio': '.2f'}
    return ranking(loaded, title, columns, cells, ids.T[order], extremes.T[order])


@torch.no_grad()
def spreads(model: Backpack, ids: Tensor, covariance: Tensor) -> Tensor:
    """Compute the standard deviation of the V logits that each sense of ids (n,) adds: (n, k).

    That is sqrt(C S C^T), where S (d, d) is the covariance of the embeddings.
    """
    C = model.senses(ids)  # (n, k, d)
    variance = (C @ covariance * C).sum(-1)
    return variance.sqrt()


def separate_words(loaded: LoadedModel, text: str, pairs: Pairs, words: list[str]) -> Table:
    """Measure how far each sense of each word separates pairs, C . (E_a - E_b): a row per word."""
    last_ids = [tokens_of(loaded.encoding, word)[-1] for word in words]
    separation = separation_of(loaded, pairs)
    scores = separation(loaded.model, torch.tensor(last_ids, device=loaded.device))  # (words, k)
    rows = [[word, *of_word] for word, of_word in zip(words, scores.tolist())]
    columns = {'word': ''}
    for l in range(loaded.config.n_sense):
        columns[f's{l}'] = '+.2f'
    title = f'How far each sense of these words separates {text} (+/-), in logits at weight 1'
    return Table(title, columns, rows)


def separation_of(loaded: LoadedModel, pairs: Pairs) -> Callable:
    """Make the function (model, ids (n,)) -> mean separation over the pairs (n, k)."""
    a, b = (word_ids(loaded.encoding, words) for words in zip(*pairs))
    return partial(senses.separation, a=a, b=b)


def speak_for(loaded: LoadedModel, words: list[str]) -> Table:
    """Find the senses that most favour a bag of words (Eq. 17), and the words they raise."""
    model = loaded.model
    bag = bag_ids(loaded.encoding, words)
    scores, = scores_of_bags(model, [bag])  # (V, k)
    best = scores.flatten().topk(20)  # out of V * k
    w, l = torch.unravel_index(best.indices, scores.shape)  # (20,) each
    C = model.senses(w)[range(20), l]  # (20, d)
    ids, logits = senses.extremes(model, C, 5)  # (20, 10) each
    tokens = token_texts(loaded.encoding, w.tolist())
    cells = zip(best.values.tolist(), tokens, l.tolist())
    title = (f'The senses that most favour {"+".join(words)} (Eq. 17), '
             'and the words they raise most')
    columns = {'score': '.2f', 'word': repr, 'sense': 'd'}
    return ranking(loaded, title, columns, cells, ids[:, :5], logits[:, :5])


def similar(loaded: LoadedModel, word: str) -> Table:
    """Find the words most similar to a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    w = word_id(loaded.encoding, word)
    cosines = over_vocabulary(loaded.model, senses.similarity, w=w)  # (V, k)
    cosines[w] = -1  # a word is not its own neighbour
    k = cosines.shape[1]
    smallest = cosines.amin(-1, keepdim=True)  # (V, 1)
    cosines = torch.cat([cosines, smallest], dim=-1)  # (V, k + 1)
    top = cosines.topk(8, dim=0)  # (8, k + 1)
    title = (f'{word}: the most similar words, by the cosine of each sense (Eq. 13) '
             'and by their minimum (Eq. 14)')
    cells = [[name] for name in [*range(k), 'min']]
    return ranking(loaded, title, {'sense': ''}, cells, top.indices.T, top.values.T)


# -----------------------------------------------------------------------------
# Explaining the prediction.


def shortened(text: str) -> str:
    """Shorten a prompt to its last 60 characters, on one line, for a table."""
    return text.replace('\n', ' ')[-60:]


def probabilities(loaded: LoadedModel, prompts: Prompts, words: list[str]) -> Table:
    """Show the probability that each word comes next, before and after the edit.

    Each prompt has a row. Two words also get their log odds, ln(p(first) / p(second)).
    """
    ids = word_ids(loaded.encoding, words)
    edits = {'': None}
    if loaded.edit:
        edits[' after'] = loaded.edit
    columns = {'prompt': shortened}
    for when in edits:
        columns |= {f'p({word}){when}': '.4f' for word in words}
        if len(ids) == 2:
            columns[f'log odds{when}'] = '+.3f'
    rows = []
    for text, idx in progress(prompts, 'prompts'):
        row = [text]
        probs = probs_under(loaded.model, idx, edits.values())  # (edits, 1, V)
        for p in probs[:, 0, ids]:  # (words,)
            row += p.tolist()
            if len(ids) == 2:
                log_odds = p[0].log() - p[1].log()
                row.append(log_odds.item())
        rows.append(row)
    title = 'The probability that each word comes next (after: with the edit)'
    return Table(title, columns, rows)


def next_words(loaded: LoadedModel, title: str, idx: Tensor, edits: dict[str, Edit | None]
               ) -> Table:
    """Find the likeliest next words under each edit. The first and last edits get bars."""
    probs = probs_under(loaded.model, idx, edits.values())[:, 0]  # (edits, V)
    ids = probs.amax(0).topk(12).indices  # (12,)
    words = token_texts(loaded.encoding, ids.tolist())
    rows = [[word, *p] for word, p in zip(words, probs.T[ids].tolist())]
    columns = {'next word': repr} | dict.fromkeys(edits, '.3f')
    return Table(title, columns, rows, bars=(1, -1))


def before_and_after(loaded: LoadedModel, idx: Tensor) -> Table:
    """Show the next words without and with the model's edit."""
    edits = {'before': None, 'after': loaded.edit}
    return next_words(loaded, 'The next word before and after the edit', idx, edits)


def sweep(loaded: LoadedModel, scaled: SensesOf, idx: Tensor, prompts: Prompts) -> Table:
    """Show the next words while senses are scaled from 0 to 1, after the edit (Figure 3)."""
    texts = [text for _, text in prompts]
    words, numbers, what = find_senses(scaled, loaded.model, loaded.encoding, texts)
    edits = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        scale = senses.scale_senses(words, numbers, factor)
        edits[str(factor)] = senses.compose([loaded.edit, scale])
    title = f'The next words with {what} scaled from 0 to 1'
    return next_words(loaded, title, idx, edits)


def terms(model: Backpack, encoding: Encoding, idx: Tensor, direction: Tensor,
          C: Tensor | None = None) -> dict[str, np.ndarray]:
    """List the T * k terms of senses.explain for a text idx (1, T), with their labels.

    Returns arrays by name, for pandas.DataFrame: adds = alpha * C.E, then alpha, C.E (the score
    C . direction), and the token, its position and the sense's number.
    """
    alpha, scores = senses.explain(model, idx, direction, C)  # (1, T, k) each
    _, T, k = alpha.shape
    numbers = {'adds': alpha * scores, 'alpha': alpha, 'C.E': scores}
    columns = {name: x.flatten().cpu().numpy() for name, x in numbers.items()}
    tokens = token_texts(encoding, idx[0].tolist())
    columns['token'] = np.array(tokens, dtype=object).repeat(k)
    columns['position'] = np.arange(T).repeat(k)
    columns['sense'] = np.tile(np.arange(k), T)
    return columns


def explanation(loaded: LoadedModel, words: list[str], idx: Tensor) -> Table:
    """List all terms alpha * C . E of the logit of A, or of A minus B, after the model's edit.

    Only the largest 15 are printed. words are [A], [A, B], or [] for the likeliest word.
    """
    model = loaded.model
    probs = senses.next_word_probs(model, idx, loaded.edit)[0]  # (V,)
    ids = word_ids(loaded.encoding, words)
    if not ids:
        ids = [probs.argmax().item()]
    E = model.wte.weight  # (vocab_size, d)
    v = E[ids[0]]  # (d,)
    if len(ids) == 2:
        v = v - E[ids[1]]
    C = senses.senses_after(model, idx, loaded.edit)  # (1, T, k, d)
    found = terms(model, loaded.encoding, idx, v, C)  # (T * k,) each
    adds = found['adds']
    order = np.abs(adds).argsort()[::-1]  # largest first
    rows = list(zip(*(column[order].tolist() for column in found.values())))
    logits = ' minus the logit of '.join(quoted(loaded.encoding, [w]) for w in ids)
    chances = ', '.join(f'{probs[w]:.3f}' for w in ids)
    title = f'The logit of {logits}, term by term: alpha * C.E (probability {chances})'
    columns = {
        'adds': '+.3f',
        'alpha': '.3f',
        'C.E': '+.2f',
        'token': repr,
        'position': 'd',
        'sense': 'd'}
    notes = [f'{adds.sum():+.3f}  in all']
    return Table(title, columns, rows, notes, most=15)
