"""The Backpack language model in one file.

Paper: Hewitt, Thickstun, Manning, Liang, ACL 2023, https://arxiv.org/abs/2305.16765
Published code and weights: https://github.com/john-hewitt/backpacks-flash-attn,
https://huggingface.co/stanfordnlp/backpack-gpt2

A Transformer turns a text into one vector per position and predicts the next token from it.
A Backpack gives every token of the vocabulary k sense vectors, the same in every text.
A Transformer still reads the text, but only to give each sense a non-negative weight.
The weighted sum of all senses of all tokens so far predicts the next token.
Given the weights, every logit is linear in the senses.
So you can read a sense, explain a prediction sense by sense, and edit a sense everywhere at once:
an edit changes senses and leaves the weights as they were.

    B         texts in a batch
    T         tokens in each text; with a cache, only those not yet in it
    S         tokens of a text so far, cached ones included; without a cache S = T
    V         rows of the embedding matrix, one per token id (and some unused)
    d         width of a vector, n_embd
    k         senses per token, n_sense
    x_j       the token id at position j
    E         the token embeddings wte.weight (V, d): the Transformer and the sense network read
              them, and the output is projected onto them
    h         the Transformer's output (B, T, d)
    C         the senses (B, S, k, d); C[b, j, l] is sense l of token j
    alpha     the weights (B, k, T, S); position i gives alpha[b, l, i, j] to sense l of token j
              (with a cache, row r of alpha is position i = S - T + r)
    o         the weighted sum (B, T, d): o_i = sum_j sum_l alpha_lij C(x_j)_l
    ..        any leading dimensions

The model is five equations, in order of computation and numbered as in the paper. Without a cache,
S = T:

    h = contextualizer(wte(idx))       # (B, T, d)       Eq. 11, a GPT-2
    C = senses(idx)                    # (B, T, k, d)    Eq. 10
    alpha = sense_weights(h)           # (B, k, T, T)    Eq. 12
    o = weighted_sum(alpha, C)         # (B, T, d)       Eq. 2
    logits = project(o)                # (B, T, V)       Eq. 9, o E^T

Backpack.forward computes them. For Eq. 12 it first computes queries and keys; then sum_in_blocks,
an optimised version, computes the softmax and the sum of Eq. 2 together. Each optimised version in
this file names its unoptimised version, simpler code with the same result; tests check that the two
agree.

Eq. 12 takes a softmax over the positions j <= i, separately for each sense l. So the weights that
sense l gets at these positions sum to one, and the weights of all k senses sum to k: senses do not
compete with each other.

An example to work out by hand (a test runs it). There are k = 2 senses and d = 2 axes,
skateboard and health. The text is "trick sick".
C(trick) = [(1, 0), (0, 0)] and C(sick) = [(1, 0), (0, 1)].
At "sick", sense 0 has weight 1/2 on both tokens; sense 1 has weight 1 on trick, where it is zero,
and 0 on sick.
So o = 1/2 (1, 0) + 1/2 (1, 0) + 1 (0, 0) + 0 (0, 1) = (1, 0): skateboard, not health.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

# An edit takes ids (B, S) and their senses C (B, S, k, d) and returns the senses to sum instead.
# It must not write into C, which may be a view of the cache.
Edit = Callable[[Tensor, Tensor], Tensor]

SIZES = {  # the paper's model sizes (section 4.1, Table 9)
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768),
}


@dataclass
class Config:
    """Shape of a model. ValueError if n_head or n_sense does not divide n_embd."""

    block_size: int = 512    # longest text the model can read, in tokens
    vocab_size: int = 50257  # V, rows of the embedding matrix, unused ones included
    n_vocab: int = 0         # ids that the tokenizer knows, the rest are unused (0: all V)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k; 0: a plain Transformer, the paper's baseline
    sense_hidden: int = 0    # hidden size of both sense MLPs (0: 4 n_embd, as published)
    dropout: float = 0.0     # dropout rate, in the contextualizer only: senses must not vary

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        heads = {'n_head': self.n_head}
        if self.n_sense != 0:
            heads['n_sense'] = self.n_sense
        for name, n in heads.items():
            if n < 1 or self.n_embd % n != 0:
                raise ValueError(f'n_embd = {self.n_embd} is not divisible by {name} = {n}')


# -----------------------------------------------------------------------------
# What makes the model a Backpack: the senses, their weights, and their sum.


class MLP(nn.Module):
    """Two linear layers with a GELU between them, (.., n_in) -> (.., n_out)."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)  # (.., n_hidden)
        x = F.gelu(x, approximate='tanh')
        return self.c_proj(x)  # (.., n_out)


class SenseNetwork(nn.Module):
    """Eq. 10, C(x) = FF(E[x]): the embedding of a token (.., d) -> its k senses (.., k, d).

    FF is the four lines of forward.
    Appendix A.1 calls ln_2 and the residual r + mlp(..) unintended; the published checkpoint needs
    both. Unlike the published code, we have no dropout here.
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

    There is one head per sense: alpha_l is the softmax over j <= i of query_l key_l^T / sqrt(d/k),
    where [query, key] is a linear projection of h. Its bias and the scaling by 1/sqrt(d/k) follow
    the published code; the paper has neither.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        query, key = self.query_and_key(h)
        return causal_softmax(query, key)

    def query_and_key(self, h: Tensor, cache: 'Cache | None' = None) -> tuple[Tensor, Tensor]:
        """Compute queries and keys, (B, k, T, d/k) each; with a cache, keys of all S tokens."""
        query, key = self.c_attn(h).chunk(2, dim=-1)  # (B, T, d) each
        query = split_heads(query, self.n_sense)  # (B, k, T, d/k)
        key = split_heads(key, self.n_sense)  # (B, k, T, d/k)
        if cache is not None:
            key = cache.extend((self, 'key'), key, dim=2)  # (B, k, S, d/k)
        return query, key


def split_heads(x: Tensor, n: int) -> Tensor:
    """Split the last axis into n heads: (B, T, n * size) -> (B, n, T, size)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def causal_softmax(query: Tensor, key: Tensor) -> Tensor:
    """Compute Eq. 12 at the last T positions, (B, k, T, d/k), (B, k, S, d/k) -> (B, k, T, S)."""
    T = query.shape[2]
    S = key.shape[2]
    d_head = query.shape[3]
    scores = (query / math.sqrt(d_head)) @ key.transpose(-2, -1)  # (B, k, T, S)
    # Row r of the scores is position i = S - T + r.
    future = torch.full_like(scores[0, 0], -math.inf)  # (T, S)
    future = future.triu(1 + S - T)  # (T, S), -inf where j > i
    return (scores + future).softmax(dim=-1)


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Compute Eq. 2, weights (B, k, T, S) and senses (B, S, k, d) -> o (B, T, d)."""
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """A Backpack or, if n_sense is 0, the baseline Transformer, whose logits are project(h).

    forward sums the senses C, by default senses(idx). An edit is a function (ids, C) -> C, so
    model(idx, C=edit(idx, model.senses(idx))) returns the logits of the edited model.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenizer: dict | None = None  # such as {'name': 'gpt2'}; set by loaders
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config)
        if config.n_sense:
            self.sense_network = SenseNetwork(config)
            self.sense_weights = SenseWeights(config)
        for name, module in self.named_modules():
            init_weights(name, module, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None, *,
                C: Tensor | None = None, cache: 'Cache | None' = None) -> Tensor:
        """Return the logits (B, T, V) of the token after each position of idx (B, T).

        With targets (B, T), return the mean loss in nats instead. targets[b, i] is the id that
        follows idx[b, i], or -1 to skip that position.
        With a cache, idx holds the whole prompt at first, then one token at a time, and a Backpack
        always needs C, the senses (B, S, k, d) of all S tokens. The caller advances cache.length.
        ValueError for a text longer than block_size.
        """
        h = self.contextualizer(self.wte(idx), cache)  # (B, T, d)       Eq. 11
        if not self.config.n_sense:
            assert C is None, 'a Transformer has no senses to sum'
            return self.predict(h, targets)  # the baseline Transformer ends here
        if C is None:
            C = self.senses(idx)  # (B, T, k, d)                         Eq. 10
        query, key = self.sense_weights.query_and_key(h, cache)  # (B, k, T, d/k), (B, k, S, d/k)
        # Unoptimised version of the next line:
        #     alpha = causal_softmax(query, key)  # (B, k, T, S)         Eq. 12
        #     o = weighted_sum(alpha, C)                                 Eq. 2
        o = sum_in_blocks(query, key, C)  # (B, T, d)
        return self.predict(o, targets)  # (B, T, V) or ()               Eq. 9

    def senses(self, ids: Tensor) -> Tensor:
        """Compute the senses C (Eq. 10): ids of any shape (..) -> (.., k, d).

        Unoptimised version: sense_network(wte(ids)). Senses depend only on the id, so they are
        computed once for each distinct id. A compiled model runs the unoptimised version, because
        the shape of unique's result depends on the data, which would break the compiled graph.
        """
        if torch.compiler.is_compiling():
            return self.sense_network(self.wte(ids))
        distinct, place = ids.unique(return_inverse=True)  # (n,), (..)
        return self.senses_at(distinct, place)

    def senses_at(self, distinct: Tensor, place: Tensor) -> Tensor:
        """Compute the senses (.., k, d) of the ids distinct[place], each id once."""
        rows = self.sense_network(self.wte(distinct)).flatten(1)  # (n, k*d)
        # Unoptimised version: rows[place]. F.embedding has a faster backward pass, which adds up
        # the gradients of all occurrences of an id. Under autocast the rows are bfloat16, where
        # 256 + 1 is 256, so a frequent id would lose most of its gradient. We sum in float32.
        table = rows.to(self.wte.weight.dtype)
        C = F.embedding(place, table).to(rows.dtype)  # (.., k*d)
        return C.unflatten(-1, (self.config.n_sense, -1))  # (.., k, d)

    def alpha(self, idx: Tensor) -> Tensor:
        """Compute the weights (B, k, T, T) of the senses in the texts idx (B, T), Eq. 11 and 12."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Compute Eq. 9, v E^T, for any vectors v (.., d): logits (.., V), unused rows included."""
        return F.linear(v, self.wte.weight)

    def predict(self, o: Tensor, targets: Tensor | None) -> Tensor:
        """Compute Eq. 9, o (B, T, d) -> logits (B, T, V); with targets (B, T), the mean loss ()."""
        if targets is None:
            return self.project(o)
        o = o.flatten(0, 1)  # (B*T, d)
        targets = targets.flatten()  # (B*T,)
        # Unoptimised version: F.cross_entropy(self.project(o), targets, ignore_index=-1)
        need_grad = torch.is_grad_enabled()
        return ProjectedLoss.apply(o, self.wte.weight, targets, need_grad)

    @torch.no_grad()
    def generate(self, idx: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, *,
                 edit: Edit | None = None, stop: int | None = None) -> Tensor:
        """Continue the prompts idx (B, P) by n ids: (B, P + n), or fewer with stop.

        Generation stops early once every text has drawn the id stop; until then all continue.
        temperature 0 takes the likeliest id; top_k draws from the top_k likeliest. edit is applied
        to the senses of all tokens at each step. Keys, values and unedited senses are cached; past
        block_size, only the last block_size // 2 tokens are kept as context, and read again. Call
        eval() first, or dropout stays on.
        """
        block_size = self.config.block_size
        cache = Cache(min(block_size, idx.shape[1] + n))
        start = 0  # the first token that is still read
        ended = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # (B, 1)
        for _ in range(n):
            if idx.shape[1] - start > block_size:
                start = idx.shape[1] - max(1, block_size // 2)
                cache = Cache(cache.capacity)
            text = idx[:, start:]  # (B, S), S tokens in all
            new = text[:, cache.length:]  # (B, T), the tokens not yet in the cache
            C = None
            if self.config.n_sense:
                C = cache.extend('C', self.senses(new), dim=1)  # (B, S, k, d), kept unedited
            if edit is not None:
                C = edit(text, C)
            logits = self(new, C=C, cache=cache)  # (B, T, V)
            logits = logits[:, -1, :self.config.n_vocab]  # (B, n_vocab)
            cache.length += new.shape[1]
            probs = next_token_probs(logits, temperature, top_k)  # (B, n_vocab)
            drawn = torch.multinomial(probs, 1)  # (B, 1)
            idx = torch.cat([idx, drawn], dim=1)  # one token longer
            if stop is not None:
                ended = ended | (drawn == stop)
                if ended.all():
                    break
        return idx

    def n_params(self) -> dict[str, int]:
        """Count parameters: the sense network ('senses'), the rest ('contextualizer'), 'total'."""
        total = sum(p.numel() for p in self.parameters())
        senses = 0
        if self.config.n_sense:
            senses = sum(p.numel() for p in self.sense_network.parameters())
        return {'contextualizer': total - senses, 'senses': senses, 'total': total}


def init_weights(name: str, module: nn.Module, n_layer: int) -> None:
    """Initialize as GPT-2 does: normal weights with standard deviation 0.02, zero biases.

    In every c_proj, the sense MLPs included, the standard deviation is divided by sqrt(2 n_layer).
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        scale = 1 / math.sqrt(2 * n_layer) if name.endswith('c_proj') else 1.0
        nn.init.normal_(module.weight, std=0.02 * scale)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def next_token_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """Turn logits (B, V) into probabilities (B, V) to sample from; temperature 0 is greedy."""
    if temperature < 1e-30:  # 0, or nearly
        likeliest = logits.argmax(-1)  # (B,)
        return F.one_hot(likeliest, logits.shape[-1]).to(logits.dtype)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # shifted: no overflow
    if top_k is not None:
        top, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, top)
    return logits.softmax(-1)


# -----------------------------------------------------------------------------
# The contextualizer: a GPT-2 Transformer, nothing new.


class Cache:
    """What generate has computed for the tokens read so far: keys, values and senses."""

    def __init__(self, capacity: int):
        self.capacity = capacity  # tokens it has room for
        self.length = 0  # tokens it holds
        self.tensors: dict[object, Tensor] = {}

    def extend(self, name: object, new: Tensor, dim: int) -> Tensor:
        """Append new, of size T along dim, to the tensor called name; return all S entries.

        This does not change length: the caller advances it once all layers have written.
        """
        T = new.shape[dim]
        if name not in self.tensors:
            shape = list(new.shape)
            shape[dim] = self.capacity
            self.tensors[name] = new.new_empty(shape)
        tensor = self.tensors[name]
        tensor.narrow(dim, self.length, T).copy_(new)
        return tensor.narrow(dim, 0, self.length + T)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions j <= i, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        query, key, value = self.c_attn(x).chunk(3, dim=-1)  # (B, T, d) each
        query = split_heads(query, self.n_head)  # (B, n_head, T, d/n_head)
        key = split_heads(key, self.n_head)
        value = split_heads(value, self.n_head)
        if cache is not None:
            key = cache.extend((self, 'key'), key, dim=2)  # (B, n_head, S, d/n_head)
            value = cache.extend((self, 'value'), value, dim=2)
        is_causal = query.shape[2] == key.shape[2]
        assert is_causal or query.shape[2] == 1  # after the prompt: one new token, which sees all S
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=is_causal)  # (B, n_head, T, d/n_head)
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

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), cache))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Contextualizer(nn.Module):
    """Eq. 11, h = Transformer(E[x]): embeddings (B, T, d) -> contextual vectors h (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + x.shape[1]
        block_size = self.wpe.num_embeddings
        if end > block_size:
            raise ValueError(f'the text has {end} tokens; block_size is {block_size}')
        positions = torch.arange(start, end, device=x.device)  # (T,)
        x = self.drop(x + self.wpe(positions))  # (B, T, d) + (T, d)
        for block in self.blocks:
            x = block(x, cache)  # (B, T, d)
        return self.ln_f(x)


# -----------------------------------------------------------------------------
# Optimised versions. Each names its unoptimised version; tests check that the two agree.


def sum_in_blocks(query: Tensor, key: Tensor, C: Tensor, size: int = 128) -> Tensor:
    """Compute o (B, T, d). Unoptimised version: weighted_sum(causal_softmax(query, key), C).

    Each block of `size` queries skips the keys after it, whose weights are zero. That saves up to
    half the work in a long text.
    """
    k, T = query.shape[1:3]
    S = key.shape[2]
    assert C.shape[1:3] == (S, k)  # einsum would silently broadcast a size of 1
    o = []
    for start in range(0, T, size):
        stop = min(start + size, T)
        end = S - T + stop  # this block sees positions 0 to end - 1
        block = query[:, :, start:stop]  # (B, k, size, d/k), the last one may be shorter
        alpha = causal_softmax(block, key[:, :, :end])  # (B, k, size, end)
        o.append(weighted_sum(alpha, C[:, :end]))  # (B, size, d)
    return torch.cat(o, dim=1)  # (B, T, d)


LOGITS_IN_MEMORY = 1 << 28  # per chunk in ProjectedLoss: 1 GiB in float32, up to 3 such tensors
CHUNK_ON_CPU = 512  # tokens per chunk on a CPU, so that a chunk fits the CPU's caches better


class ProjectedLoss(torch.autograd.Function):
    """Unoptimised version: F.cross_entropy(v @ E.T, targets, ignore_index=-1).

    v is (n, d), targets (n,). All logits (n, V) would be the largest tensor of a training run, so
    they are computed in chunks. The gradient of the loss with respect to a logit is the token's
    probability, minus 1 for the target, so the forward pass computes the gradients of v and E and
    keeps no logits. F.linear_cross_entropy of torch 2.13 does the same, but it is slower when not
    compiled, its chunks break a compiled graph, and under autocast its loss is bfloat16. Second
    derivatives are not supported.
    """

    @staticmethod
    def forward(ctx, v: Tensor, E: Tensor, targets: Tensor, need_grad: bool) -> Tensor:
        """Return the mean loss (). need_grad is passed in: autograd turns grad mode off here."""
        chunk = max(1, LOGITS_IN_MEMORY // len(E))
        if v.device.type == 'cpu':
            chunk = min(chunk, CHUNK_ON_CPU)
        n_targets = (targets != -1).sum()
        ids = torch.arange(len(E), device=E.device)  # (V,)
        total = v.new_zeros((), dtype=E.dtype)
        grad_v = []
        grad_E = torch.zeros_like(E) if need_grad else None
        for x, target in zip(v.split(chunk), targets[:, None].split(chunk)):  # (c, d), (c, 1)
            counts = (target != -1).to(E.dtype)  # (c, 1), 1 or 0
            target = target.where(target != -1, 0)
            logits = F.linear(x, E)  # (c, V)
            logp = logits.log_softmax(-1, dtype=E.dtype)  # (c, V)
            scored = logp.gather(1, target) * counts  # (c, 1)
            total = total - scored.sum() / n_targets
            if need_grad:
                p = logp.exp_()  # (c, V), in place of logp
                g = p.add_(ids == target, alpha=-1)  # (c, V), p - 1 at the target
                g = g.to(logits.dtype)
                grad_x = (g @ E) * counts / n_targets  # (c, d)
                grad_v.append(grad_x.to(v.dtype))
                grad_E += g.T @ (x * counts / n_targets)  # (V, d)
        if need_grad:
            ctx.save_for_backward(torch.cat(grad_v), grad_E)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        """Return the gradients made in the forward pass."""
        grad_v, grad_E = ctx.saved_tensors
        return grad * grad_v, grad * grad_E, None, None
