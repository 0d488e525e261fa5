"""The Backpack language model in one file.

Paper: Hewitt, Thickstun, Manning, Liang, ACL 2023, https://arxiv.org/abs/2305.16765
Code: https://github.com/john-hewitt/backpacks-flash-attn; weights: stanfordnlp/backpack-gpt2

A Backpack learns k sense vectors for each token of the vocabulary. They do not depend on context.
A Transformer reads the text, but only to choose weights: each position gives a weight alpha >= 0
to every sense of every token so far. For each sense, these weights sum to 1 over the tokens.
The sum of all alpha * sense, times the output embeddings, gives the logits. So each logit is a sum
of terms, one per token and sense. You can read the terms, or edit a sense and leave alpha as it is.

    d         width of a vector, n_embd
    k         number of senses per token, n_sense
    V         number of ids that the tokenizer has, n_vocab
    idx       token ids, (B, T): B texts of T tokens; x_j is the token at position j
    i, j, l   position i predicts token i + 1 from all positions j <= i; l is one of the k senses
    E         embeddings, also the output layer: (vocab_size, d); rows from V on are padding
    e         embeddings of the text, E[idx]: (B, T, d)
    h         Eq. 11, output of the Transformer for e: (B, T, d)
    C         Eq. 10, senses of the text: (B, T, k, d); C(x_j)_l is sense l of token x_j
    alpha     Eq. 12, weights: (B, k, T, T); alpha_lij is what position i gives to C(x_j)_l,
              the softmax over j <= i of query_li . key_lj, both linear in h
    o         Eq. 2, weighted sum: (B, T, d); o_i = sum_j sum_l alpha_lij C(x_j)_l
    logits    Eq. 9, o E^T: (B, T, vocab_size)

Worked example (a test runs it): let d = 2, with dimension 0 for skateboarding and 1 for health.
C(sick) = [(1, 0), (0, 1)], C(trick) = [(1, 0), (0, 0)]. After "sick trick", sense 0 has weight 1/2
on each token and adds 1/2 * (1, 0) + 1/2 * (1, 0). Sense 1 stays silent by putting all its weight
on trick, its zero vector: 0 * (0, 1) + 1 * (0, 0). So o is (1, 0): skateboarding, not health.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    """Model sizes and dropout rate. Raises ValueError if they are inconsistent."""

    block_size: int = 512    # maximum context length, in tokens
    vocab_size: int = 50257  # rows of E, padding included
    n_vocab: int = 0         # V (0: vocab_size, no padding)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k; a GPT sets it to 0, which is how other files recognize one
    sense_hidden: int = 0    # hidden size of both MLPs in the sense network (0: 4 * n_embd)
    dropout: float = 0.0     # in the contextualizer; the sense network has none

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        heads = [self.n_head, self.n_sense] if self.n_sense else [self.n_head]
        sizes = [self.block_size, self.n_vocab, self.n_layer, self.n_embd, self.sense_hidden]
        are_positive = all(isinstance(size, int) and size > 0 for size in sizes + heads)
        if not (are_positive and self.n_vocab <= self.vocab_size and 0 <= self.dropout < 1):
            raise ValueError(f'a size or the dropout is out of range: {self}')
        if any(self.n_embd % n for n in heads):
            raise ValueError(f'n_head and n_sense must divide n_embd: {self}')


class SenseNetwork(nn.Module):
    """Eq. 10: embeddings e (.., d) -> k senses for each token, C (.., k, d), whatever the text."""

    def __init__(self, config: Config):
        super().__init__()
        d = config.n_embd
        self.ln_0 = nn.LayerNorm(d)
        self.ln_1 = nn.LayerNorm(d)
        self.mlp = MLP(d, config.sense_hidden, d)  # Linear, tanh GELU, Linear
        self.ln_2 = nn.LayerNorm(d)
        self.final_mlp = MLP(d, config.sense_hidden, config.n_sense * d)

    def forward(self, e: Tensor) -> Tensor:
        # NOTE: A GPT-2 block whose attention is the identity, then a second MLP. The authors call
        # ln_2 and one residual accidental (appendix A.1; we think it is this first one). The
        # released weights have both.
        r = e + self.ln_0(e)  # (.., d), where GPT-2 has e + attention(ln_0(e))
        r = r + self.mlp(self.ln_1(r))  # (.., d)
        C = self.final_mlp(self.ln_2(r))  # (.., k*d), the senses side by side
        return C.unflatten(-1, (-1, e.shape[-1]))  # (.., k, d), one row per sense


class SenseWeights(nn.Module):
    """Eq. 12: h (B, T, d) -> alpha (B, k, T, T), causal attention weights, one head per sense."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)  # no values: C is summed

    def forward(self, h: Tensor) -> Tensor:
        # For each sense l and position i: softmax over j <= i of (query_li . key_lj) / sqrt(d/k).
        # NOTE: The paper has no division and no bias; the released weights were trained with both.
        query, key = split_heads(self.c_attn(h), 2, self.n_sense)  # (B, k, T, d/k) each
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT  # (B, k, T, T)
        is_later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)  # (T, T), j > i
        scores = scores.masked_fill(is_later, -math.inf)  # so that later tokens get weight 0
        # float32 under autocast too, so that weights you read sum to 1. weighted_sum rounds them.
        return scores.softmax(-1, dtype=self.c_attn.weight.dtype)


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Compute Eq. 2: weights alpha (B, k, T, T) and senses C (B, T, k, d) -> o (B, T, d)."""
    B, k, _, T = alpha.shape
    if C.shape[:3] != (B, T, k):  # einsum would silently broadcast an axis of size 1
        raise ValueError(f'alpha {tuple(alpha.shape)} does not fit senses C {tuple(C.shape)}')
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """A Backpack. Its contextualizer is a GPT-2, or any causal module (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config, contextualizer: nn.Module | None = None):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config) if contextualizer is None else contextualizer
        self.sense_network = SenseNetwork(config)
        self.sense_weights = SenseWeights(config)
        for part in self.children():
            if part is not contextualizer:  # one that was passed in keeps its parameters
                init_parameters(part, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, C: Tensor | None = None,
                alpha: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, vocab_size) of the token after each position of idx (B, T).

        Given targets (B, T), the next ids (or -1 to skip one), return the mean loss instead, in
        nats per token. Pass C or alpha to use them in place of the model's own.
        """
        e = self.wte(idx)                     # (B, T, d)
        if C is None:
            C = self.sense_network(e)         # (B, T, k, d)        Eq. 10
        if alpha is None:
            h = self.contextualizer(e)        # (B, T, d)           Eq. 11
            alpha = self.sense_weights(h)     # (B, k, T, T)        Eq. 12
        o = weighted_sum(alpha, C)            # (B, T, d)           Eq. 2
        logits = self.project(o)              # (B, T, vocab_size)  Eq. 9
        return logits if targets is None else mean_loss(logits, targets)

    def senses(self, idx: Tensor) -> Tensor:
        """Compute Eq. 10, the senses C (.., k, d) of ids of any shape (..)."""
        return self.sense_network(self.wte(idx))

    def alpha(self, idx: Tensor) -> Tensor:
        """Compute Eq. 11 and 12, the weights alpha (B, k, T, T) for the texts idx (B, T)."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Compute Eq. 9, the logits v E^T (.., vocab_size) of vectors v (.., d): o, or a sense."""
        return F.linear(v, self.wte.weight)

    @torch.no_grad()
    def generate(self, idx: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, *,
                 edit: Callable | None = None, stop: int | None = None) -> Tensor:
        """Append n ids to each text of idx (B, T). Ends early when every text has produced stop."""
        n_prompt = idx.shape[1]
        for _ in range(n):
            recent = idx[:, -self.config.block_size:]  # (B, T), cropped to the context length
            if edit is None:
                logits = self(recent)  # (B, T, vocab_size)
            else:  # an edit is a function (idx, C) -> C
                C = edit(recent, self.senses(recent))  # (B, T, k, d)
                assert C is not None, 'an edit must return the senses to use'
                logits = self(recent, C=C)
            logits = logits[:, -1, :self.config.n_vocab]  # (B, V), without padding
            next_id = draw(logits, temperature, top_k)  # (B, 1)
            idx = torch.cat([idx, next_id], dim=1)  # (B, T + 1)
            if stop is not None and (idx[:, n_prompt:] == stop).any(1).all():
                break
        return idx


# If you know nanoGPT, you can stop here. The rest is GPT-2, which is also the baseline.
class Contextualizer(nn.Module):
    """Eq. 11: embeddings e (B, T, d) -> contextual vectors h (B, T, d), with GPT-2's layers."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, e: Tensor) -> Tensor:
        T = e.shape[1]
        if T > len(self.wpe.weight):
            raise ValueError(f'cannot read {T} tokens; block_size is {len(self.wpe.weight)}')
        h = self.drop(e + self.wpe.weight[:T])  # (B, T, d) + (T, d), positions 0 to T - 1
        for block in self.blocks:
            h = block(h)
        return self.ln_f(h)


class Block(nn.Module):
    """One pre-norm Transformer layer with residual connections, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config.n_embd, 4 * config.n_embd, config.n_embd)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.drop(self.attn(self.ln_1(h)))
        return h + self.drop(self.mlp(self.ln_2(h)))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which position i sees positions j <= i, (B, T, d) -> (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = split_heads(self.c_attn(h), 3, self.n_head)  # (B, n_head, T, d/n_head)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # (B, T, d), heads side by side
        return self.c_proj(y)


def split_heads(v: Tensor, n_parts: int, n_head: int) -> list[Tensor]:
    """Split v (B, T, n_parts * d) into n_parts tensors of heads, (B, n_head, T, d/n_head) each."""
    parts = v.chunk(n_parts, dim=-1)  # (B, T, d) each
    return [part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in parts]


class MLP(nn.Module):
    """Two linear layers with a GELU between them, (.., n_in) -> (.., n_out)."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, v: Tensor) -> Tensor:
        hidden = F.gelu(self.c_fc(v), approximate='tanh')  # (.., n_hidden)
        return self.c_proj(hidden)  # (.., n_out)


class GPT(nn.Module):
    """The baseline, GPT-2: a Backpack without Eq. 10, 12 and 2, so that logits = h E^T."""

    generate = Backpack.generate  # pass no edit: a GPT has no senses

    def __init__(self, config: Config):
        super().__init__()
        self.config = replace(config, n_sense=0)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # E
        self.contextualizer = Contextualizer(config)
        init_parameters(self, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.contextualizer(self.wte(idx))  # (B, T, d)
        logits = F.linear(h, self.wte.weight)  # (B, T, vocab_size)
        return logits if targets is None else mean_loss(logits, targets)


def init_parameters(model: nn.Module, n_layer: int) -> None:
    """Draw weights from a normal with std 0.02, as GPT-2 does (c_proj smaller); zero the biases."""
    # NOTE: GPT-2 shrinks the layers that add to a residual. final_mlp.c_proj adds to none, but we
    # shrink it too, as the authors' code does, so senses start sqrt(2 n_layer) times smaller.
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 / math.sqrt(2 * n_layer) if name.endswith('c_proj') else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average -log p(target) over targets (B, T) that are not -1: a scalar, in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def draw(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Sample an id (B, 1) for each row of logits (B, V), from the top_k likeliest (None: all)."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f'temperature must be >= 0, top_k >= 1; got {temperature} and {top_k}')
    if temperature < 1e-30:  # greedy: 0, or too small to divide by
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        top, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k) each
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, top)  # all others -inf
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1)
