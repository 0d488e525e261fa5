"""Tables 2 and 8: how likely a text is."""

import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.cli import progress
from rucksack.data import check_ids, data_folder, data_id, read_bin, read_meta
from rucksack.errors import UserError, user_errors
from rucksack.fast import DistinctIds, distinct_ids
from rucksack.loaded import LoadedModel
from rucksack.paper.benchmarks import BLIMP, LAMBADA, WIKITEXT, rows_of
from rucksack.table import Table
from rucksack.weights import count_parameters

LOGITS_AT_ONCE = 1 << 26  # per batch: 256 MiB of float32
TOKENS_AT_ONCE = 1 << 14

Pair = tuple[list[int], list[int]]  # ids of a context, and of its continuation; neither is empty


# -----------------------------------------------------------------------------
# Scores of continuations.


class Scores(NamedTuple):
    """How likely n continuations are after their contexts.

    T is the length of the longest text. Ids are -1 where nothing is scored.
    """

    logp: Tensor       # (n,), log-probability, in nats
    touched: Tensor    # (n,), how many tokens right before a scored one have edited senses
    targets: Tensor    # (n, T), the ids scored at each position
    likeliest: Tensor  # (n, T), the likeliest next ids
    p: Tensor          # (n, T), their probabilities

    @property
    def greedy(self) -> Tensor:
        """Tell which continuations (n,) consist only of likeliest ids."""
        return (self.likeliest == self.targets).all(1)


@torch.no_grad()
def score(loaded: LoadedModel, pairs: list[Pair], what: str) -> Scores:
    """Score continuations; only the end of a pair longer than block_size is read."""
    c = loaded.config
    texts = [inputs_and_targets(pair, c.block_size) for pair in pairs]
    lengths = torch.tensor([len(idx) for idx, _ in texts])
    # Sort by length, so that batches need little padding.
    longest_first = lengths.argsort(descending=True, stable=True)
    T = lengths.max().item()
    tokens = min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // c.vocab_size)
    size = max(1, tokens // T)
    batches = []
    for batch in progress(longest_first.split(size), f'{what}, {loaded.name}'):
        batches.append(score_batch(loaded, [texts[i] for i in batch], T))
    as_given = longest_first.argsort()
    return Scores(*(torch.cat(column)[as_given] for column in zip(*batches)))


def inputs_and_targets(pair: Pair, block_size: int) -> tuple[Tensor, Tensor]:
    """Make the text to read for a pair (T,), and its targets (T,), which are -1 for the context."""
    context, continuation = pair
    ids = torch.tensor((context + continuation)[-block_size - 1:])
    targets = ids[1:].clone()
    targets[:-len(continuation)] = -1
    return ids[:-1], targets


def score_batch(loaded: LoadedModel, texts: list[tuple[Tensor, Tensor]], longest: int) -> Scores:
    """Score one batch: n texts with their targets, padded to the same length T.

    targets and likeliest are padded to the longest text of all batches.
    """
    model = loaded.model
    idx, targets = zip(*texts)
    idx = pad_sequence(idx, batch_first=True).to(loaded.device)  # (n, T)
    targets = pad_sequence(targets, batch_first=True, padding_value=-1).to(loaded.device)
    is_scored = targets != -1  # (n, T)
    is_touched = torch.zeros_like(is_scored)
    with loaded.autocast():
        if loaded.edit:
            before = model.senses(idx)  # (n, T, k, d)
            C = loaded.edit(idx, before)
            is_touched = (before != C).flatten(2).any(-1)  # (n, T)
            logits = model(idx, C=C)
        else:
            fast = DistinctIds(model)
            logits = fast(idx, None, *distinct_ids(idx))
    logits = logits[is_scored][:, :model.config.n_vocab].float()  # (m, V)
    wanted = targets[is_scored]  # (m,)
    nothing = torch.zeros(idx.shape, device=loaded.device)  # (n, T)
    nats = nothing.masked_scatter(is_scored, F.cross_entropy(logits, wanted, reduction='none'))
    p = nothing.masked_scatter(is_scored, logits.softmax(-1).amax(-1))
    likeliest = targets.masked_scatter(is_scored, logits.argmax(-1))
    logp = -nats.sum(1)  # (n,)
    n_touched = (is_touched & is_scored).sum(1)
    missing = (0, longest - idx.shape[1])  # so that batches have the same shape
    padded = [F.pad(x, missing, value=-1).cpu() for x in (targets, likeliest, p)]
    return Scores(logp.cpu().double(), n_touched.cpu(), *padded)


def measure_edit(before: Scores, after: Scores) -> dict[str, float]:
    """Measure the price of an edit in nats per token, and where likeliest next ids changed.

    A position that turns from wrong to right is repaired; one from right to wrong is broken.
    """
    n = (before.targets != -1).sum()
    loss = -before.logp.sum() / n
    price = (before.logp - after.logp).sum() / n
    was_right = before.likeliest == before.targets  # (n, T)
    is_right = after.likeliest == after.targets
    found = {
        'tokens': n,
        'moved': after.touched.sum(),
        'loss': loss,
        'price': price,
        '%': 100 * price / loss,
        'changed': (before.likeliest != after.likeliest).sum(),
        'repaired': (is_right & ~was_right).sum(),
        'broken': (was_right & ~is_right).sum()}
    return {name: value.item() for name, value in found.items()}


def edit_notes(models: list[LoadedModel], scores: list[Scores]) -> list[str]:
    """Say what an edit costs, and how often it changed the likeliest next word.

    Each edited model in the list follows the same model without the edit.
    """
    notes = []
    for loaded, before, after in zip(models[1:], scores, scores[1:]):
        if loaded.edit:
            found = measure_edit(before, after)
            notes.append(
                f'{loaded.name}: {found["price"]:+.5f} nats per token; touched '
                f'{found["moved"]:,} of {found["tokens"]:,} tokens. The likeliest next word '
                f'changed at {found["changed"]:,} positions: {found["repaired"]:,} repaired, '
                f'{found["broken"]:,} broken.')
    return notes


def windows(ids: list[int], before: int, block_size: int, look_back: bool = False) -> list[Pair]:
    """Split a text, which follows the token `before`, into pairs that score each token once.

    A continuation has block_size tokens; the last may have fewer. Its context is the token before
    it or, with look_back, the block_size tokens before it, of which score reads as many as fit.
    """
    ids = [before, *ids]
    n_context = block_size if look_back else 1
    pairs = []
    for start in range(1, len(ids), block_size):
        first = max(0, start - n_context)
        pairs.append((ids[first:start], ids[start:start + block_size]))
    return pairs


def score_texts(loaded: LoadedModel, texts: list[list[int]], what: str, look_back: bool = False
                ) -> Scores:
    """Score the windows of texts."""
    pairs = []
    for ids in texts:
        pairs += windows(ids, loaded.eot, loaded.config.block_size, look_back)
    return score(loaded, pairs, what)


def perplexity(logp: Tensor, n: int) -> float:
    """Compute exp(-sum(logp) / n), for log-probabilities in nats; infinity if it is too large."""
    return (-logp.sum() / n).exp().item()


def bits_per_byte(logp: Tensor, n_bytes: int) -> float:
    """Compute log2 of the perplexity per byte, which does not depend on the tokenizer."""
    return -logp.sum().item() / n_bytes / math.log(2)


# -----------------------------------------------------------------------------
# Loss on held-out text.


def held_out(loaded: LoadedModel, data: str | None) -> tuple[list[int], Path]:
    """Read the ids of a held-out text, and return them with its path.

    data is a text file, a folder (in data/ or elsewhere), or a .bin in one. None means the
    training data's val.bin. Raises UserError if that data has changed since training.
    """
    if data is None and loaded.dataset is None:
        raise UserError(f'{loaded.name} does not say what it was trained on; give a text or a '
                        'folder in data/ with --data, such as --data docs/tour.txt')
    if data is None:
        path = data_folder(loaded.dataset)
    elif Path(data).exists():
        path = Path(data)
    else:
        path = Path('data', data)
    if path.is_dir():
        path = path / 'val.bin'
    if not path.exists():
        raise UserError(f'there is no {path}; choose a text file, a .bin, a folder that prepare.py '
                        'made, or its name in data/')
    if path.suffix != '.bin':
        with user_errors(path, 'choose a text file, a folder or a .bin'):
            ids = loaded.read(path)
            if not ids:
                raise ValueError('it is empty')
            return ids, path
    meta = read_meta(path.parent)
    is_own = path.parent.resolve() == Path('data', str(loaded.dataset)).resolve()
    if is_own and loaded.data_id not in (None, data_id(meta)):
        raise UserError(f'{path.parent} has changed since {loaded.name} was trained on it, so '
                        'val.bin may hold what the model has read; choose a text with --data')
    ids = read_bin(path, meta)
    check_ids(ids, meta, path)
    if meta['tokenizer'] != loaded.tokenizer:
        raise UserError(f'{path} and {loaded.name} have different tokenizers; prepare the data '
                        f'with --like {loaded.name}')
    return ids.tolist(), path


def loss_table(models: list[LoadedModel], data: str | None) -> Table:
    """Make Tables 2 and 8: perplexity in blocks of block_size tokens, with one token of context."""
    rows = []
    paths = []
    all_scores = []
    for loaded in models:
        ids, path = held_out(loaded, data)
        paths.append(str(path))
        n = count_parameters(loaded.model)
        text = loaded.encoding.decode_bytes([i for i in ids if i != loaded.eot])
        scores = score_texts(loaded, [ids], 'loss')
        all_scores.append(scores)
        rows.append([
            str(loaded),
            loaded.config.n_sense or None,
            n['total'] / 1e6,
            n['contextualizer'] / 1e6,
            perplexity(scores.logp, len(ids)),
            bits_per_byte(scores.logp, len(text)),
            len(ids)])
    columns = {
        'model': '',
        'senses': 'd',
        'parameters, M': '.2f',
        'contextual, M': '.2f',
        'perplexity': '.3f',
        'bits per byte': '.4f',
        'on tokens': ','}
    title = f'Loss (Tables 2 and 8) on all of {", ".join(dict.fromkeys(paths))}'
    explained = ('Contextual: parameters outside the sense network. Perplexity: exp of the mean '
                 'loss in nats, in blocks of block_size tokens. Each block follows the token '
                 'before it, and the first follows an end-of-text. Bits per byte: the whole loss '
                 'in bits over the bytes of the text. Use it to compare models with different '
                 'tokenizers.')
    return Table(title, columns, rows, [*edit_notes(models, all_scores), explained])


# -----------------------------------------------------------------------------
# What each sense is worth.


@torch.no_grad()
def measure_senses(loaded: LoadedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Measure the loss without each sense, then with all (k + 1,), and each sense's size (k, 2).

    Losses are in nats per token. Each block is read once. o_l is the part of o that sense l adds,
    so without it, logits are (o - o_l) E^T. Sizes are means over positions: |o_l| over the sum of
    all senses' |o_l|, and alpha_lii, the weight on the token itself.
    """
    model = loaded.model
    k = model.config.n_sense
    nats = torch.zeros(k + 1).double()
    sizes = torch.zeros(k, 2)
    pairs = windows(ids, loaded.eot, model.config.block_size)
    for context, block in progress(pairs, f'senses, {loaded.name}'):
        idx = torch.tensor([context + block[:-1]], device=loaded.device)  # (1, T)
        targets = torch.tensor(block, device=loaded.device)  # (T,)
        with loaded.autocast():
            alpha = model.alpha(idx)[0]  # (k, T, T)
            C = model.senses(idx)[0].transpose(0, 1)  # (k, T, d)
            parts = alpha @ C.to(alpha)  # (k, T, d), o_l
            o = parts.sum(0)  # (T, d), Eq. 2
            for l, part in enumerate([*parts, torch.zeros_like(o)]):
                logits = model.project(o - part)[:, :model.config.n_vocab]  # (T, V), Eq. 9
                nats[l] += F.cross_entropy(logits.float(), targets, reduction='sum').item()
        lengths = parts.norm(dim=-1)  # (k, T)
        share = lengths / lengths.sum(0)
        on_itself = alpha.diagonal(dim1=-2, dim2=-1)  # (k, T)
        sizes += torch.stack([share, on_itself], dim=-1).sum(1).cpu()
    return nats / len(ids), sizes / len(ids)


def senses_table(models: list[LoadedModel], data: str | None) -> Table:
    """Measure the loss of the first model with each sense turned off for every word."""
    loaded = models[0]
    ids, path = held_out(loaded, data)
    nats, sizes = measure_senses(loaded, ids)  # (k + 1,), (k, 2)
    perplexities = nats.exp().tolist()
    costs = (nats - nats[-1]).tolist()
    rows = [['none', perplexities[-1], 0.0, None, None]]
    for l, of_sense in enumerate(sizes):
        rows.append([str(l), perplexities[l], costs[l], *(100 * of_sense).tolist()])
    columns = {
        'sense off': '',
        'perplexity': '.3f',
        'nats per token': '+.4f',
        'share of o %': '.1f',
        'alpha on itself %': '.1f'}
    title = f'What each sense of {loaded.name} is worth, on the {len(ids):,} tokens of {path}'
    notes = [
        'Nats per token: how much the loss grows if this sense is off for every word.',
        "Share of o: the sense's part of the weighted sum, by norm. (Its share of alpha is always "
        f'1/{len(rows) - 1}: the weights of each sense sum to 1.)',
        'Alpha on itself: the weight that a position gives to this sense of its own token.']
    return Table(title, columns, rows, notes)


# -----------------------------------------------------------------------------
# Benchmarks.


def lambada_table(models: list[LoadedModel], data: str | None) -> Table:
    """Score OpenAI's variant of LAMBADA (Table 2): all tokens of the last word of a passage."""
    passages = rows_of(LAMBADA, models[0], data)['text']
    rows = []
    all_scores = []
    for loaded in models:
        pairs = []
        for text in passages:
            context, _, word = text.strip().rpartition(' ')
            context_ids = loaded.encode(context) or [loaded.eot]
            pairs.append((context_ids, loaded.encode(f' {word}')))
        scores = score(loaded, pairs, 'LAMBADA')
        all_scores.append(scores)
        accuracy = 100 * scores.greedy.double().mean().item()
        rows.append([str(loaded), perplexity(scores.logp, len(passages)), accuracy])
    title = f'LAMBADA (Table 2): the last word of {len(passages):,} passages'
    columns = {'model': '', 'perplexity': '.1f', 'accuracy %': '.1f'}
    explained = ('Perplexity is of the last word, given the passage. Accuracy is how often all its '
                 'tokens are the likeliest.')
    return Table(title, columns, rows, [*edit_notes(models, all_scores), explained])


# Pattern -> replacement, in this order, from EleutherAI's harness (version 1). The harness has one
# more rule, which never applies.
DETOKENIZE = {
    "s '": "s'",
    ' @([-,.])@ ': r'\1',
    ' : ': ': ',
    ' ; ': '; ',
    r' \. ': '. ',
    ' ! ': '! ',
    r' \? ': '? ',
    ' , ': ', ',
    r'\(\s*([^)]*?)\s*\)': r'(\1)',
    r'\[\s*([^\]]*?)\s*\]': r'[\1]',
    r'{\s*([^}]*?)\s*}': r'{\1}',
    r'"\s*([^"]*?)\s*"': r'"\1"',
    r"'\s*([^']*?)\s*'": r"'\1'",
    '= = = =': '====',
    '= = =': '===',
    '= =': '==',
    ' ° ': '°',
    ' \n': '\n',
    '\n ': '\n',
    ' N ': ' 1 ',
    " 's": "'s",
}


def detokenized(page: str) -> str:
    """Undo the tokenization of a page of WikiText."""
    for pattern, replacement in DETOKENIZE.items():
        page = re.sub(pattern, replacement, page)
    return page


def wikitext_table(models: list[LoadedModel], data: str | None) -> Table:
    """Score WikiText (Table 2) as EleutherAI's harness does.

    The model reads detokenized pages; words and bytes are counted in the original ones.
    """
    pages = rows_of(WIKITEXT, models[0], data)['page']
    n_words = sum(len(re.split(r'\s+', page)) for page in pages)
    n_bytes = sum(len(page.encode()) for page in pages)
    rows = []
    all_scores = []
    for loaded in models:
        texts = [loaded.encode(detokenized(page)) for page in pages]
        scores = score_texts(loaded, texts, 'WikiText', look_back=True)
        all_scores.append(scores)
        logp = scores.logp
        n_tokens = sum(map(len, texts))
        rows.append([
            str(loaded),
            perplexity(logp, n_words),
            perplexity(logp, n_tokens),
            bits_per_byte(logp, n_bytes)])
    title = f'WikiText (Table 2): {len(pages)} pages, {n_words:,} words, {n_bytes:,} bytes'
    columns = {
        'model': '',
        'perplexity per word': '.1f',
        'per token': '.1f',
        'bits per byte': '.4f'}
    notes = ['Per word and bits per byte: comparable between tokenizers (they count words and '
             'bytes of the original pages).', 'Per token: comparable only within one tokenizer.']
    return Table(title, columns, rows, [*edit_notes(models, all_scores), *notes])


def blimp_table(models: list[LoadedModel], data: str | None) -> Table:
    """Score BLiMP (Table 2): how often the good sentence is likelier than the bad one.

    Each sentence is read after an end-of-text.
    """
    items = rows_of(BLIMP, models[0], data)
    for loaded in models:
        sentences = [*items['sentence_good'], *items['sentence_bad']]
        pairs = [([loaded.eot], loaded.encode(sentence)) for sentence in sentences]
        loaded.needs_length(max(len(ids) for _, ids in pairs), 'a sentence has')
        good, bad = score(loaded, pairs, 'BLiMP').logp.chunk(2)
        items[str(loaded)] = 100.0 * (good > bad).numpy()
    paradigms = items.groupby(['linguistics_term', 'UID']).mean(numeric_only=True)
    phenomena = paradigms.groupby('linguistics_term')
    means = phenomena.mean()
    means.index = [f'{name} ({n})' for name, n in phenomena.size().items()]
    means.loc[f'mean of all ({len(paradigms)})'] = paradigms.mean()
    title = (f'BLiMP (Table 2): % of {len(items):,} pairs whose good sentence is likelier, '
             'means over (n) paradigms')
    columns = {'phenomenon': ''} | dict.fromkeys(means, '.1f')
    return Table(title, columns, means.reset_index().to_numpy().tolist())
