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
from rucksack.common import UserError, write_file
from rucksack.table import Subject

TEMPLATE = Path(__file__).with_name('page.html')
PAGE_BYTES = 4_800_000  # of a page, at most: what a person can mail, and a phone can load
EXTREMES = 6            # words that a sense raises most, and lowers most, on a card


class LinearizedPrediction:
    """The prediction after a text, as a function of a weight on each sense of each of its U distinct ids.

    Eq. 2 sorted by ids is o(w) = sum_u sum_l w_ul taken_ul C(u)_l, where taken_ul adds alpha_lj up over the
    positions j at which u stands. So logits are linear in w, those at weight 1 plus sum_ul (w_ul - 1) times
    what sense l of u adds to them. scale_senses([u], [l], w_ul) edits the model to the same.

        ids, place      (U,), (T,)           the distinct ids, and which of them stands at each position
        alpha, taken    (T, k), (U, k)       the weights that the last position gives, at w = 1
        next            (N,)                 the next ids that have a column each, likely ones first
        base, parts     (N+M,), (U, k, N+M)  logits at w = 1, and what each sense adds to them

    A vocabulary larger than columns has M columns for groups of its other ids. A group is like one id: its
    base is the log-sum-exp of theirs, its parts are the means of theirs, weighted by probability. So its mass
    is right at w = 1, and its derivative too.
    """

    @torch.no_grad()
    def __init__(self, model: Backpack, ids: list[int], columns: int):
        idx, E = torch.tensor([ids], device=model.wte.weight.device), model.wte.weight[:model.config.n_vocab]
        self.ids, self.place = idx[0].unique(return_inverse=True)  # (U,), (T,)
        self.alpha, C = model.alpha(idx)[0, :, -1].T, model.senses(self.ids)  # (T, k), (U, k, d)
        self.taken = torch.zeros_like(C[..., 0]).index_add(0, self.place, self.alpha)  # (U, k)
        adds = self.taken[..., None] * C  # (U, k, d)
        logits = E @ adds.sum((0, 1))  # (V,)
        generator = torch.Generator().manual_seed(0)
        random = 2 * torch.rand(64, *self.taken.shape, generator=generator).to(adds)  # (64, U, k)
        moved = torch.einsum('nul,uld->nd', random, adds) @ E.T  # (64, V): logits at random weights
        order = torch.cat([logits[None], moved]).softmax(-1).amax(0).argsort(descending=True)  # (V,)
        groups = min(256, columns // 2) if columns < len(E) else 0
        self.next, others = order[:columns - groups], order[columns - groups:]  # (N,), (V - N,)
        self.base, vectors = logits[self.next], E[self.next]  # (N,), (N, d)
        if groups:  # of ids that move alike
            moves = (moved - moved.mean(0))[:, others].T  # (V - N, 64)
            seeds = moves[torch.randperm(len(others), generator=generator)[:groups]]
            group = torch.cdist(moves, seeds).argmin(1)  # (V - N,), each one of M
            p = logits[others].softmax(0)  # (V - N,)
            mass = p.new_zeros(groups).index_add(0, group, p).clamp(min=1e-38)  # (M,)
            sums = E.new_zeros(groups, E.shape[1]).index_add(0, group, p[:, None] * E[others])  # (M, d)
            self.base = torch.cat([self.base, mass.log() + logits[others].logsumexp(0)])  # (N+M,)
            vectors = torch.cat([vectors, sums / mass[:, None]])  # (N+M, d)
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


def page_data(s: Subject, ids: list[int], extra: list[int], size: int) -> tuple[dict, LinearizedPrediction]:
    """What a page shows of the prediction after the prompt ids, in at most size bytes; extra are ids to look
    up besides those of the prompt, and others join them where there is space.
    """
    c, encoding = s.model.config, s.encoding
    names = [label(encoding, v) for v in range(c.n_vocab)]
    words = sorted(set(ids))  # (U,)
    known = list(dict.fromkeys(words + extra))
    column = (len(words) * c.n_sense * 4 + 8) * 4 / 3  # bytes of a column of parts, base and next, in base64
    entry = 6 if c.n_vocab <= 1 << 16 else 8  # bytes of a score and an id
    card = (c.n_sense * 2 * EXTREMES * entry + 4) * 4 / 3  # bytes of an id in scores, extremes and known
    size -= len(json.dumps(names)) + len(ids) * (c.n_sense * 6 + 40) + len(known) * card
    columns = min(c.n_vocab, int(0.8 * size / column))
    if columns < min(c.n_vocab, 64):
        raise UserError(f'{len(words)} different words of {c.n_sense} senses each, and {len(extra)} to look '
                        'up, are too much for a page; give a shorter prompt')
    others = [v for v in sorted(set(range(c.n_vocab)) - set(known))
              if '\\' not in names[v] and any(map(str.isalnum, names[v]))]
    known += others[:int((size - columns * column) / card)]
    prediction = LinearizedPrediction(s.model, ids, columns)
    chunks = senses.senses_in_chunks(s.model, torch.tensor(known, device=s.device), 'reading senses')
    extremes, scores = (torch.cat(x) for x in zip(*(senses.extremes(s.model, C, EXTREMES) for C in chunks)))
    decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')  # a character may be several tokens
    texts = [decoder.decode(encoding.decode_single_token_bytes(i), final=j == len(ids) - 1)
             for j, i in enumerate(ids)]
    plain = [written(encoding, w) for w in words]
    keys = [p if plain.count(p) == 1 else f'{p}@{ids.index(w)}' for p, w in zip(plain, words)]
    return dict(names=names, k=c.n_sense, texts=texts, place=prediction.place.tolist(), words=words,
                keys=keys, alpha=packed(prediction.alpha), next=packed(prediction.next),
                base=packed(prediction.base), parts=packed(prediction.parts), extremes=packed(extremes),
                known=packed(torch.tensor(known)), scores=packed(scores)), prediction


def write_page(s: Subject, ids: list[int], extra: list[int], file: Path, notices: list[str]) -> str:
    """Write the page, with lines about it at its end; returns what it was computed from, and how exactly."""
    template = TEMPLATE.read_text(encoding='utf-8')
    data, prediction = page_data(s, ids, extra, PAGE_BYTES - len(template.encode()))
    n, others = len(prediction.next), s.model.config.n_vocab - len(prediction.next)
    groups = f' and to the other {others:,} in {len(prediction.base) - n} groups' if others else ''
    exact = (f'computed from what each sense adds to {n:,} words{groups}; '
             + ('approximate where weights differ from 1' if others else 'exact to rounding'))
    data['about'] = [
        f'{s.about()}.', f'The probabilities are {exact}.',
        'A + marks what has no space before it: a piece of a word, or the start of a text. What looks like '
        '\\xd7 is a byte of a character.',
        'Another prompt takes the model: python sample.py --html FILE --start TEXT']
    data['cropped'] = ' '.join(notices)
    text = json.dumps(data, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    write_file(file, template.replace('DATA', text))
    return f'{file.stat().st_size / 1e6:.2f} MB, {exact}'
