"""Explain a prediction sense by sense, edit senses, and look at what they say.

    >>> import rucksack
    >>> model, encoding = rucksack.load('english')
    >>> C = model.senses(torch.tensor(rucksack.word_id(encoding, 'nurse')))  # (k, d), Eq. 10
    >>> ids, added = extremes(model, C[10], 4)  # what sense 10 raises and lowers most
    >>> encoding.decode(ids[:4].tolist())
    ' she eager herself her'

    code              paper                    what it gives
    explain           Eq. 2 and 9              weights and scores; their products sum to a logit
    scale_senses      section 6.2, Figure 3    edit: turn senses of words down, off or up
    replace_word      section 6.3              edit: a word says of NEW what it said of OLD
    add_to_senses     arXiv 2402.06155         edit: move senses by vectors, as learned ones do
    topic             Eq. 15 and 18-20         edit: turn up the senses that favour a topic
    probs_under       Eq. 9, softmax           the next words under several edits
    separation        section 6.2, Table 13    how far each sense favours one word over another
    affinities        Eq. 17                   how strongly each sense favours a bag of words
    similarity        Eq. 13; min: Eq. 14      how alike two words are in each sense
    extremes          Tables 1 and 3           the words that a sense raises and lowers most

Looking: a sense C adds alpha (C . E_v) to the logit of the id v; only alpha depends on the text.
Editing: an edit takes ids (B, T) and their senses C (B, T, k, d) and returns the senses to sum
instead. Apply it with model(idx, C=senses_after(model, idx, edit)) or with
model.generate(idx, n, edit=edit). One that asks for no change changes no bit of the prediction.

Pass words as token ids (see rucksack.word_id). Edits also take a tuple of ids for a word
of several tokens; they then apply at the last of these tokens. Letters are as in model.py.
"""

from collections.abc import Callable, Iterable
from operator import index

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.model import GPT, Backpack, weighted_sum

# An edit: ids (B, T), senses C (B, T, k, d) -> the senses to sum instead, not written into C.
Edit = Callable[[Tensor, Tensor], Tensor]
# The words of an edit: ids, and tuples of ids for words of several tokens; None is every id.
Words = list[int | tuple[int, ...]] | None


# -----------------------------------------------------------------------------
# Explain, scale, replace, add.


@torch.no_grad()
def explain(model: Backpack, idx: Tensor, direction: Tensor, C: Tensor | None = None,
            last: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split the prediction after the texts idx (B, T) into terms, along a direction v (d,).

    Returns the weights alpha (B, T, k) that the last position gives to all senses of all tokens,
    and the scores C . v (B, T, k) of these senses. For v = E_w, the sum of alpha * (C . v) is the
    logit of w as the next token (Eq. 2 and 9); for v = E_a - E_b it is the log odds of a to b.
    A sense with the score 8 and the weight 1/4 adds 2 to it.
    C (B, T, k, d) are the senses to sum, edited or not; the default is senses(idx). last (B,) are
    the positions to explain; the default is T - 1 (see pad).
    """
    if C is None:
        C = model.senses(idx)
    alpha = model.alpha(idx).transpose(1, 2)  # (B, T, k, T)
    alpha = at_last(alpha, last).mT  # (B, T, k)
    scores = C @ direction  # (B, T, k)
    return alpha, scores


def scale_senses(words: Words, senses: list[int], factor: float) -> Edit:
    """Make an edit that multiplies the given senses of the given words by factor (0: off).

    Sense 1 of the id 7 is halved, and nothing else:

    >>> C = torch.tensor([[[[2.], [6.]], [[2.], [6.]]]])  # (1, 2, 2, 1), senses of two tokens
    >>> edit = scale_senses([7], [1], 0.5)
    >>> edit(torch.tensor([[7, 8]]), C).flatten().tolist()
    [2.0, 3.0, 2.0, 6.0]
    """
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        k = C.shape[2]
        is_chosen = torch.zeros(k, 1, dtype=torch.bool, device=idx.device)
        is_chosen[senses] = True
        is_scaled = occurrences(idx, words) & is_chosen  # (B, T, k, 1)
        return torch.where(is_scaled, factor * C, C)  # (B, T, k, d)
    return edit


def replace_word(model: Backpack, words: Words, old: int, new: int) -> Edit:
    """Make an edit after which words say of the id new what they said of old, section 6.3.

    With r = E_old and a = E_new, C' = C + (C . r) (a / |a|^2 - r / |r|^2). This removes the part
    of C along r and adds a multiple of a that raises new as much as C raised old. In all, old
    loses C.r (1 - a.r / |a|^2) and new gains C.r (1 - a.r / |r|^2), in logits at weight 1. As the
    published code, we divide by |r|^2, where the paper has the squared norm of a sense of old.

    With r = (2, 0) and a = (0, 1), the sense (3, 5) adds 6 to the logit of old and 5 to that of
    new. It becomes (0, 11), and adds 0 and 11.
    """
    E = model.wte.weight.detach()
    r = E[old]  # (d,)
    a = E[new]  # (d,)
    a_part = a / a.square().sum()  # (d,)
    r_part = r / r.square().sum()
    move = a_part - r_part

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        along_r = C @ r.to(C)  # (B, T, k)
        moved = C + along_r[..., None] * move.to(C)  # (B, T, k, d)
        return torch.where(occurrences(idx, words), moved, C)
    return edit


def add_to_senses(ids: Tensor, senses: Tensor, vectors: Tensor) -> Edit:
    """Make an edit that adds a vector to some senses: vectors[p] to sense senses[p] of ids[p].

    ids (P,) and senses (P,) are integers, vectors (P, d); rucksack.learning finds all three from
    examples (arXiv 2402.06155). Here sense 1 of the id 7 moves by -1, wherever the id occurs:

    >>> C = torch.tensor([[[[2.], [6.]], [[2.], [6.]]]])  # (1, 2, 2, 1), senses of two tokens
    >>> edit = add_to_senses(torch.tensor([7]), torch.tensor([1]), torch.tensor([[-1.]]))
    >>> edit(torch.tensor([[8, 7]]), C).flatten().tolist()
    [2.0, 6.0, 2.0, 5.0]
    """
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        text, position, p = (idx[..., None] == ids).nonzero(as_tuple=True)  # where ids[p] stands
        places = (text, position, senses[p])
        return C.index_put(places, vectors[p].to(C), accumulate=True)  # (B, T, k, d)
    return edit


# -----------------------------------------------------------------------------
# Apply edits.


def senses_after(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Return the senses to sum for idx (B, T), after an edit or without: (B, T, k, d)."""
    C = model.senses(idx)
    if edit is not None:
        C = edit(idx, C)
        assert C is not None  # forward would take the senses as they are
    return C


@torch.no_grad()
def probs_under(model: Backpack | GPT, idx: Tensor, edits: Iterable[Edit | None],
                last: Tensor | None = None) -> Tensor:
    """Predict the token after the texts idx (B, T) under each edit: probabilities (edits, B, V).

    None is no edit; a GPT takes [None] alone. last (B,) is the last position of each text; the
    default is T - 1 (see pad). No edit changes alpha: it is computed once, and so are the senses.
    For one text and off = scale_senses([nurse], [10], 0.0), probs_under(model, idx, [None, off])
    [:, 0, she] has p(she) before and after.
    """
    if isinstance(model, GPT):
        h = at_last(model.contextualizer(model.wte(idx)), last)  # (B, d)
        logits = [F.linear(h, model.wte.weight)]  # (B, vocab_size)
    else:
        logits = []
        alpha = model.alpha(idx).transpose(1, 2)  # (B, T, k, T)
        alpha = at_last(alpha, last)[:, :, None]  # (B, k, 1, T), weights from the last position
        C = model.senses(idx)  # (B, T, k, d)
        for edit in edits:
            edited = C if edit is None else edit(idx, C.clone())  # (B, T, k, d)
            o = weighted_sum(alpha, edited)  # (B, 1, d)
            logits.append(model.project(o[:, 0]))  # (B, vocab_size)
    logits = torch.stack(logits)[..., :model.config.n_vocab]
    return logits.softmax(-1)


def next_word_probs(model: Backpack | GPT, idx: Tensor, edit: Edit | None = None,
                    last: Tensor | None = None) -> Tensor:
    """Predict the token after the texts idx (B, T) as probs_under does, for one edit: (B, V)."""
    return probs_under(model, idx, [edit], last)[0]


def pad(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Put texts of different lengths into one batch: idx (B, T), and their last positions (B,).

    Shorter texts end in id 0, which changes no prediction, as no position sees a later one. (A
    topic edit does: it needs texts of one length.) Pass last on; generate would go on from the end.

    >>> idx, last = pad([[5, 7, 9], [8]])
    >>> idx.tolist(), last.tolist()
    ([[5, 7, 9], [8, 0, 0]], [2, 0])
    """
    tensors = [torch.tensor(ids) for ids in texts]
    idx = pad_sequence(tensors, batch_first=True)  # (B, T)
    last = torch.tensor([len(ids) - 1 for ids in texts])
    return idx, last


def at_last(x: Tensor, last: Tensor | None) -> Tensor:
    """Take the last position of each text, by default T - 1: (B, T, ..) -> (B, ..)."""
    if last is None:
        return x[:, -1]
    every = torch.arange(len(x))
    return x[every, last]


def compose(edits: list[Edit | None]) -> Edit:
    """Apply the edits from left to right; None is no edit."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:  # C is (B, T, k, d) throughout
        for one in edits:
            if one is not None:
                C = one(idx, C)
        return C
    return edit


def occurrences(idx: Tensor, words: Words) -> Tensor:
    """Find where in idx (B, T) one of the words ends, shaped to select senses: (B, T, 1, 1)."""
    ends = torch.full_like(idx, words is None, dtype=torch.bool)  # (B, T)
    for word in words or []:
        pieces = word if isinstance(word, tuple) else (word,)
        ends |= ends_of(idx, pieces)
    return ends[..., None, None]


def ends_of(idx: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """Find where in idx (B, T) a sequence of ids ends: (B, T)."""
    T = idx.shape[1]
    ends = torch.ones_like(idx, dtype=torch.bool)
    for back, piece in enumerate(reversed(pieces)):
        is_piece = idx == index(piece)  # TypeError for text
        ends &= F.pad(is_piece, (back, 0))[:, :T]  # shifted to the position of the last id
    return ends


# -----------------------------------------------------------------------------
# Look at senses. Pass some ids, or the whole vocabulary in slices; each id gives one row.


@torch.no_grad()
def separation(model: Backpack, ids: Tensor, a: int | list[int], b: int | list[int]) -> Tensor:
    """Measure how far each sense of ids (n,) favours the id a over b, C . (E_a - E_b): (n, k).

    The unit is logits at weight 1. For lists of ids a and b, it is the mean over the pairs.
    """
    E = model.wte.weight
    directions = (E[a] - E[b]).view(-1, E.shape[1])  # (pairs, d)
    return model.senses(ids) @ directions.mean(0)  # (n, k)


@torch.no_grad()
def similarity(model: Backpack, ids: Tensor, w: int) -> Tensor:
    """Compute Eq. 13, cossim(C(w)_l, C(v)_l), for v in ids (n,): (n, k). Its minimum: Eq. 14."""
    C_w = model.senses(ids.new_tensor(w))  # (k, d)
    C = model.senses(ids)  # (n, k, d)
    return F.cosine_similarity(C, C_w, dim=-1)


@torch.no_grad()
def affinities(model: Backpack, ids: Tensor, bags: list[list[int]]) -> Tensor:
    """Compute Eq. 17, how strongly each sense of ids (n,) favours each bag of ids: (n, k, bags).

    This is the sum of the logits of a bag over the largest of all logits, as in the published code;
    footnote 5 says the largest absolute value. All logits of n * k senses are in memory at once.
    For speed, call it under torch.autocast in bfloat16: scores are then off by up to 2%.
    """
    V = model.config.n_vocab
    dtype = model.wte.weight.dtype
    C = model.senses(ids)  # (n, k, d)
    logits = model.project(C)[..., :V]  # (n, k, V)
    largest = logits.amax(-1).to(dtype)  # (n, k)
    largest = largest.clamp(min=1e-6)  # bounds the score if no logit is positive
    scores = []
    for bag in bags:
        total = logits[..., bag].sum(-1, dtype=dtype)  # (n, k)
        scores.append(total / largest)
    return torch.stack(scores, dim=-1)


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


# Table 11, strengths 0 to 3: factors for the top 5% of scores, next 15%, next 20%, and the rest.
STRENGTHS = [
    (1, 1, 1, 1),
    (1.5, 1.5, 1.3, 1),
    (2.2, 2.2, 1.5, 1),
    (3.3, 3.3, 3, 1)]


def topic(model: Backpack, scores: Tensor, factors: tuple[float, ...]) -> Edit:
    """Turn up the senses that favour a topic, Eq. 15, until the text has expressed the topic.

    scores (V, k) are the affinities of all ids for the bag of the topic; factors are a row of
    STRENGTHS. The score of a sense selects its factor, delta (at a quantile, the one above it). The
    edit multiplies the sense by an annealed delta'. As published, for sense l of position j:

        a = sum_i relu(E_{x_i} . C(x_j)_l)     Eq. 18: how far the text expresses this sense
        b = sigmoid(6 - f a) (1 + j / 100)     Eq. 19: f = max(factors) / 7.5; grows with j
        delta' = 1 + b (delta - 1)             Eq. 20: delta = 1 changes nothing

    In the paper, f is 7.5 / max(factors), Eq. 19's second factor is (1 + j) / 100, and delta' is
    b delta + (1 - a). Since i runs over all of idx, every position but the last sees later tokens;
    generate uses only the last.
    """
    E = model.wte.weight.detach()
    f = max(factors) / 7.5
    scores = scores.float()
    quantiles = scores.new_tensor([0.60, 0.80, 0.95])
    edges = scores.flatten().quantile(quantiles)  # (3,)
    reached = (scores[..., None] >= edges).sum(-1)  # (V, k), quantiles reached: 0 to 3
    ascending = scores.new_tensor(factors[::-1])
    delta = ascending[reached]  # (V, k)

    def edit(idx: Tensor, C: Tensor) -> Tensor:
        said = torch.einsum('bjld,bid->bjli', C, E[idx].to(C))  # (B, T, k, T)
        a = said.relu().sum(-1)  # (B, T, k)
        j = torch.arange(idx.shape[1], device=idx.device)  # (T,)
        growth = 1 + j / 100
        b = torch.sigmoid(6 - f * a) * growth[:, None]  # (B, T, k)
        annealed = 1 + b * (delta[idx] - 1)  # (B, T, k)
        return C * annealed.to(C)[..., None]
    return edit
