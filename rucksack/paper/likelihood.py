"""How likely texts are, token by token, and what an edit changes in that."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.cli import progress
from rucksack.loaded import LoadedModel
from rucksack.senses import pad

LOGITS_AT_ONCE = 1 << 26  # per batch: 256 MiB of float32
TOKENS_AT_ONCE = 1 << 14

Pair = tuple[list[int], list[int]]  # ids of a context, and of its continuation; neither is empty


@dataclass
class Scores:
    """How likely n continuations are after their contexts, at each position of n texts (n, T).

    Where nothing is scored, targets and likeliest are -1, and the rest is 0.
    """

    targets: Tensor    # the next ids
    nats: Tensor       # their losses, -ln p
    likeliest: Tensor  # the likeliest next ids
    touched: Tensor    # whether an edit changed the senses of the last token read

    @property
    def logp(self) -> Tensor:
        """Sum the log-probability of each continuation, in nats: (n,)."""
        return -self.nats.cpu().sum(1, dtype=torch.double)

    @property
    def n_tokens(self) -> int:
        """Count the tokens of all continuations."""
        return (self.targets != -1).sum().item()

    def perplexity(self, n: int | None = None) -> float:
        """Compute exp of the nats of all continuations, divided by n, by default their tokens.

        With n words or bytes, it does not depend on the tokenizer. Infinity if it is too large.
        """
        if n is None:
            n = self.n_tokens
        return (-self.logp.sum() / n).exp().item()


@torch.no_grad()
def score(loaded: LoadedModel, pairs: list[Pair], what: str) -> Scores:
    """Score continuations; only the end of a pair longer than block_size is read."""
    c = loaded.config
    texts = []
    targets = []
    for context, continuation in pairs:
        ids = (context + continuation)[-c.block_size - 1:]
        n = max(1, len(ids) - len(continuation))  # these are only read
        texts.append(ids[:-1])
        not_scored = [-1] * (n - 1)
        targets.append(torch.tensor(not_scored + ids[n:]))
    idx, last = pad(texts)  # (n, T), (n,)
    idx = idx.to(loaded.device)
    last = last.to(loaded.device)
    targets = pad_sequence(targets, batch_first=True, padding_value=-1)  # (n, T)
    targets = targets.to(loaded.device)
    nothing = torch.zeros(idx.shape, device=loaded.device)
    scores = Scores(
        targets,
        nats=nothing,
        likeliest=targets.clone(),
        touched=nothing.bool())
    tokens = min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // c.vocab_size)
    size = max(1, tokens // idx.shape[1])
    longest_first = last.argsort(descending=True, stable=True)  # so batches need little padding
    for batch in progress(longest_first.split(size), f'{what}, {loaded.name}'):
        T = last[batch].max() + 1
        is_scored = targets[batch] != -1
        row, position = is_scored.nonzero(as_tuple=True)  # (m,) each
        with loaded.autocast():
            logits, touched = predict(loaded, idx[batch, :T])
        logits = logits[row, position, :c.n_vocab].float()  # (m, V)
        places = (batch[row], position)
        next_ids = targets[places]  # (m,)
        scores.nats[places] = F.cross_entropy(logits, next_ids, reduction='none')
        scores.likeliest[places] = logits.argmax(-1)
        scores.touched[places] = touched[row, position]
    return scores


def predict(loaded: LoadedModel, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the logits after each token of texts idx (n, T), under the model's edit.

    Returns logits (n, T, V or more), and whether the edit changed the senses of a token (n, T).
    """
    model = loaded.model
    touched = torch.zeros_like(idx).bool()
    if not model.config.n_sense:
        return model(idx), touched
    ids, places = idx.unique(return_inverse=True)
    C = model.senses(ids)[places]  # (n, T, k, d); the senses of each distinct id are computed once
    if loaded.edit:
        unedited = C
        C = loaded.edit(idx, unedited)
        touched = (C != unedited).flatten(2).any(-1)
    return model(idx, C=C), touched


def windows(ids: list[int], before: int, block_size: int, look_back: bool = False) -> list[Pair]:
    """Split a text, which follows the token `before`, into pairs that score each token once.

    A continuation has block_size tokens; the last may have fewer. Its context is the token before
    it or, with look_back, the block_size tokens before it, of which score reads as many as fit.
    """
    ids = [before, *ids]
    n_context = block_size if look_back else 1
    pairs = []
    for start in range(1, len(ids), block_size):
        context = ids[max(0, start - n_context):start]
        pairs.append((context, ids[start:start + block_size]))
    return pairs


# -----------------------------------------------------------------------------
# What an edit changes.


def measure_edit(before: Scores, after: Scores) -> dict[str, float]:
    """Measure the price of an edit in nats per token, and where likeliest next ids changed.

    A position that turns from wrong to right is repaired; one from right to wrong is broken.
    """
    n = before.n_tokens
    loss = -before.logp.sum() / n
    price = (before.logp - after.logp).sum() / n
    changed = before.likeliest != after.likeliest  # (n, T)
    repaired = changed & (after.likeliest == after.targets)
    broken = changed & (before.likeliest == before.targets)
    return {
        'tokens': n,
        'moved': after.touched.sum().item(),
        'loss': loss.item(),
        'price': price.item(),
        '%': 100 * (price / loss).item(),
        'changed': changed.sum().item(),
        'repaired': repaired.sum().item(),
        'broken': broken.sum().item()}


def score_and_price(loaded: LoadedModel, pairs: list[Pair], what: str) -> Scores:
    """Score continuations; under an edit, also print what it costs, and what it repairs."""
    scores = score(loaded, pairs, what)
    if loaded.edit:
        unedited = replace(loaded, edit=None)
        before = score(unedited, pairs, what)
        found = measure_edit(before, scores)
        print(f'{loaded.name}: {found["price"]:+.5f} nats per token; touched {found["moved"]:,} '
              f'of {found["tokens"]:,} tokens. The likeliest next word changed at '
              f'{found["changed"]:,} positions: {found["repaired"]:,} repaired, '
              f'{found["broken"]:,} broken.')
    return scores
