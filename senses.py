"""Explain a prediction sense by sense, edit senses, and inspect what they predict.

    >>> import rucksack, torch
    >>> from rucksack.senses import extremes
    >>> model, encoding = rucksack.load('english')
    >>> C = model.senses(torch.tensor(rucksack.word_id(encoding, 'nurse')))  # (k, d), Eq. 10
    >>> ids, added = extremes(model, C[10], 4)  # 4 ids it raises most, 4 it lowers most
    >>> encoding.decode(ids[:4].tolist())
    ' she eager herself her'

    code              paper (see model.py)     what it gives
    explain           Eq. 2 and 9              weights and scores; their products sum to a logit
    scale_senses      section 6.2, Figure 3    edit: turn senses of words down, off or up
    replace_word      section 6.3              edit: give to NEW what a word gives to OLD
    add_to_senses     arXiv 2402.06155         edit: add vectors to senses, learned or given
    topic             Eq. 15 and 18-20         edit: turn up the senses that favour a topic
    probs_under       Eq. 9, softmax           the next words under several edits
    separation        section 6.2, Table 13    how far each sense favours one word over another
    affinities        Eq. 17                   how strongly each sense favours a bag of words
    similarity        Eq. 13; min: Eq. 14      how alike two words are in each sense
    extremes          Tables 1 and 3           the words that a sense raises and lowers most

A sense vector c adds alpha * (c . E_w) to the logit of the id w. Only alpha depends on the text.
An edit maps ids (B, T) and their senses C (B, T, k, d) to the senses to use instead. Apply it with
model(idx, C=senses_after(model, idx, edit)) or with model.generate(idx, n, edit=edit).

Pass words as token ids (see rucksack.word_id). scale_senses and replace_word also take a tuple of
ids for a multi-token word, and edit its last token. Symbols are as in model.py; E_w is a row of E.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.model import GPT, Backpack, weighted_sum

# An edit: ids (B, T), senses C (B, T, k, d) -> the senses to use instead. It must not modify C.
Edit = Callable[[Tensor, Tensor], Tensor]
# The words to edit: ids, and tuples of ids for words of several tokens. None means every id.
Words = list[int | tuple[int, ...]] | None
Ids = int | list[int]  # an id or several


@torch.no_grad()
def explain(model: Backpack, idx: Tensor, direction: Tensor, C: Tensor | None = None,
            last: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split the prediction after the texts idx (B, T) into terms, along a direction v (d,).

    Returns the weights alpha (B, T, k) that the last position gives to all senses of all tokens,
    and the scores C . v (B, T, k) of these senses. A score of 8 at weight 1/4 adds 2. For
    v = E_w, the sum of alpha * (C . v) is the logit of w as the next token (Eq. 2 and 9). For
    v = E_a - E_b, it is the log odds of a to b.
    C (B, T, k, d) defaults to senses(idx), and last (B,), which pad returns, to the end of idx.
    """
    if C is None:
        C = model.senses(idx)
    by_position = model.alpha(idx).permute(0, 2, 3, 1)  # (B, T, T, k), [b, i, j, l]
    alpha = at_last(by_position, last)  # (B, T, k), of one position i
    scores = C @ direction  # (B, T, k)
    return alpha, scores


def scale_senses(words: Words, numbers: list[int], factor: float) -> Edit:
    """Make an edit that multiplies the numbered senses of words by factor; 0 turns them off.

    Here sense 1 of id 7 is halved:

    >>> C = torch.tensor([[[[2.], [6.]], [[2.], [6.]]]])  # (1, 2, 2, 1), senses of two tokens
    >>> edit = scale_senses([7], [1], 0.5)
    >>> edit(torch.tensor([[7, 8]]), C).flatten().tolist()
    [2.0, 3.0, 2.0, 6.0]
    """
    def edit(idx, C):
        scaled = C.clone()
        scaled[:, :, numbers] *= factor
        return torch.where(occurrences(idx, words), scaled, C)  # (B, T, k, d)
    return edit


def replace_word(model: Backpack, words: Words, old: int, new: int) -> Edit:
    """Make an edit so that words add to new's logit what they added to old's (section 6.3).

    C' = C + (C . E_old) (E_new / |E_new|^2 - E_old / |E_old|^2)

    With E_old = (2, 0) and E_new = (0, 1), the sense (3, 5) adds 6 to the logit of old and 5 to the
    logit of new. It becomes (0, 11): 0 for old, 11 for new. Both move less if E_old . E_new > 0.
    NOTE: |E_old|^2 as in the authors' code; the paper's |C(old)_l|^2 leaves a part along E_old.
    """
    E = model.wte.weight.detach()
    E_old = E[old]  # (d,)
    E_new = E[new]  # (d,)
    part_new = E_new / E_new.square().sum()  # (d,)
    part_old = E_old / E_old.square().sum()
    move = part_new - part_old

    def edit(idx, C):
        along_old = C @ E_old.to(C)  # (B, T, k); .to(C): senses may be bfloat16 or float64
        moved = C + along_old[..., None] * move.to(C)  # (B, T, k, d)
        return torch.where(occurrences(idx, words), moved, C)
    return edit


def add_to_senses(ids: Tensor, numbers: Tensor, vectors: Tensor) -> Edit:
    """Make an edit that adds vectors[p] to sense numbers[p] of a token, wherever ids[p] ends.

    For P senses: numbers (P,), vectors (P, d), and ids (P,) or (P, n): sequences of up to n ids,
    with -1 before shorter ones. The last id of a sequence changes only where all of it stands.
    rucksack.edits.learning finds all three from examples (arXiv 2402.06155).
    """
    def edit(idx, C):
        b, i, p = sequence_ends(idx, ids).nonzero(as_tuple=True)  # ids[p] ends at i in text b
        places = (b, i, numbers[p])
        return C.index_put(places, vectors[p].to(C), accumulate=True)  # (B, T, k, d), added
    return edit


# -----------------------------------------------------------------------------
# Apply edits.


def senses_after(model: Backpack, idx: Tensor, edit: Edit | None) -> Tensor:
    """Return the senses of idx (B, T), edited if edit is given: (B, T, k, d)."""
    return compose([edit])(idx, model.senses(idx))  # unchanged if edit is None


@torch.no_grad()
def probs_under(model: Backpack | GPT, idx: Tensor, edits: list[Edit | None],
                last: Tensor | None = None) -> Tensor:
    """Predict the token after the texts idx (B, T) under each edit: probabilities (edits, B, V).

    None means no edit. With off = scale_senses([nurse], [10], 0.0),
    probs_under(model, idx, [None, off])[:, 0, she] has p(she) before and after the edit. For last,
    see pad. Raises ValueError for an edit if model is a GPT.
    """
    if model.config.n_sense == 0:
        if any(edits):
            raise ValueError('this model has no senses to edit; pass None, or use a Backpack')
        h = at_last(model.contextualizer(model.wte(idx)), last)  # (B, d)
        outputs = [h] * len(edits)
    else:
        by_position = model.alpha(idx).transpose(1, 2)  # (B, T, k, T), [b, i, l, j]
        alpha = at_last(by_position, last)[:, :, None]  # (B, k, 1, T)
        C = model.senses(idx)  # (B, T, k, d)
        outputs = []
        for edit in edits:
            edited = compose([edit])(idx, C.clone())  # (B, T, k, d); a copy, to be safe
            o = weighted_sum(alpha, edited)  # (B, 1, d)
            outputs.append(o[:, 0])
    E = model.wte.weight[:model.config.n_vocab]  # (V, d)
    logits = torch.stack(outputs) @ E.T  # (edits, B, V)
    return logits.softmax(-1)


def next_word_probs(model: Backpack | GPT, idx: Tensor, edit: Edit | None = None,
                    last: Tensor | None = None) -> Tensor:
    """Predict the token after the texts idx (B, T) as probs_under does, for one edit: (B, V)."""
    return probs_under(model, idx, [edit], last)[0]


def pad(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Put texts of different lengths into one batch: idx (B, T) and last (B,), both on the CPU.

    Shorter texts are padded with id 0 after their last positions. Pass last to explain, probs_under
    or next_word_probs, which otherwise predict from the end of idx. The model is causal, so padding
    changes nothing (except under a topic edit). Don't generate from idx. Raises ValueError for an
    empty text.

    >>> idx, last = pad([[5, 7, 9], [8]])
    >>> idx.tolist(), last.tolist()
    ([[5, 7, 9], [8, 0, 0]], [2, 0])
    """
    if not all(texts):
        raise ValueError('a text has no tokens; give it at least an end-of-text')
    tensors = [torch.tensor(ids) for ids in texts]
    idx = pad_sequence(tensors, batch_first=True)  # (B, T)
    last = torch.tensor(list(map(len, texts))) - 1
    return idx, last


def at_last(x: Tensor, last: Tensor | None) -> Tensor:
    """Take x[b, last[b]] for each text b, by default its end: (B, T, ..) -> (B, ..)."""
    if last is None:
        return x[:, -1]
    return x[torch.arange(len(x)), last]


def compose(edits: list[Edit | None]) -> Edit:
    """Apply the edits from left to right; None means no edit."""
    def edit(idx, C):  # C is (B, T, k, d) throughout
        for one in edits:
            if one is not None:
                C = one(idx, C)
                assert C is not None, 'an edit must return the senses to use'
        return C
    return edit


def occurrences(idx: Tensor, words: Words) -> Tensor:
    """Find where one of the words ends in idx (B, T): (B, T, 1, 1), to broadcast over senses.

    Raises TypeError for words that are not ids, such as (), and for a tuple in place of a list.
    """
    if isinstance(words, tuple):
        raise TypeError(f'put a word of several tokens in a list: [{words}]')
    if words is None:  # everywhere
        return torch.ones_like(idx, dtype=torch.bool)[..., None, None]
    is_end = torch.zeros_like(idx, dtype=torch.bool)  # (B, T)
    for word in words:
        pieces = word if isinstance(word, tuple) and word else (word,)
        ids = [operator.index(piece) for piece in pieces]  # index raises TypeError for text
        if min(ids) >= 0:  # in a sequence, -1 would stand for any id
            is_end |= sequence_ends(idx, idx.new_tensor([ids]))[..., 0]
    return is_end[..., None, None]


def sequence_ends(idx: Tensor, sequences: Tensor) -> Tensor:
    """Find where sequences of ids, (P,) or (P, n) as in add_to_senses, end in idx: (B, T, P)."""
    sequences = sequences.view(len(sequences), -1)  # (P, n)
    is_end = idx.new_ones(*idx.shape, len(sequences), dtype=torch.bool)  # (B, T, P)
    for back, ids in enumerate(sequences.T.flip(0)):  # the last ids (P,), those before, ..
        shifted = F.pad(idx, (back, 0), value=-1)  # (B, T + back)
        earlier = shifted[:, :idx.shape[1]]  # (B, T)
        is_end &= (earlier[..., None] == ids) | (ids == -1)
    return is_end


# -----------------------------------------------------------------------------
# Look at senses. Pass some ids, or the whole vocabulary in slices; each id gives one row.


@torch.no_grad()
def separation(model: Backpack, ids: Tensor, a: Ids, b: Ids) -> Tensor:
    """Measure how far each sense of ids (n,) favours the id a over b, C . (E_a - E_b): (n, k).

    The unit is logits at weight 1. For lists a and b, the result is the mean over pairs a[p], b[p].
    """
    E = model.wte.weight
    directions = torch.atleast_2d(E[a] - E[b])  # (pairs, d)
    C = model.senses(ids)  # (n, k, d)
    return C @ directions.mean(0)  # (n, k)


@torch.no_grad()
def similarity(model: Backpack, ids: Tensor, w: int) -> Tensor:
    """Compute Eq. 13, cossim(C(w)_l, C(v)_l), for v in ids (n,): (n, k). .amin(-1) is Eq. 14."""
    C_w = model.senses(ids.new_tensor(w))  # (k, d)
    C = model.senses(ids)  # (n, k, d)
    return F.cosine_similarity(C, C_w, dim=-1)


@torch.no_grad()
def affinities(model: Backpack, ids: Tensor, bags: list[list[int]]) -> Tensor:
    """Compute Eq. 17, how strongly each sense of ids (n,) favours each bag of ids: (n, k, bags).

    A score is the sum of a bag's logits, divided by the sense's largest logit. Pass a few hundred
    ids at a time: all n * k * V logits are in memory at once.
    NOTE: Eq. 17 as printed, and as in the authors' code. Footnote 5 says largest absolute value.
    """
    V = model.config.n_vocab
    dtype = model.wte.weight.dtype  # under autocast, logits are bfloat16: too coarse to add up
    C = model.senses(ids)  # (n, k, d)
    logits = model.project(C)[..., :V]  # (n, k, V)
    largest = logits.amax(-1).to(dtype)  # (n, k)
    largest = largest.clamp(min=1e-6)  # bounds the score if no logit is positive
    totals = [logits[..., bag].sum(-1, dtype=dtype) for bag in bags]  # (n, k) each
    return torch.stack(totals, dim=-1) / largest[..., None]


@torch.no_grad()
def extremes(model: Backpack, C: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Find the n ids whose logits each sense C (.., d) raises most, then the n it lowers most.

    Returns ids (.., 2n), strongest first, and what C adds to their logits at weight 1, (.., 2n).
    """
    logits = model.project(C)[..., :model.config.n_vocab]  # (.., V)
    order = logits.argsort(dim=-1, descending=True)  # (.., V)
    raised = order[..., :n]
    lowered = order[..., -n:].flip(-1)
    ids = torch.cat([raised, lowered], dim=-1)  # (.., 2n)
    added = logits.gather(-1, ids)
    return ids, added


# Table 11, strengths 0 to 3: factors for the top 5% of scores, next 15%, next 20%, and the rest.
STRENGTHS = [
    (1, 1, 1, 1),
    (1.5, 1.5, 1.3, 1),
    (2.2, 2.2, 1.5, 1),
    (3.3, 3.3, 3, 1)]


def topic(model: Backpack, scores: Tensor, factors: tuple[float, ...]) -> Edit:
    """Turn up the senses that favour a topic (Eq. 15), and less so once the text expresses it.

    WARNING: not causal. Only the prediction after the whole text, as in generate, is valid.

    scores (V, k) are the affinities of all ids with a bag of words. factors is a row of STRENGTHS:
    the factor of a sense depends on the bracket of its score (ties go to the higher one). It fades
    to 1 as the text has more words that the sense favours: sense l of position j is multiplied by
    annealed, with f = max(factors) / 7.5 (a constant of the paper's):

        expressed = sum_m relu(E_{x_m} . C(x_j)_l)          Eq. 18, over all positions m
        fade = sigmoid(6 - f * expressed) * (1 + j / 100)   Eq. 19
        annealed = 1 + fade * (factor - 1)                  Eq. 20

    NOTE: We follow the authors' code. The paper has f = 7.5 / max(factors), (1 + j) / 100, and in
    Eq. 20 fade * factor + 1 - expressed, which scales a sense even at factor 1.
    """
    E = model.wte.weight.detach()
    f = max(factors) / 7.5
    scores = scores.float().contiguous()
    quantiles = scores.new_tensor([0.60, 0.80, 0.95])
    edges = scores.flatten().quantile(quantiles)  # (3,)
    bracket = torch.bucketize(scores, edges, right=True)  # (V, k): 3 is the top 5%, 0 the rest
    ascending = scores.new_tensor(factors[::-1])  # the rest first, as bracket counts
    factor_of = ascending[bracket]  # (V, k)

    def edit(idx, C):
        said = torch.einsum('bjld,bmd->bjlm', C, E[idx].to(C))  # (B, T, k, T)
        expressed = said.relu().sum(-1)  # (B, T, k), Eq. 18
        j = torch.arange(idx.shape[1], device=idx.device)  # (T,)
        growth = 1 + j / 100
        fade = torch.sigmoid(6 - f * expressed) * growth[:, None]  # (B, T, k), Eq. 19
        annealed = 1 + fade * (factor_of[idx] - 1)  # (B, T, k), Eq. 20
        return C * annealed.to(C)[..., None]
    return edit
