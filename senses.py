"""What a Backpack is for: find the sense of a word that does something, and change it everywhere.

Every change is an edit: a function of ids (B, T) and their senses (B, T, k, d) that returns the senses to sum
in their place. model(idx, edit=...) and model.generate(idx, ..., edit=...) apply it, and no weight changes.
"""

import tiktoken
import torch
from torch import Tensor

from model import Backpack, Edit, UserError


def word_id(encoding: tiktoken.Encoding, word: str) -> int:
    """The id of a word inside a text, the space before it included; UserError where it is several tokens."""
    ids = encoding.encode_ordinary(' ' + word)
    if len(ids) != 1:
        pieces = ' + '.join(repr(encoding.decode_single_token_bytes(i).decode(errors='replace')) for i in ids)
        raise UserError(f'{word!r} is no single word of this vocabulary but {pieces}; take one that is')
    return ids[0]


def word_forms(encoding: tiktoken.Encoding, word: str) -> list[int]:
    """The ids a word goes by: inside a text and, where that is one token too, at its start."""
    at_start = encoding.encode_ordinary(word)
    return [word_id(encoding, word)] + (at_start if len(at_start) == 1 else [])


@torch.no_grad()
def separation(model: Backpack, word: int, a: int, b: int) -> Tensor:
    """How strongly each sense of a word speaks for a over b, C(word)_l . (E_a - E_b): (k,), in logits."""
    C = model.senses(torch.tensor([[word]], device=model.wte.weight.device))[0, 0]  # (k, d)
    return C @ (model.wte.weight[a] - model.wte.weight[b])


def scale_senses(words: list[int], senses: list[int], factor: float) -> Edit:
    """The edit that multiplies the given senses of the given word ids by factor, everywhere; 0 is off."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Scaled senses (B, T, k, d)."""
        hit = torch.isin(idx, torch.tensor(words, device=idx.device))  # (B, T)
        chosen = torch.zeros(C.shape[2], dtype=torch.bool, device=idx.device)
        chosen[senses] = True  # (k,)
        hit = (hit[..., None] & chosen)[..., None]  # (B, T, k, 1)
        return torch.where(hit, factor * C, C)  # (B, T, k, d)
    return edit


def compose(edits: list[Edit]) -> Edit:
    """The edits one after another."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        """Senses (B, T, k, d) after all edits."""
        for one in edits:
            C = one(idx, C)
        return C
    return edit


def parse_word_senses(text: str, model: Backpack, encoding: tiktoken.Encoding) -> tuple[str, list[int], str]:
    """The word and the senses in WORD:SENSE[,SENSE...] or WORD:A/B, and a line on how they were chosen.

    WORD:A/B is the sense of WORD with the largest |C(WORD)_l . (E_A - E_B)|.
    """
    word, _, which = text.rpartition(':')
    k = model.config.n_sense
    if not k:
        raise UserError('this is a Transformer; only a Backpack has senses to turn off')
    if not word or not which:
        raise UserError(f'{text!r} is not WORD:SENSE[,SENSE...] or WORD:A/B, as in nurse:10 or nurse:she/he')
    if '/' in which:
        a, _, b = which.partition('/')
        if not a or not b:
            raise UserError(f'{text!r} is not WORD:A/B, as in nurse:she/he')
        scores = separation(model, *(word_id(encoding, w) for w in (word, a, b)))  # (k,)
        best, *rest = scores.abs().argsort(descending=True).tolist()
        line = f'sense {best} of {word}, which most separates {a} from {b} (by {scores[best]:+.2f} logits'
        return word, [best], line + (f'; sense {rest[0]}: {scores[rest[0]]:+.2f})' if rest else ')')
    word_id(encoding, word)
    try:
        senses = [int(s) for s in which.split(',')]
    except ValueError:
        raise UserError(f'{text!r}: {which!r} is neither sense numbers, as 3,10, nor two words, as she/he')
    for sense in senses:
        if not 0 <= sense < k:
            raise UserError(f'{text!r}: there is no sense {sense}; this model has senses 0 to {k - 1}')
    return word, senses, f'sense{"s" * (len(senses) > 1)} {", ".join(map(str, senses))} of {word}'
