"""The page: a prediction whose senses are dragged."""

import base64
import codecs
import json
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

import senses
from model import Backpack, weighted_sum
from rucksack.common import UserError, progress, write_file
from senses import LOGITS_AT_ONCE


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
# A page.

TEMPLATE = Path(__file__).with_name('page.html')
PAGE_BYTES = 4_800_000  # of a page, at most: what a person can mail, and a phone can load
EXTREMES = 6            # words that a sense raises most, and lowers most, on a card


def written(encoding: tiktoken.Encoding, token: int) -> str:
    """A token as a page shows it, without the space before it; what cannot be seen is written out."""
    text = encoding.decode_single_token_bytes(token).decode('utf-8', errors='backslashreplace')
    text = text[1:] if len(text) > 1 and text[0] == ' ' else text
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text).replace(' ', '␣')


def label(encoding: tiktoken.Encoding, token: int) -> str:
    """The same with a + where a word has no space before it, which tells it from the one that has."""
    glued = encoding.decode_single_token_bytes(token)[:1] != b' ' and written(encoding, token)[:1].isalnum()
    return '+' * glued + written(encoding, token)


def texts_of(encoding: tiktoken.Encoding, ids: list[int]) -> list[str]:
    """The text of each token; that of a character of several tokens stands at its last."""
    decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
    texts = [decoder.decode(encoding.decode_single_token_bytes(i)) for i in ids]
    return texts[:-1] + [texts[-1] + decoder.decode(b'', final=True)]


def packed(x: Tensor) -> dict[str, str]:
    """Numbers for JavaScript: the typed array to put them in, flat, and its bytes in base64."""
    kind = 'Float32' if x.is_floating_point() else 'Uint32' if x.max() >= 1 << 16 else 'Uint16'
    data = x.cpu().numpy().astype({'Float32': '<f4', 'Uint32': '<u4', 'Uint16': '<u2'}[kind]).tobytes()
    return {'type': f'{kind}Array', 'base64': base64.b64encode(data).decode()}


def page_data(model: Backpack, encoding: tiktoken.Encoding, ids: list[int], asked: list[int],
              room: int) -> tuple[dict, Dials]:
    """What a page shows of the prediction after the prompt ids, in at most room bytes; asked are words to
    be looked up besides those of the prompt, and if there is room others are, in the order of their ids.
    """
    c, names = model.config, [label(encoding, v) for v in range(model.config.n_vocab)]
    words = sorted(set(ids))  # (U,)
    known = list(dict.fromkeys(words + asked))
    column = (len(words) * c.n_sense * 4 + 8) * 4 / 3  # bytes of a column of parts, base and next, in base64
    entry = 6 if c.n_vocab <= 1 << 16 else 8  # bytes of a score and an id
    card = (c.n_sense * 2 * EXTREMES * entry + 4) * 4 / 3  # bytes of a word of scores, extremes and known
    room -= len(json.dumps(names)) + len(ids) * (c.n_sense * 6 + 40) + len(known) * card
    columns = min(c.n_vocab, int(0.8 * room / column))
    if columns < min(c.n_vocab, 64):
        raise UserError(f'{len(words)} different words of {c.n_sense} senses each, and {len(asked)} to look '
                        'up, are too much for a page; give a shorter prompt')
    others = [v for v in sorted(set(range(c.n_vocab)) - set(known))
              if '\\' not in names[v] and any(map(str.isalnum, names[v]))]
    known += others[:int((room - columns * column) / card)]
    dials = Dials(model, ids, columns)
    chunks = senses.senses_of(model, torch.tensor(known, device=model.wte.weight.device), 'reading senses')
    extremes, scores = (torch.cat(x) for x in zip(*(senses.extremes(model, C, EXTREMES) for C in chunks)))
    texts = texts_of(encoding, ids)
    plain = [written(encoding, w) for w in words]
    keys = [p if plain.count(p) == 1 else f'{p}@{ids.index(w)}' for p, w in zip(plain, words)]
    return dict(names=names, k=c.n_sense, texts=texts, place=dials.place.tolist(), words=words, keys=keys,
                alpha=packed(dials.alpha), next=packed(dials.next), base=packed(dials.base),
                parts=packed(dials.parts), known=packed(torch.tensor(known)), extremes=packed(extremes),
                scores=packed(scores)), dials


def write_page(model: Backpack, encoding: tiktoken.Encoding, ids: list[int], asked: list[int], file: Path,
               about: str, cropped: str) -> str:
    """Write the page, with lines about it at its end; what it was computed from, and how exactly."""
    template = TEMPLATE.read_text(encoding='utf-8')
    data, dials = page_data(model, encoding, ids, asked, PAGE_BYTES - len(template.encode()))
    n, others = len(dials.next), model.config.n_vocab - len(dials.next)
    groups = f' and to the other {others:,} in {len(dials.base) - n} groups' if others else ''
    exact = (f'computed from what each sense adds to {n:,} words{groups}; over 1,000 random settings of the '
             f'weights, the largest error of a probability is {dials.error():.1e}'
             + ' (no bound; sample.py --senses-scale is exact)' * bool(others))
    data['about'] = [
        f'{about}.', f'The probabilities are {exact}.',
        'A + marks what has no space before it: a piece of a word, or the start of a text. What looks like '
        '\\xd7 is a byte of a character.',
        'Another prompt takes the model: python sample.py --html FILE --start TEXT']
    data['cropped'] = cropped
    text = json.dumps(data, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    write_file(file, template.replace('DATA', text))
    return f'{file.stat().st_size / 1e6:.2f} MB, {exact}'
