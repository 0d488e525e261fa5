"""Generation with a cache: Cached(model).generate draws what model.generate does, faster.

S counts the tokens of a text so far. T of them are new: first the whole prompt, then single tokens.
Other letters are as in model.py.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rucksack.model import (
    GPT,
    MLP,
    Backpack,
    Block,
    CausalSelfAttention,
    Contextualizer,
    SenseNetwork,
    SenseWeights,
    split_heads,
    weighted_sum,
)


class Cache:
    """Tensors of the tokens read so far, by name, with room for a fixed number of tokens."""

    def __init__(self, room: int):
        self.room = room
        self.tensors = {}

    def extend(self, name: object, start: int, new: Tensor) -> Tensor:
        """Store new (B, T, ..) after the first start tokens of a name; return all (B, S, ..)."""
        if start == 0:
            B, _, *rest = new.shape
            self.tensors[name] = new.new_empty(B, self.room, *rest)
        tensor = self.tensors[name]  # (B, room, ..)
        S = start + new.shape[1]
        tensor[:, start:S] = new
        return tensor[:, :S]


def contextualize(contextualizer: Contextualizer, e: Tensor, start: int, cache: Cache) -> Tensor:
    """Compute Eq. 11 for T new tokens, after start tokens in the cache: e (B, T, d) -> h (B, T, d).

    Equals contextualizer(e of all S tokens)[:, start:], without dropout.
    """
    T = e.shape[1]
    assert start == 0 or T == 1  # a whole prompt: causal mask; one new token: no mask
    S = start + T
    if S > len(contextualizer.wpe.weight):
        raise ValueError(f'cannot read {S} tokens; block_size is {len(contextualizer.wpe.weight)}')
    h = e + contextualizer.wpe.weight[start:S]  # (B, T, d)
    for block in contextualizer.blocks:
        attn = block.attn
        qkv = attn.c_attn(block.ln_1(h))  # (B, T, 3*d)
        qkv = cache.extend(block, start, qkv)  # (B, S, 3*d)
        query, key, value = split_heads(qkv, 3, attn.n_head)  # (B, n_head, S, d/n_head) each
        query = query[:, :, start:]  # (B, n_head, T, d/n_head), for the new tokens
        y = F.scaled_dot_product_attention(query, key, value, is_causal=T > 1)
        y = y.transpose(1, 2).flatten(2)  # (B, T, d), heads side by side
        h = h + attn.c_proj(y)
        h = h + block.mlp(block.ln_2(h))
    return contextualizer.ln_f(h)


# Modules of these classes, and no others, make up a model whose forward Cached repeats.
REPEATED = {
    Backpack, GPT, SenseNetwork, SenseWeights, Contextualizer, Block, CausalSelfAttention, MLP,
    nn.Embedding, nn.Linear, nn.LayerNorm, nn.Dropout, nn.ModuleList}


class Cached:
    """A model that continues texts without reading a token twice: Cached(model).generate(idx, n).

    It draws the same ids as model.generate. A text is read whole unless it is the last text plus a
    token. Past block_size, every text is read whole, because each new token pushes out the first.
    A model with hooks, or parts of other classes than model.py's, is called for every token.
    """

    generate = Backpack.generate

    def __init__(self, model: Backpack | GPT):
        self.model = model
        self.config = model.config
        changed = [
            module for module in model.modules()
            if type(module) not in REPEATED or 'forward' in vars(module)
            or module._forward_hooks or module._forward_pre_hooks]
        self.is_repeated = not changed
        self.cache = Cache(model.config.block_size)
        self.read = None  # the texts in the cache

    def n_read(self, idx: Tensor) -> int:
        """Count the cached tokens of texts (B, S): all but one, or 0 if the texts are others."""
        if self.read is not None and torch.equal(idx[:, :-1], self.read):
            return idx.shape[1] - 1
        self.read = None
        return 0

    def senses(self, idx: Tensor) -> Tensor:
        """Compute Eq. 10 for texts (B, S): C (B, S, k, d), a copy that an edit may write into."""
        start = self.n_read(idx)
        return self.all_senses(idx, start).clone()

    def all_senses(self, idx: Tensor, start: int) -> Tensor:
        """Compute Eq. 10 for texts (B, S), of which start tokens are in the cache: (B, S, k, d)."""
        ids, places = idx[:, start:].unique(return_inverse=True)  # (n,) and (B, T)
        C = self.model.senses(ids)  # (n, k, d)
        return self.cache.extend('C', start, C[places])

    def last_alpha(self, h: Tensor, start: int) -> Tensor:
        """Compute Eq. 12 for the last position, given new h (B, T, d): alpha (B, k, 1, S)."""
        qk = self.model.sense_weights.c_attn(h)  # (B, T, 2*d)
        qk = self.cache.extend('qk', start, qk)  # (B, S, 2*d)
        query, key = split_heads(qk, 2, self.config.n_sense)  # (B, k, S, d/k) each
        last = query[:, :, -1:]  # (B, k, 1, d/k)
        scores = (last / math.sqrt(last.shape[-1])) @ key.mT  # (B, k, 1, S)
        return scores.softmax(dim=-1)

    def __call__(self, idx: Tensor, *, C: Tensor | None = None) -> Tensor:
        """Return the logits (B, 1, vocab_size) of the token after texts (B, S).

        C (B, S, k, d) are the senses to sum, as in Backpack.forward.
        """
        if not self.is_repeated:
            given = {} if C is None else {'C': C}
            return self.model(idx, **given)[:, -1:]
        start = self.n_read(idx)
        e = self.model.wte(idx[:, start:])  # (B, T, d)
        h = contextualize(self.model.contextualizer, e, start, self.cache)  # (B, T, d)
        o = h[:, -1:]  # (B, 1, d), what a GPT projects
        if self.config.n_sense:
            if C is None:
                C = self.all_senses(idx, start)  # (B, S, k, d)
            alpha = self.last_alpha(h, start)  # (B, k, 1, S)
            o = weighted_sum(alpha, C)  # (B, 1, d), Eq. 2
        self.read = idx
        return F.linear(o, self.model.wte.weight)  # (B, 1, vocab_size), Eq. 9
