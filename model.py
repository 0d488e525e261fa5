"""The Backpack language model in one file.

Paper: Hewitt, Thickstun, Manning, Liang, ACL 2023, https://arxiv.org/abs/2305.16765
Code: https://github.com/john-hewitt/backpacks-flash-attn; checkpoint: stanfordnlp/backpack-gpt2

A Transformer turns a text into one vector per position and predicts the next token from it.
A Backpack gives every token of the vocabulary k sense vectors, the same in every text.
A Transformer still reads the text, but only to give each sense a non-negative weight.
The weighted sum of all senses of all tokens so far predicts the next token.
So every logit is a sum with one term for each sense of each token.
You can read these terms, and you can edit a sense without changing the weights.

    B         texts in a batch
    T         tokens in each text
    V         token ids that the tokenizer knows; E has V rows, or a few extra, unused ones
    d         width of a vector, n_embd
    k         senses per token, n_sense
    x_j       the token id at position j; i and j are positions, l is the number of a sense
    E         the token embeddings (V, d), wte.weight; the output layer is tied to them
    h         the Transformer's output (B, T, d)
    C         the senses (B, T, k, d); C[b, j, l] is sense l of token j
    alpha     the weights (B, k, T, T); position i gives alpha[b, l, i, j] to sense l of token j
    o         the weighted sum (B, T, d): o_i = sum_j sum_l alpha_lij C(x_j)_l

The model is five equations, numbered as in the paper. Backpack.forward has them as five lines:

    h = contextualizer(wte(idx))       # (B, T, d)       Eq. 11, a GPT-2
    C = senses(idx)                    # (B, T, k, d)    Eq. 10, a small network on each embedding
    alpha = sense_weights(h)           # (B, k, T, T)    Eq. 12, attention without values
    o = weighted_sum(alpha, C)         # (B, T, d)       Eq. 2
    logits = project(o)                # (B, T, V)       Eq. 9, o E^T

An example to work out by hand (a test runs it): two senses, two dimensions, skateboard and health.
C(trick) = [(1, 0), (0, 0)] and C(sick) = [(1, 0), (0, 1)]. At the end of "trick sick", sense 0 has
weight 1/2 on both tokens; sense 1 has weight 1 on trick, where it is zero, and 0 on sick.
So o = 1/2 (1, 0) + 1/2 (1, 0) + 1 (0, 0) + 0 (0, 1) = (1, 0): skateboard, not health.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    """Shape of a model. ValueError unless its numbers fit together."""

    block_size: int = 512    # longest text the model can read, in tokens
    vocab_size: int = 50257  # rows of the embedding matrix, unused ones included
    n_vocab: int = 0         # V, ids that the tokenizer knows (0: vocab_size)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k (0: a GPT, which has no senses)
    sense_hidden: int = 0    # hidden size of both sense MLPs (0: 4 n_embd, as published)
    dropout: float = 0.0     # dropout rate, in the contextualizer only: senses must not vary

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        too_large = {'dropout': 1, 'n_vocab': self.vocab_size + 1}
        for name, value in vars(self).items():
            least = 0 if name in ('n_sense', 'dropout') else 1
            is_right_type = type(value) is int or name == 'dropout'
            is_in_range = least <= value < too_large.get(name, math.inf)  # NaN is not
            if not (is_right_type and is_in_range):
                raise ValueError(f'{name} is {value!r}, which is out of range')
        if self.n_embd % self.n_head or self.n_embd % (self.n_sense or 1):
            raise ValueError(f'n_head and n_sense must divide n_embd: {self}')


# -----------------------------------------------------------------------------
# The contextualizer, a GPT-2. Skip this if you know nanoGPT (MLP and split_heads are used below).


class MLP(nn.Module):
    """Two linear layers and a GELU, (.., n_in) -> (.., n_out), where .. is any number of axes."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate='tanh')  # (.., n_hidden)
        return self.c_proj(x)  # (.., n_out)


def split_heads(x: Tensor, parts: int, n: int) -> Tensor:
    """Split a projection (B, T, parts * n * size) into parts with n heads, (B, n, T, size) each."""
    x = x.unflatten(-1, (parts, n, -1))  # (B, T, parts, n, size)
    return x.permute(2, 0, 3, 1, 4)  # (parts, B, n, T, size)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions j <= i, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = split_heads(self.c_attn(x), 3, self.n_head)  # (B, n_head, T, d/n_head)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # (B, T, d), heads side by side
        return self.c_proj(y)


class Block(nn.Module):
    """One pre-norm Transformer layer with residual connections, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config.n_embd, 4 * config.n_embd, config.n_embd)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Contextualizer(nn.Module):
    """Eq. 11, h = Transformer(E[x]): embeddings (B, T, d) -> contextual vectors h (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        if T > len(self.wpe.weight):
            raise ValueError(f'the text has {T} tokens; block_size is {len(self.wpe.weight)}')
        x = self.drop(x + self.wpe.weight[:T])  # (B, T, d) + (T, d), positions 0 to T - 1
        for block in self.blocks:
            x = block(x)  # (B, T, d)
        return self.ln_f(x)


def init_weights(part: nn.Module, n_layer: int) -> None:
    """Initialize as GPT-2 does: normal weights, smaller in every c_proj, and zero biases."""
    for name, module in part.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if name.endswith('c_proj'):
                std /= math.sqrt(2 * n_layer)
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """The baseline Transformer, a GPT-2, whose logits are h E^T. It has no senses: n_sense is 0."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = replace(config, n_sense=0)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config)
        init_weights(self, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.contextualizer(self.wte(idx))  # (B, T, d)
        logits = F.linear(h, self.wte.weight)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


# -----------------------------------------------------------------------------
# The Backpack: senses, their weights, and their sum.


class SenseNetwork(nn.Module):
    """Eq. 10, C(x) = FF(E[x]): the embedding of a token (.., d) -> its k senses (.., k, d).

    A.1 calls ln_2 and the residual around mlp unintended; published weights need both. No dropout.
    """

    def __init__(self, config: Config):
        super().__init__()
        d = config.n_embd
        self.n_sense = config.n_sense
        self.ln_0 = nn.LayerNorm(d)
        self.ln_1 = nn.LayerNorm(d)
        self.mlp = MLP(d, config.sense_hidden, d)
        self.ln_2 = nn.LayerNorm(d)
        self.final_mlp = MLP(d, config.sense_hidden, config.n_sense * d)

    def forward(self, e: Tensor) -> Tensor:
        r = e + self.ln_0(e)  # (.., d), the embedding plus its LayerNorm: as published
        r = r + self.mlp(self.ln_1(r))  # (.., d)
        C = self.final_mlp(self.ln_2(r))  # (.., k*d), all senses side by side
        return C.unflatten(-1, (self.n_sense, -1))  # (.., k, d), one row per sense


class SenseWeights(nn.Module):
    """Eq. 12: h (B, T, d) -> alpha (B, k, T, T), causal attention without values.

    One head per sense: alpha_l is the softmax over j <= i of query_l key_l^T / sqrt(d/k), so each
    sense's weights sum to 1. The paper has no division and no bias; its published code has both.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        query, key = split_heads(self.c_attn(h), 2, self.n_sense)  # (B, k, T, d/k) each
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT  # (B, k, T, T)
        future = torch.full_like(scores[0, 0], -math.inf).triu(1)  # (T, T), -inf where j > i
        # In the type of the parameters: under autocast, a softmax in bfloat16 would not sum to 1.
        return (scores + future).softmax(dim=-1, dtype=self.c_attn.weight.dtype)


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Compute Eq. 2, weights (B, k, T, T) and senses (B, T, k, d) -> o (B, T, d)."""
    B, k, _, T = alpha.shape
    assert C.shape[:3] == (B, T, k)  # einsum would repeat an axis of size 1
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """A Backpack language model; ValueError if config has no senses.

    contextualizer is any module (B, T, d) -> (B, T, d) that does not look ahead, such as a wrapped
    LSTM (section 8); by default a GPT-2. One that you pass keeps its weights.
    """

    def __init__(self, config: Config, contextualizer: nn.Module | None = None):
        super().__init__()
        if config.n_sense == 0:
            raise ValueError('a Backpack needs n_sense >= 1; the model without senses is a GPT')
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config) if contextualizer is None else contextualizer
        self.sense_network = SenseNetwork(config)
        self.sense_weights = SenseWeights(config)
        for part in self.children():
            if part is not contextualizer:
                init_weights(part, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, C: Tensor | None = None
                ) -> Tensor:
        """Return the logits (B, T, V) of the token after each position of idx (B, T).

        With targets (B, T), the ids that follow or -1 to skip one, return their mean loss in nats.
        C (B, T, k, d) are the senses to sum, by default senses(idx). An edit is a function
        (ids, C) -> C, so model(idx, C=edit(idx, model.senses(idx))) is the edited model.
        """
        h = self.contextualizer(self.wte(idx))        # (B, T, d)      Eq. 11
        C = self.senses(idx) if C is None else C      # (B, T, k, d)   Eq. 10
        alpha = self.sense_weights(h)                 # (B, k, T, T)   Eq. 12
        o = weighted_sum(alpha, C)                    # (B, T, d)      Eq. 2
        logits = self.project(o)                      # (B, T, V)      Eq. 9
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def senses(self, ids: Tensor) -> Tensor:
        """Compute Eq. 10, the senses C of ids of any shape (..): (.., k, d)."""
        return self.sense_network(self.wte(ids))

    def alpha(self, idx: Tensor) -> Tensor:
        """Compute Eq. 11 and 12, the weights of senses in the texts idx (B, T): (B, k, T, T)."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Compute Eq. 9, v E^T, for vectors v (.., d), such as o or a sense: logits (.., V)."""
        return F.linear(v, self.wte.weight)


# -----------------------------------------------------------------------------
# Distinct ids, a fast form for training that a learner may skip: a batch needs the senses of an id
# once. The caller finds the ids, because a compiled graph cannot depend on how many there are.


def distinct_ids(idx: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct ids of texts idx (B, T): ids (n,) and places (B, T), idx = ids[places]."""
    ids, places = idx.unique(return_inverse=True)
    ids = F.pad(ids, (0, -len(ids) % 64))  # by id 0 to a multiple of 64: few shapes occur
    return ids, places


class DistinctIds(nn.Module):
    """The faster form that train.py trains. It computes model(idx, targets)."""

    def __init__(self, model: Backpack | GPT):
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor | None, ids: Tensor, places: Tensor) -> Tensor:
        """Return what the model does for idx and targets (B, T), given the distinct_ids of idx."""
        if isinstance(self.model, GPT):  # so that train.py treats both alike
            return self.model(idx, targets)
        senses = self.model.senses(ids).flatten(1)  # (n, k*d)
        # senses[places] would sum the gradients of an id in bfloat16 under autocast, where 256 + 1
        # is 256: a frequent id would lose most of its gradient. F.embedding in float32 does not.
        table = senses.to(self.model.wte.weight.dtype)
        C = F.embedding(places, table).to(senses.dtype)  # (B, T, k*d), senses of every token
        C = C.unflatten(-1, (self.model.config.n_sense, -1))  # (B, T, k, d)
        return self.model(idx, targets, C=C)


# -----------------------------------------------------------------------------
# Generation with a cache, a fast form that a learner may skip: each token is read once. S counts
# the tokens so far; T of them are new, first the whole prompt, then one at a time.


class Cache:
    """What has been computed for the tokens read so far."""

    def __init__(self, capacity: int):
        self.capacity = capacity  # tokens it has room for
        self.length = 0  # tokens it holds; next_logits advances it
        self.tensors = {}

    def extend(self, key: object, new: Tensor) -> Tensor:
        """Append new (B, T, ..) to the tensor under a key, and return all of it (B, S, ..)."""
        if key not in self.tensors:
            B, _, *rest = new.shape
            self.tensors[key] = new.new_empty(B, self.capacity, *rest)
        S = self.length + new.shape[1]
        self.tensors[key][:, self.length:S] = new
        return self.tensors[key][:, :S]


def contextualize(contextualizer: Contextualizer, x: Tensor, cache: Cache) -> Tensor:
    """Compute h (B, T, d) of T new tokens. Equals contextualizer(x of all S)[:, -T:]."""
    T = x.shape[1]
    assert cache.length == 0 or T == 1  # a whole prompt: causal mask; one new token: no mask
    x = x + contextualizer.wpe.weight[cache.length:cache.length + T]  # (B, T, d)
    for block in contextualizer.blocks:
        qkv = cache.extend(block, block.attn.c_attn(block.ln_1(x)))  # (B, S, 3*d)
        query, key, value = split_heads(qkv, 3, block.attn.n_head)  # (B, n_head, S, d/n_head)
        query = query[:, :, -T:]  # (B, n_head, T, d/n_head), of the new tokens
        y = F.scaled_dot_product_attention(query, key, value, is_causal=T > 1)
        y = y.transpose(1, 2).flatten(2)  # (B, T, d), heads side by side
        x = x + block.attn.c_proj(y)
        x = x + block.mlp(block.ln_2(x))
    return contextualizer.ln_f(x)


def next_logits(model: Backpack | GPT, text: Tensor, cache: Cache, edit: Callable | None) -> Tensor:
    """Compute logits (B, V) after text (B, S). Equals model(text, C=edit(text, C))[:, -1]."""
    new = text[:, cache.length:]  # (B, T)
    if isinstance(model.contextualizer, Contextualizer):
        h = contextualize(model.contextualizer, model.wte(new), cache)  # (B, T, d)
    else:  # another contextualizer reads all S tokens each time
        h = model.contextualizer(model.wte(text))[:, cache.length:]  # (B, T, d)
    o = h[:, -1:]  # (B, 1, d), what a GPT projects
    if isinstance(model, Backpack):
        C = cache.extend('senses', model.senses(new))  # (B, S, k, d), Eq. 10, kept unedited
        if edit is not None:
            C = edit(text, C)
        qk = cache.extend('query, key', model.sense_weights.c_attn(h))  # (B, S, 2*d)
        query, key = split_heads(qk, 2, model.config.n_sense)  # (B, k, S, d/k) each
        last = query[:, :, -1:]  # (B, k, 1, d/k)
        scores = (last / math.sqrt(last.shape[-1])) @ key.mT  # (B, k, 1, S)
        alpha = scores.softmax(dim=-1)  # (B, k, 1, S), Eq. 12
        o = weighted_sum(alpha, C)  # (B, 1, d), Eq. 2
    cache.length = text.shape[1]
    return F.linear(o[:, 0], model.wte.weight[:model.config.n_vocab])  # (B, V), Eq. 9


def draw(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Draw an id for each row of logits (B, V): (B, 1). ValueError for a setting out of range."""
    if temperature < 0:
        raise ValueError(f'temperature is {temperature}, but must be at least 0')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k is {top_k}, but must be at least 1')
    if temperature < 1e-30:  # 0, or nearly
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        top, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, top)  # (B, V), -inf elsewhere
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1)


@torch.no_grad()
def generate(model: Backpack | GPT, idx: Tensor, n: int, temperature: float = 1.0,
             top_k: int | None = None, *, edit: Callable | None = None, stop: int | None = None
             ) -> Tensor:
    """Continue the prompts idx (B, P) by n ids: (B, P + n), or fewer with stop.

    Greedy at temperature 0. It stops once every text has drawn the id stop. A longer prompt is cut
    to its last block_size tokens; a text that outgrows block_size, to its last block_size // 2.
    """
    assert edit is None or isinstance(model, Backpack)  # a GPT has no senses to edit
    block_size = model.config.block_size
    n_prompt = idx.shape[1]
    start = max(0, n_prompt - block_size)  # the first token that is read
    cache = Cache(min(block_size, n_prompt + n))
    for _ in range(n):
        if idx.shape[1] - start > block_size:
            start = idx.shape[1] - max(1, block_size // 2)
            cache = Cache(block_size)
        logits = next_logits(model, idx[:, start:], cache, edit)  # (B, V)
        idx = torch.cat([idx, draw(logits, temperature, top_k)], dim=1)  # one token longer
        if stop is not None and (idx[:, n_prompt:] == stop).any(dim=1).all():
            break
    return idx


Backpack.generate = GPT.generate = generate  # so that people can write model.generate(idx, n)
