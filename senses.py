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

import re
from collections.abc import Callable, Iterator

import tiktoken
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm  # comes with datasets

from model import Backpack, Edit, UserError, weighted_sum

# -----------------------------------------------------------------------------
# Words.


def shown(encoding: tiktoken.Encoding, token: int) -> str:
    """A token as it can stand in a table: the quotes show its space, control characters are written out."""
    return repr(encoding.decode_single_token_bytes(token).decode('utf-8', errors='replace'))


def word_id(encoding: tiktoken.Encoding, word: str) -> int:
    """The id of a word inside a text, the space before it included; UserError where it is several tokens."""
    ids = encoding.encode_ordinary(' ' + word) if word else []
    if len(ids) != 1:
        pieces = ' + '.join(shown(encoding, i) for i in ids) or 'nothing'
        raise UserError(f'{word!r} is no single word of this vocabulary but {pieces}; take one that is')
    return ids[0]


def word_forms(encoding: tiktoken.Encoding, word: str) -> list[int]:
    """The ids a word goes by: inside a text and, where that is one token too, at its start."""
    at_start = encoding.encode_ordinary(word)
    return [word_id(encoding, word)] + (at_start if len(at_start) == 1 else [])


def bag_of_words(encoding: tiktoken.Encoding, words: list[str]) -> list[int]:
    """The ids of a bag of words, each once; of a word of several tokens every piece (the published code: the
    first). UserError for an empty bag and for a word that this vocabulary can only spell.
    """
    bag = []
    for word in map(str.strip, words):
        ids = encoding.encode_ordinary(' ' + word)
        if not word or not ids or encoding.decode_single_token_bytes(ids[0]) == b' ':
            raise UserError(f'{word!r} is no word of this vocabulary; take others for the bag')
        bag += ids
    if not bag:
        raise UserError('the bag of words is empty; give words, as in "arts, culture"')
    return sorted(set(bag))


# -----------------------------------------------------------------------------
# Look.

LOGITS_AT_ONCE = 1 << 26  # bounds the memory of work on the whole vocabulary: 256 MiB of float32


def progress(items, what: str):
    """The items, on a terminal with a bar and the time left where they take more than two seconds."""
    return tqdm(items, what, delay=2, mininterval=1, leave=False, disable=None)


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


class Dials:
    """The prediction after a text, as a function of a weight on each sense of each of its U distinct words.

    Eq. 2 sorted by words is o(w) = sum_u sum_l w_ul taken_ul C(u)_l, where taken_ul adds alpha_lj up over the
    positions j at which u stands. So logits are linear in w, those at weight 1 plus sum_ul (w_ul - 1) times
    what sense l of u adds to them. scale_senses([u], [l], w_ul) edits the model to the same.

        words, place    (U,), (T,)           the distinct words, and which of them stands at each position
        alpha, taken    (T, k), (U, k)       the weights that the last position gives, at w = 1
        next            (N,)                 the next words that have a column each, likely ones first
        base, parts     (N+M,), (U, k, N+M)  logits at w = 1, and what each sense adds to them

    A vocabulary larger than columns has M columns for groups of its other words, those that move alike at
    random weights. A group is like one word: its base is the log-sum-exp of theirs, its parts are the means
    of theirs, weighted by probability. So its mass is right at w = 1, and its derivative too.
    """

    @torch.no_grad()
    def __init__(self, model: Backpack, ids: list[int], columns: int):
        self.model, idx = model, torch.tensor([ids], device=model.wte.weight.device)  # (1, T)
        E = model.wte.weight[:model.config.n_vocab]  # (V, d)
        self.words, self.place = idx[0].unique(return_inverse=True)  # (U,), (T,)
        self.alpha = model.alpha(idx)[0, :, -1].T  # (k, T) -> (T, k)
        self.C = model.senses(self.words)  # (U, k, d)
        self.taken = torch.zeros_like(self.C[..., 0]).index_add(0, self.place, self.alpha)  # (U, k)
        adds = self.taken[..., None] * self.C  # (U, k, d)
        logits = E @ adds.sum((0, 1))  # (V,)
        random = torch.einsum('nul,uld->nd', self.random_weights(64, seed=0), adds) @ E.T  # (64, V)
        peak = torch.cat([logits[None], random]).softmax(-1).amax(0)  # (V,)
        order, groups = peak.argsort(descending=True), min(256, columns // 2) if columns < len(E) else 0
        self.next, others = order[:columns - groups], order[columns - groups:]  # (N,), (V - N,)
        self.base, vectors = logits[self.next], E[self.next]  # (N,), (N, d)
        if groups:
            moves = (random - random.mean(0))[:, others].T  # (V - N, 64)
            seeds = moves[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[:groups]]
            group = torch.cdist(moves, seeds).argmin(1)  # (V - N,), of M
            p = logits[others].softmax(0)  # (V - N,)
            mass = p.new_zeros(groups).index_add(0, group, p).clamp(min=1e-38)  # (M,)
            sums = E.new_zeros(groups, E.shape[1]).index_add(0, group, p[:, None] * E[others])  # (M, d)
            self.base = torch.cat([self.base, mass.log() + logits[others].logsumexp(0)])  # (N+M,)
            vectors = torch.cat([vectors, sums / mass[:, None]])  # (N+M, d)
        self.parts = adds @ vectors.T  # (U, k, N+M)

    def random_weights(self, n: int, seed: int) -> Tensor:
        """Weights from 0 to 2, (n, U, k): by turns of about four senses, the others at 1, and of all."""
        generator, shape = torch.Generator().manual_seed(seed), (n, *self.taken.shape)
        weights = 2 * torch.rand(shape, generator=generator)
        few = torch.rand(shape, generator=generator) * self.taken.numel() < 4
        weights[::2] = weights[::2].where(few[::2], 1)
        return weights.to(self.taken)

    def probabilities(self, weights: Tensor) -> Tensor:
        """The probabilities of the next words at n settings of the weights (n, U, k): (n, N)."""
        logits = self.base + torch.einsum('nul,ulv->nv', weights - 1, self.parts)  # (n, N+M)
        return logits.cpu().double().softmax(-1)[:, :len(self.next)]

    @torch.no_grad()
    def error(self, n: int = 1000, seed: int = 1) -> float:
        """The largest difference between a probability here and the model's, of all next words that have one
        here and of the model's ten likeliest, over n random settings of the weights.
        """
        C, alpha = self.C[self.place], self.alpha.T[None, :, None]  # (T, k, d), (1, k, 1, T)
        worst, size = 0.0, max(1, LOGITS_AT_ONCE // max(C.numel(), self.model.config.vocab_size))
        for w in progress(self.random_weights(n, seed).split(size), 'measuring'):
            scaled = w[:, self.place, :, None] * C  # (n, T, k, d)
            o = weighted_sum(alpha.expand(len(w), -1, -1, -1), scaled)[:, 0]  # (n, d)
            exact = self.model.project(o)[:, :self.model.config.n_vocab].cpu().double().softmax(-1)  # (n, V)
            here = torch.zeros_like(exact)
            here[:, self.next.cpu()] = self.probabilities(w)
            gap, top = (here - exact).abs(), exact.topk(10).indices
            worst = max(worst, gap[:, self.next.cpu()].max().item(), gap.gather(1, top).max().item())
        return worst


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


# -----------------------------------------------------------------------------
# The words of the command line that stand for edits.


def parse_word_senses(text: str, model: Backpack,
                      encoding: tiktoken.Encoding) -> tuple[list[int] | None, list[int], str]:
    """The ids and the senses in WORD:SENSES, and a line on them; ids are None for WORD *, every word.

    SENSES are numbers and ranges (3,10 or 3-5), or A/B: the one sense of WORD whose separation of these two
    words is largest, for or against. UserError where the text is malformed or names a word or a sense that is
    not there.
    """
    word, _, which = (part.strip() for part in text.rpartition(':'))
    if not word or not which:
        raise UserError(f'{text!r} is not WORD:SENSES, as nurse:10, nurse:3-5,10, nurse:she/he or *:10')
    forms = None if word == '*' else word_forms(encoding, word)
    if '/' in which:
        a, b = pair_of(encoding, which)
        if forms is None:
            raise UserError(f'{text!r}: A/B picks a sense of one word, and * is every word; give its number')
        scores = separation(model, forms[0], a, b)  # (k,)
        best, *rest = scores.abs().argsort(descending=True).tolist()
        line = (f'sense {best} of {word}, which most separates {shown(encoding, a)} from '
                f'{shown(encoding, b)} (by {scores[best]:+.2f} logits')
        return forms, [best], line + (f'; sense {rest[0]}: {scores[rest[0]]:+.2f})' if rest else ')')
    senses = sense_numbers(which, model.config.n_sense)
    of = 'every word' if forms is None else word
    return forms, senses, f'sense{"s" * (len(senses) > 1)} {", ".join(map(str, senses))} of {of}'


def pair_of(encoding: tiktoken.Encoding, text: str) -> tuple[int, int]:
    """The ids of A and B in A/B."""
    a, _, b = (part.strip() for part in text.partition('/'))
    if not a or not b or a == b:
        raise UserError(f'{text!r} is not A/B, two words as in she/he')
    return word_id(encoding, a), word_id(encoding, b)


def sense_numbers(text: str, n_sense: int) -> list[int]:
    """The numbers in 3,10 or 3-5, each below n_sense."""
    senses = []
    for part in text.split(','):
        match = re.fullmatch(r'([0-9]{1,9})(?:-([0-9]{1,9}))?', part.strip())
        if not match:
            raise UserError(f'{text!r} is neither sense numbers, as 3,10 or 3-5, nor two words, as she/he')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= n_sense:
            raise UserError(f'there is no sense {part.strip()}; this model has senses 0 to {n_sense - 1}')
        senses += range(first, last + 1)
    return senses


def parse_factor(text: str) -> tuple[str, float]:
    """WORD:SENSES and the factor in WORD:SENSES=F."""
    senses, _, factor = text.rpartition('=')
    try:
        if senses and abs(float(factor)) <= 1000:
            return senses, float(factor)
    except ValueError:
        pass
    raise UserError(f'{text!r} is not WORD:SENSES=FACTOR, as in nurse:10=0.5, with at most 1000 as FACTOR')


def parse_replacement(text: str, encoding: tiktoken.Encoding) -> tuple[list[int], int, int]:
    """The forms of WORD and the ids of OLD and NEW in "WORD: OLD -> NEW"."""
    word, _, rest = text.partition(':')
    old, _, new = rest.partition('->')
    if not (word.strip() and old.strip() and new.strip()):
        raise UserError(f'{text!r} is not "WORD: OLD -> NEW", as in "MacBook: Apple -> HP"')
    return (word_forms(encoding, word.strip()), word_id(encoding, old.strip()),
            word_id(encoding, new.strip()))


def parse_strength(text: str) -> tuple[float, ...]:
    """The weights of a row of Table 11, by its number or as four numbers with commas."""
    if text in map(str, range(len(STRENGTHS))):
        return STRENGTHS[int(text)]
    try:
        weights = tuple(float(part) for part in text.split(','))
    except ValueError:
        weights = ()
    if len(weights) != 4 or not all(0 <= w <= 1000 for w in weights):
        raise UserError(f'strength {text!r} is neither 0, 1, 2 or 3 nor four numbers from 0 to 1000, as '
                        '3.3,3.3,3,1')
    return weights
