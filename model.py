"""The Backpack Language Model in one file (Hewitt, Thickstun, Manning, Liang; ACL 2023).

A Transformer turns a text into vectors and predicts the next word from them. A Backpack lets the Transformer
choose only weights. What is weighted are sense vectors: k of them for every word of the vocabulary, the same
in every text. The scores of the next word are linear in a weighted sum of the senses of the words so far.

    code              paper           shape          meaning
    wte               E               (V, d)         word embeddings, tied: input, senses and output use them
    Contextualizer    h, Eq. 11       (B, T, d)      a GPT-2 Transformer without its output layer
    SenseNetwork      C, Eq. 10       (B, T, k, d)   the senses of each word; no position, no context
    SenseWeights      alpha, Eq. 12   (B, k, T, T)   how much i takes of sense l of j, at [b, l, i, j]
    weighted_sum      o, Eq. 2        (B, T, d)      o_i = sum_j sum_l alpha_lij C(x_j)_l
    project           Eq. 9           (B, T, V)      logits = o E^T

B texts in a batch, T words in each, V rows of wte (padding included), d = n_embd, k = n_sense; i and j are
positions, l is a sense, counted from 0; S words so far are T but where a Cache has read some of them before.
"Word" means token throughout.

By hand (a test runs it), with k = 2, and d = 2 whose axes mean skateboard and health, for the text
"trick sick": C(trick) = [(1, 0), (0, 0)], C(sick) = [(1, 0), (0, 1)]. At "sick", a contextualizer that has
seen the trick gives sense 0 of both words the weight 1/2, and sense 1 of trick, which is empty, the weight 1:
o = 1/2 (1, 0) + 1/2 (1, 0) + 1 (0, 0) + 0 (0, 1) = (1, 0): skateboard, not health.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

# An edit takes the ids (B, T) that the model reads and their senses (B, T, k, d), which it must leave as they
# are, and returns the senses to sum.
Edit = Callable[[Tensor, Tensor], Tensor]

# The paper's three sizes (section 4.1, Table 9); the ablation (Table 8) is Mini with small sense MLPs.
SIZES = {
    'micro': dict(n_layer=6, n_head=6, n_embd=384),
    'mini': dict(n_layer=8, n_head=8, n_embd=640),
    'small': dict(n_layer=12, n_head=12, n_embd=768),
}


@dataclass
class Config:
    """Shape of a model. Raises ValueError where the numbers do not fit together."""

    block_size: int = 512    # longest text
    vocab_size: int = 50257  # V: rows of wte, padding included
    n_vocab: int = 0         # ids the tokenizer knows; the rows above are padding (0: no padding)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k; 0 is the baseline Transformer
    sense_hidden: int = 0    # hidden size of both sense MLPs (0: 4 * n_embd; Table 8: n_embd)
    dropout: float = 0.0     # in the contextualizer only: a word's senses are the same in every pass

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        for name in ('block_size', 'vocab_size', 'n_vocab', 'n_layer', 'n_head', 'n_embd', 'sense_hidden'):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f'{name} is {getattr(self, name)}; it must be a whole number of at least 1')
        if self.n_layer > 1000:
            raise ValueError(f'n_layer is {self.n_layer}; it can be at most 1000')
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f'dropout is {self.dropout}; it must be at least 0 and below 1')
        if self.n_vocab > self.vocab_size:
            raise ValueError(f'n_vocab is {self.n_vocab}, more than the vocab_size = {self.vocab_size} rows')
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}')
        if type(self.n_sense) is not int or self.n_sense < 0 or (self.n_sense and self.n_embd % self.n_sense):
            raise ValueError(f'n_embd = {self.n_embd} is not divisible by n_sense = {self.n_sense}')


# -----------------------------------------------------------------------------
# The contextualizer: a GPT-2 Transformer, nothing new.


class MLP(nn.Module):
    """Two linear layers with a GELU between them, (.., n_in) -> (.., n_out)."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))


class Cache:
    """What generate keeps of the words so far, so that it reads each word once: of every layer the keys and
    values, of SenseWeights the keys, and the senses. Begin with a whole text, go on by one word at a time;
    without gradients.
    """

    def __init__(self, room: int):
        self.room, self.length, self.kept = room, 0, {}  # most words, words so far, what is kept of them

    def extend(self, name: object, new: Tensor) -> Tensor:
        """Append new (B, .., T, size) to what is kept under this name; all of it (B, .., S, size)."""
        T, size = new.shape[-2:]
        if name not in self.kept:
            self.kept[name] = new.new_empty(*new.shape[:-2], self.room, size)
        self.kept[name][..., self.length:self.length + T, :] = new
        return self.kept[name][..., :self.length + T, :]


def split_heads(x: Tensor, n: int) -> Tensor:
    """(B, T, n * size) -> (B, n, T, size)."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions j <= i, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)  # (B, T, d) each
        q, k, v = (split_heads(t, self.n_head) for t in (q, k, v))  # (B, n_head, T, d/n_head) each
        if cache is not None:
            k, v = cache.extend((self, 'k'), k), cache.extend((self, 'v'), v)  # (B, n_head, S, d/n_head) each
        dropout, whole = self.dropout if self.training else 0.0, q.shape[2] == k.shape[2]
        assert whole or q.shape[2] == 1  # the last word sees all
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=whole)  # as q
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, d)


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
    """Eq. 11, h = Transformer(E x): embeddings (B, T, d) -> vectors that know the text so far (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        start = cache.length if cache is not None else 0
        end, block_size = start + x.shape[1], self.wpe.num_embeddings
        if end > block_size:
            raise ValueError(f'the text has {end} tokens; block_size is {block_size}')
        positions = torch.arange(start, end, device=x.device)  # (T,)
        x = self.drop(x + self.wpe(positions))  # (B, T, d) + (T, d)
        for block in self.h:
            x = block(x, cache)
        return self.ln_f(x)


# -----------------------------------------------------------------------------
# What makes it a Backpack: senses, their weights, their sum.


class SenseNetwork(nn.Module):
    """Eq. 10, C(x) = FF(E x): from the embedding E x of a word (.., d) to its k sense vectors (.., k, d).

    As in appendix A.1, with an x + ln_0(x) before it that the published code has by accident and its weights
    need. That code has dropout here too; this has none.
    """

    def __init__(self, config: Config):
        super().__init__()
        d, hidden, self.n_sense = config.n_embd, config.sense_hidden, config.n_sense
        self.ln_0 = nn.LayerNorm(d)
        self.ln_1 = nn.LayerNorm(d)
        self.mlp = MLP(d, hidden, d)
        self.ln_2 = nn.LayerNorm(d)
        self.final_mlp = MLP(d, hidden, config.n_sense * d)

    def forward(self, x: Tensor) -> Tensor:
        r = x + self.ln_0(x)  # (.., d), the accidental one
        r = r + self.mlp(self.ln_1(r))  # (.., d)
        return self.final_mlp(self.ln_2(r)).unflatten(-1, (self.n_sense, -1))  # (.., k*d) -> (.., k, d)


class SenseWeights(nn.Module):
    """Eq. 12, alpha_l = softmax(query_l key_l^T / sqrt(d/k)), causal: h (B, T, d) -> alpha (B, k, T, T).

    Attention without values, one head a sense. Each row alpha[b, l, i, :] is >= 0, sums to one, and is zero
    after position i.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        return causal_softmax(*self.query_and_key(h))

    def query_and_key(self, h: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Queries (B, k, T, d/k) of positions with h (B, T, d), keys (B, k, S, d/k) of all S words so far."""
        query, key = self.c_attn(h).chunk(2, dim=-1)  # (B, T, d) each
        query, key = (split_heads(t, self.n_sense) for t in (query, key))  # (B, k, T, d/k) each
        return query, key if cache is None else cache.extend((self, 'key'), key)


def causal_softmax(query: Tensor, key: Tensor) -> Tensor:
    """Eq. 12: query (B, k, T, d/k) of the last T of S positions, key (B, k, S, d/k) -> alpha (B, k, T, S)."""
    T, S, scale = query.shape[2], key.shape[2], math.sqrt(query.shape[-1])
    # -inf where j > i; row r is position i = S - T + r
    mask = torch.full((T, S), -math.inf, dtype=query.dtype, device=query.device).triu(1 + S - T)
    scores = (query / scale) @ key.transpose(-2, -1) + mask  # (B, k, T, S)
    return scores.softmax(dim=-1)


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Eq. 2, o_i = sum_j sum_l alpha_lij C(x_j)_l: weights (B, k, T, S) and senses (B, S, k, d) -> (B, T, d).

    The sum runs over position and sense together, so it is one matrix product per text.
    """
    return torch.einsum('blij,bjld->bid', alpha, C)


def sum_in_blocks(query: Tensor, key: Tensor, C: Tensor, size: int = 128) -> Tensor:
    """weighted_sum(causal_softmax(query, key), C), the same (B, T, d) for nearly half the work in long texts.

    A block of positions needs no weights beyond its end, where all are zero: they are not computed.
    """
    T, S = query.shape[2], key.shape[2]
    o = []
    for i in range(0, T, size):
        end = min(i + size, T) + S - T
        alpha = causal_softmax(query[:, :, i:i + size], key[:, :, :end])  # (B, k, up to size, end)
        o.append(weighted_sum(alpha, C[:, :end]))  # (B, up to size, d)
    return torch.cat(o, dim=1)  # (B, T, d)


class Backpack(nn.Module):
    """A Backpack Language Model, or with n_sense = 0 the Transformer it is compared with: the same class."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokenizer: dict | None = None  # what the ids mean, for prepare.load_tokenizer: {'name': 'gpt2'}
        self.trained_on: str | None = None  # a folder below data/, where a checkpoint says so
        self.trained_tokens: int | None = None  # that it has seen, likewise
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config)
        if config.n_sense:
            self.sense_network = SenseNetwork(config)
            self.sense_weights = SenseWeights(config)
        self.apply(self._init_weights)
        for block in self.contextualizer.h:  # 2 n_layer branches add up in the residual stream: keep it small
            for c_proj in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.normal_(c_proj.weight, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def senses(self, idx: Tensor, distinct: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Eq. 10: the sense vectors of the words idx, (B, T) or any other shape (..) -> (.., k, d).

        A sense depends on the word alone, so those of each distinct word are computed once. Give a compiled
        model distinct = distinct_words(idx): its own shapes must not depend on data, so that without them it
        computes the senses of every token.
        """
        if distinct is None:
            if torch.compiler.is_compiling():
                return self.sense_network(self.wte(idx))
            distinct = idx.unique(return_inverse=True)
        words, place = distinct
        rows = self.sense_network(self.wte(words)).flatten(1)  # (distinct words, k*d)
        return F.embedding(place, rows).unflatten(-1, (self.config.n_sense, -1))  # (.., k, d)

    def alpha(self, idx: Tensor) -> Tensor:
        """Eq. 11 and 12: the contextualization weights of the text idx (B, T) -> (B, k, T, T)."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Eq. 9: the score v E^T of every word for any vectors v (.., d) -> (.., V), padding included."""
        return F.linear(v, self.wte.weight)

    def represent(self, idx: Tensor, edit: Edit | None = None, table: 'SenseTable | None' = None,
                  distinct: tuple[Tensor, Tensor] | None = None, cache: Cache | None = None) -> Tensor:
        """Eq. 2, in blocks: the vectors o of the text idx (B, T) -> (B, T, d); for a Transformer its h.

        edit changes the senses before they are summed; table has them ready, distinct as in senses; with a
        cache only the words that it does not hold yet are read, and o is theirs. ValueError: a text longer
        than block_size, or an edit for a Transformer.
        """
        if edit is not None and not self.config.n_sense:
            raise ValueError('a Transformer has no senses to edit; take a Backpack (n_sense > 0)')
        new = idx if cache is None else idx[:, cache.length:]  # (B, T'), all T of them without a cache
        o = h = self.contextualizer(self.wte(new), cache)  # (B, T', d)
        if self.config.n_sense:
            C = self.senses(new, distinct) if table is None else table(new)  # (B, T', k, d)
            if cache is not None:
                C = cache.extend('C', C.flatten(2)).unflatten(-1, C.shape[2:])  # (B, T, k, d)
            C = C if edit is None else edit(idx, C)
            o = sum_in_blocks(*self.sense_weights.query_and_key(h, cache), C)  # (B, T', d)
        if cache is not None:
            cache.length = idx.shape[1]
        return o

    def forward(self, idx: Tensor, targets: Tensor | None = None, edit: Edit | None = None,
                table: 'SenseTable | None' = None, distinct: tuple[Tensor, Tensor] | None = None,
                loss_only: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, T, V) of the word after each position of idx (B, T), and the mean loss in nats.

        targets (B, T) are the ids to predict, -1 where nothing is asked; without them the loss is None. With
        targets and loss_only the logits are None and the loss is the same. An edit that changes nothing gives
        bit-identical logits (in evaluation mode, as dropout draws anew). table, distinct and ValueError as in
        represent.
        """
        o = self.represent(idx, edit, table, distinct)  # (B, T, d)
        if targets is not None and loss_only:
            kind, o = o.device.type, o.flatten(0, 1)  # (B*T, d)
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else o.dtype
            return None, ProjectedLoss.apply(o, self.wte.weight, targets.flatten(), dtype,
                                             torch.is_grad_enabled())
        logits = self.project(o)  # (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 edit: Edit | None = None, use_cache: bool = True,
                 table: 'SenseTable | None' = None, stop: int | None = None) -> Tensor:
        """Continue the texts idx (B, T) by max_new_tokens ids each: (B, T + max_new_tokens). It ends earlier
        once every text has had the id stop.

        temperature 0 takes the likeliest word; top_k draws from the top_k likeliest alone. Past block_size
        only the last block_size // 2 tokens are read on; all are returned. Torch's global generator draws.
        With the cache each word is read once, and again after such a cut; without it the whole text, for
        every word. table must have all words that may be drawn: SenseTable(model) has. ValueError: an empty
        text, a negative temperature, top_k below 1.
        """
        if idx.shape[1] == 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError('generate takes at least 1 token, temperature 0 and top_k 1, not '
                            f'{idx.shape[1]}, {temperature} and {top_k}')
        start, block_size = 0, self.config.block_size
        room = min(block_size, idx.shape[1] + max_new_tokens)
        cache, ended = Cache(room) if use_cache else None, torch.zeros_like(idx[:, :1], dtype=torch.bool)
        for _ in range(max_new_tokens):
            if idx.shape[1] - start > block_size:
                start = idx.shape[1] - max(1, block_size // 2)
                cache = Cache(room) if use_cache else None  # positions have changed: read anew
            o = self.represent(idx[:, start:], edit, table, cache=cache)[:, -1]  # (B, d)
            logits = self.project(o)[:, :self.config.n_vocab]  # (B, V without padding)
            probs = next_word_probs(logits, temperature, top_k)
            new = torch.multinomial(probs, 1)  # (B, 1)
            idx, ended = torch.cat([idx, new], dim=1), ended | (new == stop)  # (B, T + 1), (B, 1)
            if stop is not None and ended.all():
                break
        return idx

    def adamw(self, learning_rate: float, weight_decay: float, betas: tuple[float, float]):
        """AdamW with weight decay on matrices, embeddings too, not on biases and norms."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': weight_decay},
                  {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)

    def n_params(self) -> dict[str, int]:
        """Parameters of the contextualizer (with wte and SenseWeights), of the sense network, of both."""
        total = sum(p.numel() for p in self.parameters())
        senses = sum(p.numel() for p in self.sense_network.parameters()) if self.config.n_sense else 0
        return {'contextualizer': total - senses, 'senses': senses, 'total': total}

    def flops_per_token(self, distinct: float = 1.0) -> float:
        """Floating point operations to train on one token at full length.

        A multiplication and an addition per weight and token, three times: forward, backward to the weights,
        backward to the inputs. Attention and Eq. 2 and 12 count in full, though half is masked and
        sum_in_blocks skips part of it; distinct is the share of the tokens whose senses are computed.
        """
        c = self.config
        matrices = sum(m.weight.numel() * (distinct if name.startswith('sense_network.') else 1)
                       for name, m in self.named_modules() if isinstance(m, nn.Linear))
        head = c.vocab_size * c.n_embd
        attention = 2 * c.n_layer * c.block_size * c.n_embd  # q k^T and its product with v
        senses = (1 + c.n_sense) * c.block_size * c.n_embd if c.n_sense else 0  # q k^T (Eq. 12), sum (Eq. 2)
        return 3 * 2 * (matrices + head + attention + senses)


def next_word_probs(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """Logits (B, V) -> the probabilities to draw the next word with; temperature 0: all on the likeliest."""
    if temperature < 1e-30:  # float32 could not divide by it
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # shifted: no overflow
    if top_k is not None:
        top, words = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, words, top)
    return logits.softmax(-1)


# -----------------------------------------------------------------------------
# Faster forms of what stands above; a test holds each to its plain form.


LOGITS_IN_MEMORY = 1 << 28  # that ProjectedLoss makes at a time: 1 GiB in float32, and a second one beside it


class ProjectedLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits v E^T for vectors v (n, d) and targets (n,), F.cross_entropy(v @ E.T,
    targets, ignore_index=-1), some logits at a time: all (n, V) are the largest tensor of a training run.

    The gradient with respect to a logit is its probability, minus 1 for the target: known as soon as the
    logits of its position are. So both gradients are made in the forward pass. No second derivatives.
    """

    @staticmethod
    def forward(ctx, v: Tensor, E: Tensor, targets: Tensor, dtype: torch.dtype, learning: bool) -> Tensor:
        """dtype is that of the matrix products; learning: whether gradients are wanted."""
        size, weights = max(1, LOGITS_IN_MEMORY // len(E)), E.to(dtype)
        n, exact = (targets != -1).sum(), torch.promote_types(dtype, torch.float32)
        total, grad_v, grad_E = v.new_zeros(()), [], torch.zeros_like(E) if learning else None
        ids = torch.arange(len(E), device=E.device)  # (V,)
        for v_, t in zip(v.to(dtype).split(size), targets[:, None].split(size)):  # (c, d), (c, 1)
            asked, t = (t != -1).to(exact), t.where(t != -1, 0)  # (c, 1) each
            logp = F.linear(v_, weights).log_softmax(-1, dtype=exact)  # (c, V)
            total = total - (logp.gather(1, t) * asked).sum() / n
            if learning:
                g = logp.exp_().add_(ids == t, alpha=-1).to(dtype)  # (c, V): p, less 1 at the target
                grad_v.append(((g @ weights) * asked / n).to(v.dtype))  # (c, d)
                grad_E += g.T @ (v_ * asked / n).to(dtype)  # (V, d)
        if learning:
            ctx.save_for_backward(torch.cat(grad_v), grad_E)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradients made in the forward pass, times that of the loss."""
        grad_v, grad_E = ctx.saved_tensors
        return grad * grad_v, grad * grad_E, None, None, None


class SenseTable:
    """The senses of words, computed once: table(idx) (.., k, d) is what model.senses(idx) would compute anew.

    words are ids of any shape (None: the vocabulary); dtype is what they are kept in (None: that of the
    weights). It is right as long as the weights stay as they are. A word that it lacks has senses of NaN, so
    that no prediction after it is a number.
    """

    @torch.no_grad()
    def __init__(self, model: Backpack, words: Tensor | None = None, dtype: torch.dtype | None = None):
        if not model.config.n_sense:
            raise ValueError('a Transformer has no senses; take a Backpack (n_sense > 0)')
        E, k, self.dtype = model.wte.weight, model.config.n_sense, model.wte.weight.dtype
        words = torch.arange(model.config.n_vocab, device=E.device) if words is None else words.unique()
        n = len(words)
        self.row = torch.full((len(E),), n, device=E.device)  # of each word; the last is for those not there
        self.row[words] = torch.arange(n, device=E.device)
        self.senses = E.new_full((n + 1, k, E.shape[1]), math.nan, dtype=dtype)
        for i in range(0, n, 1024):
            self.senses[i:min(n, i + 1024)] = model.sense_network(model.wte(words[i:i + 1024]))  # (n, k, d)

    def __call__(self, idx: Tensor) -> Tensor:
        rows = F.embedding(self.row[idx], self.senses.flatten(1)).to(self.dtype)  # (.., k*d)
        return rows.unflatten(-1, self.senses.shape[1:])  # (.., k, d)


# -----------------------------------------------------------------------------
# python model.py: what the sizes of the paper cost.


def from_pretrained(name_or_dir):
    """A model from a checkpoint, a folder or the Hugging Face Hub, as rucksack/published.py reads it."""
    from rucksack.published import from_pretrained
    return from_pretrained(name_or_dir)


def print_sizes() -> None:
    """Parameters and training FLOPs per token of the paper's models, Backpack beside Transformer."""
    from rucksack.checkpoint import shape_of
    rows = {name.capitalize(): Config(**size) for name, size in SIZES.items()}
    for k in (1, 4, 16, 64):
        rows[f'Mini, Table 8, k={k}'] = Config(**SIZES['mini'], n_sense=k, sense_hidden=640)
    print(f'{"":19}{"Backpack: parameters in millions":^38}{"Transformer":>12}'
          f'{"MFLOPs to train on a token":>33}')
    print(f'{"":19}{"contextualizer":>15}{"senses":>10}{"total":>13}{"total":>12}'
          f'{"Backpack":>12}{"Transformer":>13}{"ratio":>8}')
    for name, config in rows.items():
        backpack, gpt = shape_of(config), shape_of(replace(config, n_sense=0))
        n, flops, gpt_flops = backpack.n_params(), backpack.flops_per_token(), gpt.flops_per_token()
        print(f'{name:19}{n["contextualizer"] / 1e6:15.1f}{n["senses"] / 1e6:10.1f}{n["total"] / 1e6:13.1f}'
              f'{gpt.n_params()["total"] / 1e6:12.1f}'
              f'{flops / 1e6:12.0f}{gpt_flops / 1e6:13.0f}{flops / gpt_flops:8.2f}')
    print('Vocabulary 50,257, length 512; senses computed for every token (once a distinct word is less).')


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog='model.py', description='Print what the sizes of the paper cost.')
    parser.error = lambda message: parser.exit(2, f'model.py: {ascii(message)}; it takes no arguments\n')
    parser.parse_args(argv)
    print_sizes()


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence when the reader, as head, has seen enough
    main(sys.argv[1:])
