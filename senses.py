"""Look at the senses of a word, explain a prediction sense by sense, and edit senses.

    code              paper                    what it gives
    separation        section 6.2, Table 13    how far each sense favours one word over another
    affinities        Eq. 17                   how strongly each sense favours a bag of words
    similarity        Eq. 13; min: Eq. 14      how alike two words are in each sense
    explain           Eq. 2 and 9              weights and scores; their products sum to a logit
    sense_gauge       Eq. 12                   whether a sense's weights depend on the text at all
    scale_senses      section 6.2, Figure 3    edit: turn senses of words down, off or up
    topic             Eq. 15 and 18-20         edit: turn up the senses that favour a topic
    replace_word      section 6.3              edit: give NEW what a word gave OLD

Looking: a sense C adds alpha (C . E_v) to the logit of the id v. Only the weight alpha >= 0
depends on the text.
Editing: an edit takes ids (B, S) and their senses C (B, S, k, d) and returns the senses to sum
instead. Apply it with model(idx, C=edited(model, idx, edit)) or model.generate(idx, n, edit=edit).
No parameter of the model changes. An edit that asks for no change (factor 1, strength 0) leaves the
prediction bit-identical.

Pass words as token ids (see rucksack.phrases.word_id). Edits also take a tuple of ids for a word
of several tokens; they then apply at the last of these tokens. V is n_vocab here: it leaves out
unused rows of the embedding matrix. B, T, S, k and d are as in model.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Backpack, Edit
from rucksack.common import bfloat16_unit, progress

# -----------------------------------------------------------------------------
# Look and explain.

IDS_AT_ONCE = 256  # batch size for the whole vocabulary; a batch fits a CPU's caches
LOGITS_AT_ONCE = 2048


@torch.no_grad()
def over_vocabulary(model: Backpack, score: Callable[[Tensor], Tensor], what: str) -> Tensor:
    """Score each sense of each id with a function (m, k, d) -> (m, k, ..); returns (V, k, ..)."""
    E = model.wte.weight
    ids = torch.arange(model.config.n_vocab, device=E.device)  # (V,)
    scores = []
    for batch in progress(ids.split(IDS_AT_ONCE), what):
        C = model.senses(batch)  # (m, k, d)
        scores.append(score(C))
    return torch.cat(scores)


@torch.no_grad()
def extremes(model: Backpack, C: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Find the n ids whose logits each sense C (.., d) raises most, then the n it lowers most.

    Returns ids (.., 2n), strongest first, and what C adds to their logits at weight 1, (.., 2n).
    """
    V = model.config.n_vocab
    logits = model.project(C)[..., :V]  # (.., V)
    high = logits.topk(n)  # (.., n)
    low = logits.topk(n, largest=False)  # (.., n)
    ids = torch.cat([high.indices, low.indices], dim=-1)
    added = torch.cat([high.values, low.values], dim=-1)
    return ids, added


@torch.no_grad()
def separation(model: Backpack, w: int | None, a: int, b: int) -> Tensor:
    """Measure how far each sense of the id w favours a over b: C(w)_l . (E_a - E_b), in logits.

    Returns (k,), or with w = None (V, k) for all ids.
    """
    E = model.wte.weight
    direction = E[a] - E[b]  # (d,)
    if w is None:
        return over_vocabulary(model, lambda C: C @ direction, 'separating')
    C = senses_of(model, w)  # (k, d)
    return C @ direction


def senses_of(model: Backpack, w: int) -> Tensor:
    """Compute the senses of the id w: (k, d)."""
    return model.senses(torch.tensor(w, device=model.wte.weight.device))


def affinities(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Measure how strongly each sense favours each of n bags of ids, Eq. 17: (n, V, k).

    Unoptimised version, for one sense C and one bag:
    logits = E @ C; logits[bag].sum() / logits.max(). The divisor is the largest logit, as in the
    published code; footnote 5 says the largest absolute value.
    """
    V = model.config.n_vocab
    E = model.wte.weight[:V].detach()  # (V, d)
    bag_sums = torch.stack([E[bag].sum(0) for bag in bags])  # (n, d)
    # Each of V * k senses needs a maximum over V logits; for a large vocabulary we use bfloat16.
    is_large = len(E) > 1 << 14
    is_float32 = E.dtype == torch.float32
    in_bfloat16 = is_large and is_float32 and bool(bfloat16_unit(str(E.device)))
    rows = E.bfloat16() if in_bfloat16 else E
    tiles = rows.split(LOGITS_AT_ONCE)

    def score(C: Tensor) -> Tensor:  # (m, k, d) -> (m, k, n)
        maxima = [(C @ tile.T).amax(-1) for tile in tiles]  # (m, k) each
        largest = torch.stack(maxima).amax(0)  # (m, k)
        largest = largest.clamp(min=1e-6)  # bounds the score if no logit is positive
        with torch.autocast(E.device.type, enabled=False):
            sums = C.to(E.dtype) @ bag_sums.T  # (m, k, n)
            return sums / largest[..., None]

    with torch.autocast(E.device.type, torch.bfloat16, enabled=in_bfloat16):
        scores = over_vocabulary(model, score, 'scoring senses')  # (V, k, n)
    return scores.movedim(-1, 0)


@torch.no_grad()
def similarity(model: Backpack, w: int) -> Tensor:
    """Compute Eq. 13, Sim_l(w, v) = cossim(C(w)_l, C(v)_l), for every id v: (V, k).

    Its minimum over l is Eq. 14.
    """
    own = senses_of(model, w)  # (k, d)
    return over_vocabulary(model, lambda C: F.cosine_similarity(C, own, dim=-1), 'comparing')


@torch.no_grad()
def predict(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Predict the token after the text idx (1, T), with an edit or without: probabilities (V,)."""
    C = None
    if model.config.n_sense or edit:
        C = edited(model, idx, edit)  # (1, T, k, d)
    V = model.config.n_vocab
    logits = model(idx, C=C)[0, -1, :V]
    return logits.softmax(-1)


@torch.no_grad()
def explain(model: Backpack, idx: Tensor, direction: Tensor, C: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
    """Split the prediction after the texts idx (B, T) into terms, along a direction v (d,).

    Returns the weights alpha (B, T, k) that the last position gives to all senses of all tokens,
    and the scores C . v (B, T, k) of these senses. For v = E_w, the sum of alpha * (C . v) is the
    logit of w as the next token (Eq. 2 and 9); for v = E_a - E_b it is the log odds of a to b.
    C (B, T, k, d) are the senses to sum, edited or not; the default is senses(idx).
    """
    if C is None:
        C = model.senses(idx)
    alpha = model.alpha(idx)[:, :, -1]  # (B, k, T)
    scores = C @ direction  # (B, T, k)
    return alpha.transpose(1, 2), scores


@torch.no_grad()
def sense_gauge(model: Backpack, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Measure on the texts idx (B, T) how far each sense's weights (Eq. 12) depend on the text.

    on_current (k,): the weight of the current token. Near 1, the sense never looks back.
    moved (k,): total variation distance by which the weights move when the tokens of a text are
    shuffled: 0 is unchanged, 1 is no overlap. Near 0, the weights depend only on position.
    Both are means over texts and positions. They leave out the first 32 positions of a text (half
    of a text shorter than 64), which have few tokens to choose from.
    """
    T = idx.shape[1]
    first = min(32, T // 2)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(T, generator=generator)  # (T,); a CPU index also indexes a GPU tensor
    measured = []
    for text in idx.split(1):  # one at a time, as alpha is large
        alpha = model.alpha(text)[0, :, first:]  # (k, T - first, T)
        other = model.alpha(text[:, shuffled])[0, :, first:]
        current = alpha.float().diagonal(first, -2, -1)  # (k, T - first)
        difference = alpha.float() - other.float()
        distance = difference.abs().sum(-1) / 2  # (k, T - first), total variation
        both = torch.stack([current, distance])  # (2, k, T - first)
        measured.append(both.mean(-1))  # (2, k)
    on_current, moved = torch.stack(measured).mean(0)  # (k,) each
    return on_current, moved


# -----------------------------------------------------------------------------
# Edit.

# The words of an edit: ids, and tuples of ids for words of several tokens; None is every id.
Words = list[int | tuple[int, ...]] | None


def edited(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Return the senses to sum for idx (B, T), with an edit or without: (B, T, k, d)."""
    C = model.senses(idx)
    if edit is not None:
        C = edit(idx, C)
    return C


def touched(before: Tensor, after: Tensor) -> Tensor:
    """Find the tokens whose senses an edit changed: (B, T, k, d) twice -> (B, T)."""
    return (before != after).flatten(2).any(-1)


def compose(edits: list[Edit]) -> Edit:
    """Apply the edits from left to right."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:  # C is (B, S, k, d) throughout
        for one in edits:
            C = one(idx, C)
        return C
    return edit


def occurrences(idx: Tensor, words: Words) -> Tensor:
    """Find where in idx (B, S) one of the words ends, shaped to select senses: (B, S, 1, 1)."""
    ends = torch.full_like(idx, words is None, dtype=torch.bool)  # (B, S)
    for word in words or []:
        pieces = (word,) if isinstance(word, int) else word
        ends |= ends_of(idx, pieces)
    return ends[..., None, None]


def ends_of(idx: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """Find where in idx (B, S) a sequence of ids ends: (B, S)."""
    S = idx.shape[1]
    ends = torch.ones_like(idx, dtype=torch.bool)
    for back, piece in enumerate(reversed(pieces)):
        is_piece = idx == piece
        ends &= F.pad(is_piece, (back, 0))[:, :S]  # shifted to the position of the last id
    return ends


def scale_senses(words: Words, senses: list[int], factor: float) -> Edit:
    """Make an edit that multiplies the given senses of the given words by factor (0: off)."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        k = C.shape[2]
        is_chosen = torch.zeros(k, 1, dtype=torch.bool, device=idx.device)
        is_chosen[senses] = True
        is_scaled = occurrences(idx, words) & is_chosen  # (B, S, k, 1)
        return torch.where(is_scaled, factor * C, C)  # (B, S, k, d)
    return edit


def replace_word(model: Backpack, words: Words, old: int, new: int) -> Edit:
    """Make an edit that gives the id new what words gave the id old, section 6.3.

    With r = E_old and a = E_new, C' = C + (C . r) (a / |a|^2 - r / |r|^2). This removes the part
    of C along r and adds a multiple of a that raises new as much as C raised old. In all, old
    loses C.r (1 - a.r / |a|^2) and new gains C.r (1 - a.r / |r|^2), in logits at weight 1. Ids
    whose embedding is orthogonal to both are unaffected. The paper divides by the squared norm of
    a sense of old; the published code divides by |r|^2, and so do we.
    """
    E = model.wte.weight.detach()
    r = E[old]  # (d,)
    a = E[new]  # (d,)
    a_part = a / a.square().sum()  # (d,)
    r_part = r / r.square().sum()
    move = a_part - r_part

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        along_r = C @ r.to(C)  # (B, S, k)
        moved = C + along_r[..., None] * move.to(C)  # (B, S, k, d)
        return torch.where(occurrences(idx, words), moved, C)
    return edit


# Table 11, strengths 0 to 3: factors for the top 5% of scores, next 15%, next 20%, and the rest.
STRENGTHS = [
    (1, 1, 1, 1),
    (1.5, 1.5, 1.3, 1),
    (2.2, 2.2, 1.5, 1),
    (3.3, 3.3, 3, 1)]


def topic(model: Backpack, scores: Tensor, weights: tuple[float, ...]) -> Edit:
    """Turn up the senses that favour a topic, Eq. 15, until the text has expressed the topic.

    scores (V, k) are affinities(model, [bag])[0], computed once for all texts and strengths;
    weights are a row of STRENGTHS, and delta is the one for a sense's score (a score equal to a
    quantile counts as above it). The edit multiplies the sense by delta', an annealed delta. As in
    the published code, for sense l of position j:

        a = sum_i relu(E_{x_i} . C(x_j)_l)     Eq. 18: how far the text expresses this sense
        b = sigmoid(6 - f a) (1 + j / 100)     Eq. 19: f = max(weights) / 7.5; grows with j
        delta' = 1 + b (delta - 1)             Eq. 20: delta = 1 changes nothing

    In the paper, f is 7.5 / max(weights), Eq. 19's second factor is (1 + j) / 100, and delta' is
    b delta + (1 - a). Since i runs over all of idx, every position but the last sees later tokens;
    generate uses only the last.
    """
    E = model.wte.weight.detach()
    f = max(weights) / 7.5
    scores = scores.float()
    quantiles = scores.new_tensor([0.60, 0.80, 0.95])
    edges = scores.flatten().quantile(quantiles)  # (3,)
    reached = (scores[..., None] >= edges).sum(-1)  # (V, k), quantiles reached: 0 to 3
    ascending = scores.new_tensor(weights[::-1])
    delta = ascending[reached]  # (V, k)

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        said = torch.einsum('bjld,bid->bjli', C, E[idx].to(C))  # (B, S, k, S)
        a = said.relu().sum(-1)  # (B, S, k)
        j = torch.arange(idx.shape[1], device=idx.device)  # (S,)
        growth = 1 + j / 100
        b = torch.sigmoid(6 - f * a) * growth[:, None]  # (B, S, k)
        annealed = 1 + b * (delta[idx] - 1)  # (B, S, k)
        return C * annealed.to(C)[..., None]
    return edit
