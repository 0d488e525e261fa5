"""The page of sample.py --html: a prediction whose senses can be dragged, in one file without a server."""

import base64
import codecs
import json
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

import senses
from model import Backpack
from rucksack.common import UserError, progress, write_file
from rucksack.table import Subject

TEMPLATE = Path(__file__).with_name('page.html')
PARTS, SCORES = 480_000, 160_000  # numbers in parts and in scores, at most: a page stays below 5 MB
CARD = 12  # words on the card of a sense: those that it raises most, and as many that it lowers most


class LinearizedPrediction:
    """The prediction after a text, as a function of a weight w_ul on sense l of each of its U distinct ids u.

    Sorted by ids, Eq. 2 is o(w) = sum_ul w_ul taken_ul C(u)_l, where taken_ul is the sum of alpha_lj over the
    positions j of u. So logits are linear in w. scale_senses([u], [l], w_ul) edits the model to the same.

        ids, place      (U,), (T,)           the distinct ids, and which of them stands at each position
        alpha           (T, k)               the weights that the last position gives, at w = 1
        next            (N,)                 the next ids that have a column each, likely ones first
        base, parts     (N+M,), (U, k, N+M)  logits at w = 1, and what each sense adds to them

    A vocabulary larger than columns has M columns for groups of its other ids: their log-sum-exp, and the
    means of their parts by probability. So a group's mass is right at w = 1, and its derivative too.
    """

    def __init__(self, model: Backpack, ids: list[int], columns: int):
        idx, E = torch.tensor([ids], device=model.wte.weight.device), model.wte.weight[:model.config.n_vocab]
        self.ids, self.place = idx[0].unique(return_inverse=True)  # (U,), (T,)
        self.alpha, C = model.alpha(idx)[0, :, -1].T, model.senses(self.ids)  # (T, k), (U, k, d)
        taken = torch.zeros_like(C[..., 0]).index_add(0, self.place, self.alpha)  # (U, k)
        adds = taken[..., None] * C  # (U, k, d)
        logits = E @ adds.sum((0, 1))  # (V,)
        random = torch.Generator().manual_seed(0)
        w = 2 * torch.rand(64, *taken.shape, generator=random).to(adds)  # (64, U, k)
        moved = torch.einsum('nul,uld->nd', w, adds) @ E.T  # (64, V): logits at random weights
        order = torch.cat([logits[None], moved]).softmax(-1).amax(0).argsort(descending=True)  # (V,)
        groups = min(256, columns // 2) if columns < len(E) else 0
        self.next, others = order[:columns - groups], order[columns - groups:]  # (N,), (V - N,)
        self.base, vectors = logits[self.next], E[self.next]  # (N,), (N, d)
        if groups:  # of ids that move alike
            moves = (moved - moved.mean(0))[:, others].T  # (V - N, 64)
            seeds = moves[torch.randperm(len(others), generator=random)[:groups]]  # (M, 64)
            group = torch.cdist(seeds, moves).argmin(0)  # (V - N,), each one of M
            member = group == torch.arange(groups, device=E.device)[:, None]  # (M, V - N)
            inside = torch.where(member, logits[others], -1e30)  # (M, V - N); a group may have no member
            self.base = torch.cat([self.base, inside.logsumexp(1)])  # (N+M,)
            vectors = torch.cat([vectors, inside.softmax(1) @ E[others]])  # (N+M, d)
        self.parts = adds @ vectors.T  # (U, k, N+M)


def written(encoding: tiktoken.Encoding, token: int) -> str:
    """An id as a page shows it, without the space before it; what cannot be seen is written out."""
    text = encoding.decode_single_token_bytes(token).decode('utf-8', errors='backslashreplace')
    text = text[1:] if len(text) > 1 and text[0] == ' ' else text
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text).replace(' ', '␣')


def label(encoding: tiktoken.Encoding, token: int) -> str:
    """The same with a + where a word has no space before it, which tells it from the one that has."""
    glued = encoding.decode_single_token_bytes(token)[:1] != b' ' and written(encoding, token)[:1].isalnum()
    return '+' * glued + written(encoding, token)


def packed(x: Tensor) -> dict[str, str]:
    """Numbers for JavaScript: the typed array to put them in, flat, and its bytes in base64."""
    kind = 'Float32' if x.is_floating_point() else 'Uint32' if x.max() >= 1 << 16 else 'Uint16'
    data = x.cpu().numpy().astype({'Float32': '<f4', 'Uint32': '<u4', 'Uint16': '<u2'}[kind]).tobytes()
    return {'type': f'{kind}Array', 'base64': base64.b64encode(data).decode()}


@torch.no_grad()
def page_data(s: Subject, ids: list[int], extra: list[int]) -> dict:
    """What a page shows of the prediction after the prompt ids, and senses of the ids extra, and of others
    while there is space, to look up. UserError for a prompt of too many words.
    """
    encoding, V, k, words = s.encoding, s.model.config.n_vocab, s.model.config.n_sense, sorted(set(ids))
    columns = min(V, PARTS // (len(words) * k))
    if columns < min(V, 64):
        raise UserError(f'{len(words)} words of {k} senses are too much for a page; give a shorter prompt')
    p, names = LinearizedPrediction(s.model, ids, columns), [label(encoding, v) for v in range(V)]
    others = [v for v in range(V) if '\\' not in names[v] and any(map(str.isalnum, names[v]))]
    known = list(dict.fromkeys(words + extra + others))[:max(len(words + extra), SCORES // (CARD * k))]
    read = [senses.extremes(s.model, s.model.senses(chunk), CARD // 2) for chunk in
            progress(torch.tensor(known, device=s.device).split(64), 'reading senses')]
    extremes, scores = map(torch.cat, zip(*read))  # (known, k, CARD) each
    decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # a character may be several tokens
    texts = [decoder.decode(encoding.decode_single_token_bytes(i)) for i in ids]
    texts[-1] += decoder.decode(b'', final=True)
    plain = [written(encoding, w) for w in words]
    keys = [key if plain.count(key) == 1 else f'{key}@{ids.index(w)}' for key, w in zip(plain, words)]
    arrays = {'alpha': p.alpha, 'next': p.next, 'base': p.base, 'parts': p.parts, 'extremes': extremes,
              'scores': scores, 'known': torch.tensor(known)}
    n, groups = len(p.next), len(p.base) - len(p.next)
    exact = f'computed from what each sense adds to {n:,} words' + (
        f' and to the other {V - n:,} in {groups} groups; approximate where weights differ from 1' if groups
        else '; exact to rounding')
    return dict(names=names, k=k, texts=texts, place=p.place.tolist(), words=words, keys=keys, exact=exact,
                about=s.about(), **{name: packed(x) for name, x in arrays.items()})


def write_page(s: Subject, ids: list[int], extra: list[int], file: Path, notices: list[str]) -> str:
    """Write the page; returns what it was computed from, and how exactly."""
    data = page_data(s, ids, extra) | {'cropped': ' '.join(notices)}
    text = json.dumps(data, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    write_file(file, TEMPLATE.read_text(encoding='utf-8').replace('DATA', text))
    return f'{file.stat().st_size / 1e6:.2f} MB, {data["exact"]}'
