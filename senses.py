"""What a Backpack is for: look at the senses of a word, explain a prediction, change what a sense does.

    code              paper                    what it gives
    separation        section 6.2, Table 13    how strongly each sense speaks for one word over another
    affinities        Eq. 17                   how strongly each sense speaks for a bag of words
    similarity        Eq. 13; min: Eq. 14      how alike two words are in each sense
    explain           Eq. 2 and 9              the terms whose sum is the logit of the next token
    sense_gauge       Eq. 12                   whether the weights of a sense depend on the text at all
    scale_senses      section 6.2, Figure 3    an edit: senses of words turned down, off or up
    topic             Eq. 15 and 18-20         an edit: senses that speak for a topic turned up
    replace_word      section 6.3              an edit: what a word says of one word, it says of another

Look: C . E_v is what a sense C adds to the logit of the id v, in whatever text, times a weight alpha >= 0.
Edit: a function of ids (B, S) and their senses C (B, S, k, d) that returns the senses to sum in their place.
model(idx, C=edited(model, idx, edit)) and model.generate(idx, n, edit=edit) apply it. No weight of the model
changes, and an edit that asks for no change (factor 1, strength 0) changes no bit of the prediction.

Words are given by their ids, which rucksack.grammar.word_id finds, in edits also by the ids of their pieces.
V counts ids, without padding rows; B, T, S, k and d are as in model.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Backpack, Edit
from rucksack.common import bfloat16_unit, progress

# -----------------------------------------------------------------------------
# Look and explain.

IDS_AT_ONCE, LOGITS_AT_ONCE = 256, 2048  # in work on the whole vocabulary: what stays in a CPU's caches


@torch.no_grad()
def over_vocabulary(model: Backpack, score: Callable[[Tensor], Tensor], what: str) -> Tensor:
    """A score of each sense of each id: (V, k, ..), from a function of senses (m, k, d) -> (m, k, ..)."""
    ids = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (V,)
    return torch.cat([score(model.senses(m)) for m in progress(ids.split(IDS_AT_ONCE), what)])


@torch.no_grad()
def extremes(model: Backpack, C: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n ids whose logits each sense C (.., d) raises most, then the n it lowers most, strongest first:
    (.., 2n) ids and (.., 2n) what it adds to their logits at weight 1.
    """
    logits = model.project(C)[..., :model.config.n_vocab]  # (.., V)
    high, low = logits.topk(n), logits.topk(n, largest=False)  # (.., n)
    return torch.cat([high.indices, low.indices], -1), torch.cat([high.values, low.values], -1)


@torch.no_grad()
def separation(model: Backpack, w: int | None, a: int, b: int) -> Tensor:
    """How strongly each sense of the id w speaks for a over b, C(w)_l . (E_a - E_b), in logits: (k,), or
    (V, k) for every id with w = None.
    """
    direction = model.wte.weight[a] - model.wte.weight[b]  # (d,)
    if w is None:
        return over_vocabulary(model, lambda C: C @ direction, 'separating')
    return model.senses(torch.tensor(w, device=direction.device)) @ direction


def affinities(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Eq. 17 for n bags of ids, sum over w in the bag of C . E_w / max over all v of C . E_v, of every sense:
    (n, V, k). The divisor is the largest logit, as in the published code; footnote 5 says the absolute one.
    """
    E = model.wte.weight[:model.config.n_vocab].detach()  # (V, d)
    sums = torch.stack([E[bag].sum(0) for bag in bags])  # (n, d)
    half = len(E) > 1 << 14 and bool(bfloat16_unit(str(E.device)))  # V * k * V logits are much work then
    tiles = (E.bfloat16() if half else E).split(LOGITS_AT_ONCE)

    def score(C: Tensor) -> Tensor:  # (m, k, d) -> (m, k, n)
        top = torch.stack([(C @ tile.T).amax(-1) for tile in tiles]).amax(0)  # (m, k)
        with torch.autocast(E.device.type, enabled=False):
            return C.to(E.dtype) @ sums.T / top.clamp(min=1e-6)[..., None]  # bounded if no score is positive
    with torch.autocast(E.device.type, torch.bfloat16, enabled=half):
        return over_vocabulary(model, score, 'scoring senses').movedim(-1, 0)  # (V, k, n) -> (n, V, k)


@torch.no_grad()
def similarity(model: Backpack, w: int) -> Tensor:
    """Eq. 13, Sim_l(w, v) = cossim(C(w)_l, C(v)_l), for every id v: (V, k). Its minimum over l is Eq. 14."""
    own = model.senses(torch.tensor(w, device=model.wte.weight.device))  # (k, d)
    return over_vocabulary(model, lambda C: F.cosine_similarity(C, own, dim=-1), 'comparing')


@torch.no_grad()
def explain(model: Backpack, idx: Tensor | list[list[int]], v: Tensor, C: Tensor | None = None
            ) -> tuple[Tensor, Tensor]:
    """What the prediction after the texts idx (B, T) is made of: the weights alpha (B, T, k) that the last
    position gives to all senses of all tokens, and the scores C . v (B, T, k) of these for a vector v (d,).
    Texts of different lengths are a list; T is the longest, and alpha is 0 after the end of a shorter one.

    For v = E_w, the sum of alpha * (C . v) is the logit of w as the next token (Eq. 2 and 9); for
    v = E_a - E_b it is the log odds of a to b. C (B, T, k, d) are the senses to sum, by default senses(idx).
    """
    n, last = torch.arange(len(idx)), torch.tensor([len(ids) - 1 for ids in idx])  # (B,) each
    if isinstance(idx, list):  # padded behind their ends, where nothing looks
        idx = torch.nn.utils.rnn.pad_sequence([v.new_tensor(ids, dtype=torch.long) for ids in idx], True)
    alpha = model.alpha(idx)[n, :, last].transpose(1, 2)  # (B, k, T, T) -> (B, k, T) -> (B, T, k)
    return alpha, (model.senses(idx) if C is None else C) @ v


@torch.no_grad()
def sense_gauge(model: Backpack, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Do the weights of each sense (Eq. 12) depend on the text? Measured on the texts idx (B, T).

    on_current (k,): the weight that a sense gives to the current token. Near 1 it never looks back.
    moved (k,): how far its weights move when the tokens of a text are shuffled, in total variation: 0 is not
    at all, 1 is to wholly other positions. Near 0 it follows position alone.
    Both are means over texts and positions, without the first 32 of a text, which have little to choose from.
    """
    T = idx.shape[1]
    first = min(32, T // 2)
    shuffled = torch.randperm(T, generator=torch.Generator().manual_seed(0)).to(idx.device)
    on_current, moved = [], []
    for text in idx.split(1):  # one at a time, as alpha is large
        alpha = model.alpha(text)[0, :, first:].float()  # (k, T - first, T)
        other = model.alpha(text[:, shuffled])[0, :, first:].float()  # (k, T - first, T)
        on_current.append(alpha.diagonal(first, -2, -1).mean(-1))  # (k,)
        moved.append((alpha - other).abs().sum(-1).mean(-1) / 2)  # (k,)
    return torch.stack(on_current).mean(0), torch.stack(moved).mean(0)


# -----------------------------------------------------------------------------
# Edit.

Words = list[int | tuple[int, ...]] | None  # ids, or pieces, edited in the last where all stand; None: any


def load_edit(path: str, model: Backpack) -> Edit:
    """The edit in a file of sample.py --save-edit; UserError where it is damaged or for another model."""
    from rucksack import data, grammar  # for convenience: senses.py does not need them
    return grammar.make_edit(grammar.read_edit(path, model), model, data.load_tokenizer(model.tokenizer))[0]


def edited(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """The senses to sum for the texts idx (B, T) under an edit, or as they are: (B, T, k, d)."""
    C = model.senses(idx)
    return C if edit is None else edit(idx, C)


def compose(edits: list[Edit]) -> Edit:
    """The edits one after another."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:  # (B, S, k, d), as each edit leaves them
        for one in edits:
            C = one(idx, C)
        return C
    return edit


def occurrences(idx: Tensor, words: Words) -> Tensor:
    """Where in idx (B, S) one of the words ends, shaped to select senses: (B, S, 1, 1)."""
    if words is None:
        return torch.ones_like(idx, dtype=torch.bool)[..., None, None]
    ids = [word for word in words if isinstance(word, int)]
    here = torch.isin(idx, torch.tensor(ids, dtype=idx.dtype, device=idx.device))  # (B, S)
    for word in (word for word in words if not isinstance(word, int)):
        ends = [F.pad(idx == piece, (back, 0))[:, :idx.shape[1]] for back, piece in enumerate(reversed(word))]
        here |= torch.stack(ends).all(0)  # pieces of (pieces, B, S), each moved to where the last one stands
    return here[..., None, None]


def scale_senses(words: Words, senses: list[int], factor: float) -> Edit:
    """The edit that multiplies the given senses of the given words; factor 0 is off."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        chosen = torch.zeros(C.shape[2], 1, dtype=torch.bool, device=idx.device)
        chosen[senses] = True  # (k, 1)
        return torch.where(occurrences(idx, words) & chosen, factor * C, C)  # (B, S, k, d)
    return edit


def replace_word(model: Backpack, words: Words, old: int, new: int) -> Edit:
    """Section 6.3, knowledge editing: what the senses of words say of old, they say of new, as in
    "MacBook: Apple -> HP".

    With r = E_old and a = E_new, C' = C + (C . r) (a / |a|^2 - r / |r|^2): the part of C along r goes, and as
    much is put along a. C' gives old less by C.r (1 - a.r / |a|^2), new more by C.r (1 - a.r / |r|^2), and
    the same to an id whose embedding is orthogonal to both. The paper divides by the squared norm of a sense
    of old, where the published code, and this, has |r|^2.
    """
    r, a = model.wte.weight[old].detach(), model.wte.weight[new].detach()  # (d,)
    move = a / a.square().sum() - r / r.square().sum()  # (d,)

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        moved = C + (C @ r.to(C))[..., None] * move.to(C)  # (B, S, k, 1) * (d,)
        return torch.where(occurrences(idx, words), moved, C)
    return edit


# Table 11: what the senses above the quantiles 0.95, 0.80, 0.60 and below are multiplied by, by strength.
STRENGTHS = [(1, 1, 1, 1), (1.5, 1.5, 1.3, 1), (2.2, 2.2, 1.5, 1), (3.3, 3.3, 3, 1)]
TOPICS = {label: label.removeprefix('other_').split('_') for label in (  # Table 10: label -> bag of words
    'arts_culture', 'business_entrepreneurs', 'celebrity_pop_culture', 'diaries_daily_life', 'family',
    'fashion_style', 'film_tv_video', 'fitness_health', 'food_dining', 'gaming', 'music',
    'news_social_concern', 'other_hobbies', 'relationships', 'sports', 'travel_adventure',
    'youth_student_life')}


def topic(model: Backpack, scores: Tensor, weights: tuple[float, ...]) -> Edit:
    """Eq. 15, topic control: a sense with a high score is multiplied by delta, annealed: the boost fades once
    the topic has been expressed.

    scores (V, k) are affinities(model, [bag])[0], computed once for all texts and strengths; weights are a
    row of STRENGTHS. A score equal to a quantile counts as above it. As in the published code, for sense l of
    position j:

        a = sum_i relu(E_{x_i} . C(x_j)_l)      how much of what the sense speaks for was said     Eq. 18
        b = sigmoid(6 - f a) (1 + j / 100)      f = max(weights) / 7.5; later tokens count more    Eq. 19
        delta' = 1 + b (delta - 1)              so that delta = 1 changes nothing                  Eq. 20

    The paper has f = 7.5 / max(weights), (1 + j) / 100 and b delta + (1 - a). As i runs over all of idx, only
    the last position, which generate draws from, sees nothing of its future.
    """
    E, f, scores = model.wte.weight.detach(), max(weights) / 7.5, scores.float()
    edges = scores.flatten().quantile(scores.new_tensor([0.60, 0.80, 0.95]))  # (3,)
    reached = (scores[..., None] >= edges).sum(-1)  # (V, k): how many quantiles, 0 to 3
    delta = scores.new_tensor(weights[::-1])[reached]  # (V, k)

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        a = torch.einsum('bjld,bid->bjli', C, E[idx].to(C)).relu().sum(-1)  # (B, S, k)
        near = 1 + torch.arange(idx.shape[1], device=idx.device) / 100  # (S,)
        b = torch.sigmoid(6 - f * a) * near[:, None]  # (B, S, k)
        return C * (1 + b * (delta[idx] - 1)).to(C)[..., None]
    return edit
