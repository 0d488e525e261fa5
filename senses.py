"""What a Backpack is for: look at the senses of a word, explain a prediction, change what a sense does.

    code              paper                    what it gives
    separation        section 6.2, Table 13    how strongly each sense speaks for a word over another
    affinity          Eq. 17                   how strongly each sense speaks for a bag of words
    similarity        Eq. 13; min: Eq. 14      how alike two words are in each sense
    explain           Eq. 2 and 9              the terms that a score of the next word is the sum of
    Dials             Eq. 2 and 9, Figure 3    a prediction for any weights on the senses of a text
    scale_senses      section 6.2, Figure 3    an edit: senses of words turned down, off or up
    topic             Eq. 15 and 18-20         an edit: senses that speak for a topic turned up
    replace_word      section 6.3              an edit: what a word says of one word, it says of another

Look: C . E_v is what a sense C adds to the score of word v, in whatever text, times a weight alpha >= 0.
Edit: a function of ids (B, T) and their senses (B, T, k, d) that returns the senses to sum in their place;
model(idx, edit=...) and model.generate(idx, ..., edit=...) apply it. No weight of the model changes, and an
edit that asks for no change (factor 1, strength 0) leaves every bit of the prediction as it was.

V is the number of words here, without padding rows; B, T, k and d are as in model.py. A word is given by its
id, which word_id finds.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Backpack, Edit
from rucksack.common import progress

# -----------------------------------------------------------------------------
# Look.

LOGITS_AT_ONCE = 1 << 26  # bounds the memory of work on the whole vocabulary: 256 MiB of float32


@torch.no_grad()
def senses_of(model: Backpack, words: Tensor, what: str) -> Iterator[Tensor]:
    """The senses of words (n,), as many at a time as their scores fit LOGITS_AT_ONCE: (m, k, d) each."""
    c = model.config
    for chunk in progress(words.split(max(1, LOGITS_AT_ONCE // (c.n_sense * c.vocab_size))), what):
        yield model.senses(chunk)


@torch.no_grad()
def over_vocabulary(model: Backpack, score: Callable[[Tensor], Tensor], what: str) -> Tensor:
    """A score of each sense of each word: (V, k, ..), from a function of senses (n, k, d) -> (n, k, ..)."""
    words = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (V,)
    return torch.cat([score(C) for C in senses_of(model, words, what)])


@torch.no_grad()
def extremes(model: Backpack, C: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n words that each sense (.., d) raises most, then the n it lowers most, strongest first: their ids
    (.., 2n) and what it adds to their scores at weight 1, in logits (.., 2n).
    """
    scores = model.project(C)[..., :model.config.n_vocab]  # (.., V)
    ends = [scores.topk(min(n, scores.shape[-1]), largest=largest) for largest in (True, False)]
    return torch.cat([end.indices for end in ends], -1), torch.cat([end.values for end in ends], -1)


@torch.no_grad()
def separation(model: Backpack, word: int | None, a: int, b: int) -> Tensor:
    """How strongly each sense of a word speaks for a over b, C(word)_l . (E_a - E_b), in logits: (k,).

    With word None of every word: (V, k).
    """
    direction = model.wte.weight[a] - model.wte.weight[b]  # (d,)
    if word is None:
        return over_vocabulary(model, lambda C: C @ direction, 'separating')
    return model.senses(torch.tensor([word], device=direction.device))[0] @ direction


def affinity(model: Backpack, bag: list[int]) -> Tensor:
    """Eq. 17, s(C) = sum over the bag of C . E_w / max over all words of C . E_v, of every sense: (V, k).

    The divisor is the largest score, as in the published code; footnote 5 says the largest absolute one.
    """
    return affinities(model, [bag])[0]


def affinities(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Eq. 17 for n bags at the price of one, as the divisor is the same for all: (n, V, k)."""
    E = model.wte.weight[:model.config.n_vocab]  # (V, d)
    sums = torch.stack([E[bag].sum(0) for bag in bags])  # (n, d)

    def score(C: Tensor) -> Tensor:
        """Senses (m, k, d) -> (m, k, n)."""
        top = (C @ E.T).amax(-1, keepdim=True)  # (m, k, 1)
        return C @ sums.T / top.clamp(min=1e-6)  # a sense that speaks for no word is for no bag
    return over_vocabulary(model, score, 'scoring senses').movedim(-1, 0)  # (V, k, n) -> (n, V, k)


@torch.no_grad()
def similarity(model: Backpack, word: int) -> Tensor:
    """Eq. 13, Sim_l(word, v) = cossim(C(word)_l, C(v)_l), for every word v: (V, k).

    Its minimum over the last axis is Sim_min of Eq. 14.
    """
    own = model.senses(torch.tensor([word], device=model.wte.weight.device))  # (1, k, d)
    return over_vocabulary(model, lambda C: F.cosine_similarity(C, own, dim=-1), 'comparing')


# -----------------------------------------------------------------------------
# Explain.


def edited_senses(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """The senses that the model sums for the texts idx (B, T), as an edit leaves them: (B, T, k, d)."""
    C = model.senses(idx)
    return C if edit is None else edit(idx, C)


@torch.no_grad()
def explain(model: Backpack, idx: Tensor, v: Tensor, edit: Edit | None = None) -> tuple[Tensor, Tensor]:
    """What the prediction after the texts idx (B, T) is made of: the weights alpha (B, T, k) that the last
    position gives to all senses of all words, and their scores C . v (B, T, k) for a vector v (d,).

    For v = E_w, the sum of alpha * (C . v) is the logit of w as the next word (Eq. 2 and 9); for
    v = E_a - E_b it is the difference of two logits, of which the odds of a to b are the exponential.
    """
    alpha = model.alpha(idx)[:, :, -1].transpose(1, 2)  # (B, k, T, T) -> (B, k, T) -> (B, T, k)
    return alpha, edited_senses(model, idx, edit) @ v


# -----------------------------------------------------------------------------
# Edit.


def compose(edits: list[Edit]) -> Edit:
    """The edits one after another."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Senses (B, T, k, d) after all edits."""
        for one in edits:
            C = one(idx, C)
        return C
    return edit


def stands_at(idx: Tensor, words: list[int] | None) -> Tensor:
    """Where in idx (B, T) one of the words stands (None: any word), to weigh senses with: (B, T, 1, 1)."""
    if words is None:
        return torch.ones_like(idx, dtype=torch.bool)[..., None, None]
    return torch.isin(idx, torch.tensor(words, device=idx.device))[..., None, None]


def scale_senses(words: list[int] | None, senses: list[int], factor: float) -> Edit:
    """The edit that multiplies the given senses of the given words (None: of every word); 0 is off."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Scaled senses (B, T, k, d)."""
        chosen = torch.zeros(C.shape[2], 1, dtype=torch.bool, device=idx.device)
        chosen[senses] = True  # (k, 1)
        return torch.where(stands_at(idx, words) & chosen, factor * C, C)  # (B, T, k, d)
    return edit


def replace_word(model: Backpack, words: list[int], old: int, new: int) -> Edit:
    """Section 6.3, knowledge editing: what the senses of words say of old, they say of new ("MacBook: Apple
    -> HP").

    With r = E_old and a = E_new, C' = C + (C . r) (a / |a|^2 - r / |r|^2): the part of C along r goes, and as
    much is put along a. C' gives old less by C.r (1 - a.r / |a|^2), new more by C.r (1 - a.r / |r|^2), and
    the same to a word whose embedding is orthogonal to both. The paper divides by the norm of a sense of old
    where the published code, and this, has |r|^2.
    """
    r, a = model.wte.weight[old].detach(), model.wte.weight[new].detach()  # (d,)
    move = a / a.square().sum() - r / r.square().sum()  # (d,)

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Moved senses (B, T, k, d)."""
        moved = C + (C @ r.to(C))[..., None] * move.to(C)  # (B, T, k, 1) * (d,)
        return torch.where(stands_at(idx, words), moved, C)
    return edit


# Table 11: what the senses above the quantiles 0.95, 0.80, 0.60 and below are multiplied by, by strength.
STRENGTHS = [(1, 1, 1, 1), (1.5, 1.5, 1.3, 1), (2.2, 2.2, 1.5, 1), (3.3, 3.3, 3, 1)]
QUANTILES = (0.95, 0.80, 0.60)
TOPICS = {label: words.split() for label, words in {  # Table 10: label -> bag of words
    'arts_culture': 'arts culture', 'business_entrepreneurs': 'business entrepreneurs',
    'celebrity_pop_culture': 'celebrity pop culture', 'diaries_daily_life': 'diaries daily life',
    'family': 'family', 'fashion_style': 'fashion style', 'film_tv_video': 'film tv video',
    'fitness_health': 'fitness health', 'food_dining': 'food dining', 'gaming': 'gaming', 'music': 'music',
    'news_social_concern': 'news social concern', 'other_hobbies': 'hobbies',
    'relationships': 'relationships', 'sports': 'sports', 'travel_adventure': 'travel adventure',
    'youth_student_life': 'youth student life'}.items()}


def topic(model: Backpack, scores: Tensor, weights: tuple[float, ...]) -> Edit:
    """Eq. 15, topic control: a sense with a high score is multiplied by delta, less so once it had its say.

    scores (V, k) are affinity(model, bag), computed once for any number of texts and strengths; weights are a
    row of STRENGTHS. A score equal to a quantile counts as above it. i runs over all of idx, so only the last
    position, which generate draws from, knows nothing of its future:

        a = sum_i relu(E_{x_i} . C(x_j)_l)      how much of what the sense speaks for was said     Eq. 18
        b = sigmoid(6 - f a) (1 + j / 100)      f = max(weights) / 7.5; later words count more     Eq. 19
        delta' = 1 + b (delta - 1)              so that delta = 1 changes nothing                  Eq. 20

    as in the published code. The paper prints a sum of log-probabilities, f = 7.5 / max(weights), a
    (1 + j) / 100 inside the sigmoid and b delta + (1 - a).
    """
    E, f, scores = model.wte.weight.detach(), max(weights) / 7.5, scores.float()
    delta = torch.full_like(scores, weights[-1])  # (V, k)
    for quantile, weight in reversed(list(zip(QUANTILES, weights))):
        delta[scores >= scores.flatten().quantile(quantile)] = weight

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Scaled senses (B, T, k, d)."""
        a = torch.einsum('bjld,bid->bjli', C, E[idx].to(C)).relu().sum(-1)  # (B, T, k)
        near = 1 + torch.arange(idx.shape[1], device=idx.device) / 100  # (T,)
        b = torch.sigmoid(6 - f * a) * near[:, None]  # (B, T, k)
        return C * (1 + b * (delta[idx] - 1)).to(C)[..., None]
    return edit
