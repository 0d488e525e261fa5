"""The Backpack Language Model in one file.

Paper: Hewitt, Thickstun, Manning, Liang, ACL 2023, https://arxiv.org/abs/2305.16765
Published code and weights: https://github.com/john-hewitt/backpacks-flash-attn,
https://huggingface.co/stanfordnlp/backpack-gpt2

A Transformer turns a text into vectors and predicts the next token from them. A Backpack lets its Transformer
choose only weights, by which it sums sense vectors: k for each id of the vocabulary, the same in every text.
Given the weights, the logits are linear in the senses, so each sense can be read, and edited, on its own.

B texts in a batch, T tokens in each, V rows of E (unused ones included), d = n_embd, k = n_sense; i and j are
positions, l is a sense, all counted from 0; x_j is the id at j. A token is an occurrence in a text, an id the
number of a row of E. With a cache, T counts the new positions and S all positions; otherwise S = T.

    code              paper           shape          meaning
    wte               E               (V, d)         token embeddings, tied: input, senses and output use them
    contextualizer    h, Eq. 11       (B, T, d)      a GPT-2 Transformer between embedding and output layer
    senses            C, Eq. 10       (B, T, k, d)   the senses of each token; no position, no context
    sense_weights     alpha, Eq. 12   (B, k, T, T)   at [b, l, i, j] the weight at i of sense l of token j
    weighted_sum      o, Eq. 2        (B, T, d)      o_i = sum_j sum_l alpha_lij C(x_j)_l
    project           Eq. 9           (B, T, V)      logits = o E^T

The whole model is these five lines; Backpack.plain has them:

    h = contextualizer(wte(idx))       Eq. 11
    C = senses(idx)                    Eq. 10
    alpha = sense_weights(h)           Eq. 12
    o = weighted_sum(alpha, C)         Eq. 2
    logits = project(o)                Eq. 9

At each position i the weights of one sense sum to one over the positions j <= i, so all weights together sum
to k: positions compete for a sense, senses do not compete with each other.

By hand (a test runs it), with k = 2 senses and d = 2 axes, skateboard and health, for the text "trick sick":
C(trick) = [(1, 0), (0, 0)], C(sick) = [(1, 0), (0, 1)]. At "sick", let sense 0 have weight 1/2 on both
tokens, sense 1 weight 1 on trick, where it is zero, and 0 on sick: o = 1/2 (1, 0) + 1/2 (1, 0) + 1 (0, 0)
+ 0 (0, 1) = (1, 0): skateboard, not health.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

# An edit maps ids (B, S) and their senses C (B, S, k, d) to the senses to sum. It must leave C as it is.
Edit = Callable[[Tensor, Tensor], Tensor]

SIZES = {  # the paper's (section 4.1, Table 9)
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768)}


@dataclass
class Config:
    """Shape of a model. ValueError if n_head or n_sense does not divide n_embd."""

    block_size: int = 512    # longest text, in tokens
    vocab_size: int = 50257  # V: rows of wte, unused ones included
    n_vocab: int = 0         # ids the tokenizer knows; rows from there on are unused (0: none)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k; 0 is the baseline Transformer
    sense_hidden: int = 0    # hidden size of both sense MLPs (0: 4 * n_embd, as published; Table 8: n_embd)
    dropout: float = 0.0     # in the contextualizer only, so that an id has one set of senses

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        for name in ('n_head', 'n_sense') if self.n_sense else ('n_head',):
            if (n := getattr(self, name)) < 1 or self.n_embd % n:
                raise ValueError(f'n_embd = {self.n_embd} is not divisible by {name} = {n}')


# -----------------------------------------------------------------------------
# What makes it a Backpack: senses, their weights, their sum.


class MLP(nn.Module):
    """Two linear layers with a GELU between them, (.., n_in) -> (.., n_out)."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))


class SenseNetwork(nn.Module):
    """Eq. 10, C(x) = FF(E x): the embedding e = E x, a row of E, (.., d) -> k sense vectors (.., k, d).

    Appendix A.1 calls the norm and residual before the second feed-forward layer, final_mlp, an accident;
    the published weights have them. The published code has dropout in here too; this has none.
    """

    def __init__(self, config: Config):
        super().__init__()
        d, hidden, self.n_sense = config.n_embd, config.sense_hidden, config.n_sense
        self.ln_0 = nn.LayerNorm(d)
        self.ln_1 = nn.LayerNorm(d)
        self.mlp = MLP(d, hidden, d)
        self.ln_2 = nn.LayerNorm(d)
        self.final_mlp = MLP(d, hidden, config.n_sense * d)

    def forward(self, e: Tensor) -> Tensor:
        r = e + self.ln_0(e)  # (.., d), sic: the published weights need it
        r = r + self.mlp(self.ln_1(r))  # (.., d)
        return self.final_mlp(self.ln_2(r)).unflatten(-1, (self.n_sense, -1))  # (.., k*d) -> (.., k, d)


class SenseWeights(nn.Module):
    """Eq. 12, alpha_l = softmax(query_l key_l^T / sqrt(d/k)), causal: h (B, T, d) -> alpha (B, k, T, T).

    Attention without values, one head per sense. Eq. 12 has no scale and no bias; the published code has.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        return causal_softmax(*self.query_and_key(h))

    def query_and_key(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """The query and the key of each sense and position, (B, k, T, d/k) each."""
        query, key = self.c_attn(h).chunk(2, dim=-1)  # (B, T, d) each
        return split_heads(query, self.n_sense), split_heads(key, self.n_sense)


def split_heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n * size) -> (B, n, T, size)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def causal_softmax(query: Tensor, key: Tensor) -> Tensor:
    """Eq. 12: query (B, k, T, d/k) of the last T of S positions, key (B, k, S, d/k) -> alpha (B, k, T, S)."""
    T, S, scale = query.shape[2], key.shape[2], math.sqrt(query.shape[-1])
    # -inf where j > i; row r is position i = S - T + r
    mask = torch.full((T, S), -math.inf, dtype=query.dtype, device=query.device).triu(1 + S - T)  # (T, S)
    scores = (query / scale) @ key.transpose(-2, -1) + mask  # (B, k, T, S)
    return scores.softmax(dim=-1)


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Eq. 2: weights (B, k, T, S) and senses (B, S, k, d) -> o (B, T, d), one matrix product per text."""
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """A Backpack Language Model, or with n_sense = 0 the baseline Transformer, whose logits are project(h).

    Where a method takes C=, that is the senses to sum, by default senses(idx). An edit is a function
    (ids, C) -> C, so the model under an edit is model(idx, C=edit(idx, model.senses(idx))); with the senses
    of a SenseTable it is model(idx, C=table(idx)). An edit that changes nothing changes no bit of the logits.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenizer: dict | None = None  # what the ids mean, as {'name': 'gpt2'}
        self.run: dict = {}  # what is known of its training: dataset, tokens, dtype, compile
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config)
        if config.n_sense:
            self.sense_network = SenseNetwork(config)
            self.sense_weights = SenseWeights(config)
        for name, module in self.named_modules():  # GPT-2's init, as published for the sense MLPs too
            if isinstance(module, (nn.Linear, nn.Embedding)):
                scale = 1 / math.sqrt(2 * config.n_layer) if name.endswith('c_proj') else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def plain(self, idx: Tensor, C: Tensor | None = None) -> Tensor:
        """The Backpack as the paper defines it: ids (B, T) -> logits (B, T, V). forward is its fast form."""
        h = self.contextualizer(self.wte(idx))  # (B, T, d)          Eq. 11
        C = self.senses(idx) if C is None else C  # (B, T, k, d)     Eq. 10
        alpha = self.sense_weights(h)  # (B, k, T, T)                Eq. 12
        o = weighted_sum(alpha, C)  # (B, T, d)                      Eq. 2
        return self.project(o)  # (B, T, V)                          Eq. 9

    def senses(self, ids: Tensor) -> Tensor:
        """Eq. 10: the sense vectors C of ids of any shape (..) -> (.., k, d).

        Senses depend on the id alone, so those of each distinct id are computed once. In a compiled model,
        whose shapes may not depend on the data, every token's are computed; DistinctIds avoids that.
        """
        if torch.compiler.is_compiling():
            return self.sense_network(self.wte(ids))
        distinct, place = ids.unique(return_inverse=True)  # (n,), (..)
        return self.senses_at(distinct, place)

    def senses_at(self, distinct: Tensor, place: Tensor) -> Tensor:
        """Senses (.., k, d) of the ids distinct[place] (..); the network runs on distinct (n,) only."""
        rows = self.sense_network(self.wte(distinct)).flatten(1)  # (n, k*d)
        # Gather in the weights' precision: under autocast the gradients of a frequent id would be added up
        # in bfloat16, where 256 + 1 is 256.
        C = F.embedding(place, rows.to(self.wte.weight.dtype)).to(rows.dtype)  # (.., k*d), is rows[place]
        return C.unflatten(-1, (self.config.n_sense, -1))  # (.., k, d)

    def alpha(self, idx: Tensor) -> Tensor:
        """Eq. 11 and 12: the weights of the senses of the texts idx (B, T) -> (B, k, T, T)."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Eq. 9: the logits v E^T of any vectors v (.., d) -> (.., V), unused rows included."""
        return F.linear(v, self.wte.weight)

    def represent(self, idx: Tensor, C: Tensor | None = None, cache: 'Cache | None' = None) -> Tensor:
        """Eq. 2: the vectors o of the ids idx (B, T) -> (B, T, d); for a Transformer its h.

        With a cache, idx are the tokens it has not read yet and C (B, S, k, d), then required, covers all S
        positions. ValueError: a text longer than block_size, or senses for a Transformer.
        """
        if C is not None and not self.config.n_sense:
            raise ValueError('a Transformer has no senses to sum; take a Backpack (n_sense > 0)')
        o = h = self.contextualizer(self.wte(idx), cache)  # (B, T, d)
        if self.config.n_sense:
            C = self.senses(idx) if C is None else C  # (B, S, k, d)
            query, key = self.sense_weights.query_and_key(h)  # (B, k, T, d/k) each
            key = key if cache is None else cache.extend(self.sense_weights, key, dim=2)  # (B, k, S, d/k)
            o = sum_in_blocks(query, key, C)  # (B, T, d)
        if cache is not None:
            cache.length += idx.shape[1]
        return o

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, C: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each position of idx (B, T).

        With targets (B, T), the ids to predict, their mean loss in nats instead; targets of -1 do not count.
        C (B, T, k, d) are the senses to sum, by default senses(idx). ValueError as in represent.
        """
        o = self.represent(idx, C)  # (B, T, d)
        if targets is None:
            return self.project(o)  # (B, T, V)
        o, targets = o.flatten(0, 1), targets.flatten()  # (B*T, d), (B*T,)
        return ProjectedLoss.apply(o, self.wte.weight, targets, torch.is_grad_enabled())  # ()

    @torch.no_grad()
    def generate(self, idx: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, *,
                 edit: Edit | None = None, senses: Callable[[Tensor], Tensor] | None = None,
                 stop: int | None = None) -> Tensor:
        """Continue the prompts idx (B, P) by n ids: (B, P + n), or fewer once all have drawn the id stop.

        temperature 0 takes the likeliest id; top_k draws from the top_k likeliest. edit is applied to all S
        positions at each step; senses replaces model.senses, as a SenseTable can. Each token is read once;
        a text past block_size goes on from its last block_size // 2 tokens, read anew.
        """
        if (edit or senses) is not None and not self.config.n_sense:
            raise ValueError('a Transformer has no senses to edit; take a Backpack (n_sense > 0)')
        senses, block_size, start = senses or self.senses, self.config.block_size, 0
        cache = Cache(min(block_size, idx.shape[1] + n))
        ended = torch.zeros_like(idx[:, :1], dtype=torch.bool)  # (B, 1)
        for _ in range(n):
            if idx.shape[1] - start > block_size:
                start, cache = idx.shape[1] - max(1, block_size // 2), Cache(cache.capacity)
            text = idx[:, start:]  # (B, S)
            new, C = text[:, cache.length:], None  # (B, T); a Transformer has no C
            if self.config.n_sense:
                C = cache.extend('C', senses(new), dim=1)  # (B, S, k, d), kept unedited
                C = C if edit is None else edit(text, C)
            o = self.represent(new, C, cache)[:, -1]  # (B, d)
            logits = self.project(o)[:, :self.config.n_vocab]  # (B, n_vocab)
            drawn = torch.multinomial(next_token_probs(logits, temperature, top_k), 1)  # (B, 1)
            idx, ended = torch.cat([idx, drawn], dim=1), ended | (drawn == stop)  # one longer, (B, 1)
            if stop is not None and ended.all():
                break
        return idx

    def optimizers(self, name: str, learning_rate: float, weight_decay: float, betas: tuple[float, float], *,
                   decay_embeddings: bool = True, muon_lr: float = 6e-3) -> list[torch.optim.Optimizer]:
        """The optimizers of a training run: AdamW alone ('adamw'), or AdamW and Muon ('muon').

        Muon orthogonalizes each update of a matrix, so that no direction of it outruns the others: without
        that, scores of SenseWeights grow until the softmax is saturated, and such a sense learns no more.
        It takes every matrix but the embeddings; 'match_rms_adamw' makes its rates comparable to AdamW's.
        weight_decay is on matrices (embeddings optional), never on biases and norms.
        """
        embeddings = [self.wte.weight, self.contextualizer.wpe.weight]
        matrices = [m.weight for m in self.modules() if isinstance(m, nn.Linear)]
        biases_and_norms = [p for p in self.parameters() if p.dim() == 1]
        groups = [
            dict(params=biases_and_norms, weight_decay=0.0),
            dict(params=embeddings, weight_decay=weight_decay if decay_embeddings else 0.0)]
        if name == 'adamw':
            groups.append(dict(params=matrices, weight_decay=weight_decay))
        optimizers = [torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)]
        if name == 'muon':
            optimizers.append(torch.optim.Muon(
                matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn='match_rms_adamw'))
        return optimizers

    def n_params(self) -> dict[str, int]:
        """Parameters of the contextualizer (with wte and SenseWeights), of the sense network, in total."""
        total = sum(p.numel() for p in self.parameters())
        senses = sum(p.numel() for p in self.sense_network.parameters()) if self.config.n_sense else 0
        return {'contextualizer': total - senses, 'senses': senses, 'total': total}

    def flops_per_token(self, distinct: float = 1.0) -> float:
        """Floating point operations to train on one token of a text of block_size tokens: a multiplication
        and an addition per weight, three times (forward, backward to weights, backward to inputs). Attention
        and Eqs. 2, 12 count as if not causal; distinct is the share of tokens whose senses are computed.
        """
        c = self.config
        matrices = sum(m.weight.numel() * (distinct if name.startswith('sense_network.') else 1)
                       for name, m in self.named_modules() if isinstance(m, nn.Linear))
        attention = 2 * c.n_layer * c.block_size * c.n_embd  # q k^T and its product with v
        senses = (1 + c.n_sense) * c.block_size * c.n_embd if c.n_sense else 0  # q k^T (Eq. 12), sum (Eq. 2)
        return 3 * 2 * (matrices + c.vocab_size * c.n_embd + attention + senses)  # vocab * d: Eq. 9


def from_pretrained(source: str) -> Backpack:
    """A model in evaluation mode, on the CPU, from a checkpoint, a folder or the Hugging Face Hub."""
    from rucksack.published import from_pretrained  # for convenience: the model does not need rucksack/
    return from_pretrained(source)


def next_token_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """Logits (B, V) -> the probabilities (B, V) to draw from; temperature 0: all on the likeliest id."""
    if temperature < 1e-30:  # 0, or nearly
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # shifted: no overflow
    if top_k is not None:
        top, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, top)
    return logits.softmax(-1)


# -----------------------------------------------------------------------------
# The contextualizer: a GPT-2 Transformer, nothing new.


class Cache:
    """Keys, values and senses C of the tokens read so far: first of a whole text, then token by token."""

    def __init__(self, capacity: int):
        self.capacity, self.length, self.kept = capacity, 0, {}  # most positions, those read, tensors by name

    def extend(self, name: object, new: Tensor, dim: int) -> Tensor:
        """Append new, T long along dim, to what is kept under a name, and return all of it."""
        T = new.shape[dim]
        if name not in self.kept:
            self.kept[name] = new.new_empty(*new.shape[:dim], self.capacity, *new.shape[dim + 1:])
        self.kept[name].narrow(dim, self.length, T).copy_(new)
        return self.kept[name].narrow(dim, 0, self.length + T)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions j <= i, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        parts = self.c_attn(x).chunk(3, dim=-1)  # (B, T, d) each
        query, key, value = (split_heads(t, self.n_head) for t in parts)  # (B, n_head, T, d/n_head) each
        if cache is not None:  # (B, n_head, S, d/n_head) each
            key, value = (cache.extend((self, i), t, dim=2) for i, t in enumerate((key, value)))
        dropout, is_causal = self.dropout if self.training else 0.0, query.shape[2] == key.shape[2]
        assert is_causal or query.shape[2] == 1  # a single new token sees all positions
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, n_head, T, d/n_head) -> (B, T, d)


class Block(nn.Module):
    """One Transformer layer, norms before, residuals around, (B, T, d) -> (B, T, d)."""

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
    """Eq. 11, h = Transformer(E x): embeddings (B, T, d) -> contextual vectors h (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        start = cache.length if cache is not None else 0
        end, block_size = start + x.shape[1], self.wpe.num_embeddings
        if end > block_size:
            raise ValueError(f'the text has {end} tokens; block_size is {block_size}')
        x = self.drop(x + self.wpe(torch.arange(start, end, device=x.device)))  # (B, T, d) + (T, d)
        for block in self.blocks:
            x = block(x, cache)  # (B, T, d)
        return self.ln_f(x)


# -----------------------------------------------------------------------------
# Fast forms. Each names its plain form; a test checks that the two agree, in gradients too.


def sum_in_blocks(query: Tensor, key: Tensor, C: Tensor, size: int = 128) -> Tensor:
    """Plain form: weighted_sum(causal_softmax(query, key), C), (B, T, d). Saves up to half the work in long
    texts: the weights of size positions on all that come after them are zero, and not computed.
    """
    (k, T), S, o = query.shape[1:3], key.shape[2], []
    assert C.shape[1:3] == (S, k)  # or einsum would spread a single position
    for i in range(0, T, size):
        end = min(i + size, T) + S - T
        alpha = causal_softmax(query[:, :, i:i + size], key[:, :, :end])  # (B, k, up to size, end)
        o.append(weighted_sum(alpha, C[:, :end]))  # (B, up to size, d)
    return torch.cat(o, dim=1)  # (B, T, d)


class DistinctIds(nn.Module):
    """Plain form: model(idx, targets). The model as it is trained: its caller finds the distinct ids, so that
    one compiled graph computes the senses of each of them once, whatever their number.
    """

    def __init__(self, model: Backpack):
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor, distinct: Tensor, place: Tensor) -> Tensor:
        """The loss for idx and targets (B, T), where idx is distinct[place]; distinct (n,), place (B, T)."""
        C = self.model.senses_at(distinct, place) if self.model.config.n_sense else None  # (B, T, k, d)
        return self.model(idx, targets, C=C)


class SenseTable:
    """Plain form: model.senses. The senses of the vocabulary, computed once and kept in dtype (None: that of
    the weights), for weights that stay as they are.
    """

    @torch.no_grad()
    def __init__(self, model: Backpack, dtype: torch.dtype | None = None):
        ids = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (n_vocab,)
        self.n_sense, self.dtype = model.config.n_sense, model.wte.weight.dtype
        chunks = (model.senses(some).flatten(1) for some in ids.split(1024))  # (up to 1024, k*d) each
        self.rows = torch.cat([chunk.to(dtype or self.dtype) for chunk in chunks])  # (n_vocab, k*d)

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows).to(self.dtype).unflatten(-1, (self.n_sense, -1))  # (.., k, d)


LOGITS_IN_MEMORY = 1 << 28  # per chunk in ProjectedLoss: 1 GiB in float32, up to three times at once
TOKENS_IN_CACHE = 512  # per chunk on a CPU, whose caches then hold more of it


class ProjectedLoss(torch.autograd.Function):
    """Plain form: F.cross_entropy(v @ E.T, targets, ignore_index=-1), for vectors v (n, d) and targets (n,).
    All logits (n, V) would be the largest tensor of a training run, so they are made in chunks. As the
    gradient of a logit is its probability, minus 1 for the target, the forward pass makes both gradients.
    """

    @staticmethod
    def forward(ctx, v: Tensor, E: Tensor, targets: Tensor, need_grad: bool) -> Tensor:
        """The mean loss (). need_grad: in here grad mode is always off. Only products are autocast."""
        n, size = (targets != -1).sum(), max(1, LOGITS_IN_MEMORY // len(E))
        size = min(size, TOKENS_IN_CACHE) if v.device.type == 'cpu' else size
        total, grad_v, grad_E = v.new_zeros((), dtype=E.dtype), [], torch.zeros_like(E) if need_grad else None
        ids = torch.arange(len(E), device=E.device)  # (V,)
        for v_, t in zip(v.split(size), targets[:, None].split(size)):  # (c, d), (c, 1)
            valid, t = (t != -1).to(E.dtype), t.where(t != -1, 0)  # (c, 1) each
            logits = F.linear(v_, E)  # (c, V)
            logp = logits.log_softmax(-1, dtype=E.dtype)  # (c, V)
            total = total - (logp.gather(1, t) * valid).sum() / n
            if need_grad:
                g = logp.exp_().add_(ids == t, alpha=-1).to(logits.dtype)  # (c, V): p, at the target p - 1
                grad_v.append(((g @ E) * valid / n).to(v.dtype))  # (c, d)
                grad_E += g.T @ (v_ * valid / n)  # (V, d)
        if need_grad:
            ctx.save_for_backward(torch.cat(grad_v), grad_E)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        """The gradients made in the forward pass."""
        grad_v, grad_E = ctx.saved_tensors
        return grad * grad_v, grad * grad_E, None, None
