"""The Backpack language model in one file.

Paper: Hewitt, Thickstun, Manning, Liang, ACL 2023, https://arxiv.org/abs/2305.16765
Code: https://github.com/john-hewitt/backpacks-flash-attn; checkpoint: stanfordnlp/backpack-gpt2

A Backpack gives every token of the vocabulary k sense vectors, the same in every text.
A Transformer reads the text only to weight each sense of each token so far, by alpha >= 0.
The sum of all alpha * sense predicts the next token. So each logit is a sum with one term for each
sense of each token. You can read them, or pass edited senses; alpha and all parameters stay.
The model is five equations, numbered as in the paper. Backpack.forward has them as five lines.

    B         texts in a batch
    T         tokens in each text
    V         number of ids that the tokenizer knows, n_vocab
    d         width of a vector, n_embd
    k         senses per token, n_sense
    idx       token ids (B, T); x_j is the one at position j
    i, j, l   position i predicts the next token from all positions j <= i; l numbers the senses
    E         token embeddings (vocab_size, d), also the output layer; rows from V on are padding
    h         Eq. 11, the output of a Transformer for the embeddings E[idx]: (B, T, d)
    C         Eq. 10, the senses (B, T, k, d): C(x_j)_l depends on the embedding of x_j alone
    alpha     Eq. 12, the weights (B, k, T, T): i gives alpha[b, l, i, j] to sense l of token j
    o         Eq. 2, the weighted sum (B, T, d): o_i = sum_j sum_l alpha_lij C(x_j)_l
    logits    Eq. 9, o E^T: (B, T, vocab_size)

By hand (a test runs it): d is 2, where dimension 0 is skateboard and dimension 1 is health.
C(trick) = [(1, 0), (0, 0)] and C(sick) = [(1, 0), (0, 1)]. At the end of "trick sick", sense 0 has
weight 1/2 on both. Sense 1 has weight 1 on trick, where its vector is zero: weights must sum to 1.
o = 1/2 (1, 0) + 1/2 (1, 0) + 1 (0, 0) + 0 (0, 1) = (1, 0): skateboard, not health.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Config:
    """The sizes of a model, and its dropout; ValueError if they do not fit together."""

    block_size: int = 512    # longest text that the model can read, in tokens
    vocab_size: int = 50257  # rows of the embedding matrix E, unused ones included
    n_vocab: int = 0         # V, ids that the tokenizer knows (0: vocab_size)
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768        # d
    n_sense: int = 16        # k (0: a GPT, which has no senses)
    sense_hidden: int = 0    # hidden size of both sense MLPs (0: 4 n_embd, as published)
    dropout: float = 0.0     # dropout rate in the contextualizer; senses have none

    def __post_init__(self) -> None:
        self.n_vocab = self.n_vocab or self.vocab_size
        self.sense_hidden = self.sense_hidden or 4 * self.n_embd
        sizes = [self.block_size, self.n_vocab, self.n_layer, self.n_head, self.n_embd,
                 self.n_sense + 1, self.sense_hidden]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f'a size is out of range: {self}')
        if self.n_vocab > self.vocab_size or not 0 <= self.dropout < 1:
            raise ValueError(f'n_vocab or dropout is out of range: {self}')
        if self.n_embd % self.n_head or self.n_embd % (self.n_sense or 1):
            raise ValueError(f'n_head and n_sense must divide n_embd: {self}')


class MLP(nn.Module):
    """Two linear layers and a GELU, (.., n_in) -> (.., n_out); .. is any number of axes."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int):
        super().__init__()
        self.c_fc = nn.Linear(n_in, n_hidden)
        self.c_proj = nn.Linear(n_hidden, n_out)

    def forward(self, v: Tensor) -> Tensor:
        hidden = F.gelu(self.c_fc(v), approximate='tanh')  # (.., n_hidden)
        return self.c_proj(hidden)  # (.., n_out)


def split_heads(v: Tensor, parts: int, n: int) -> Tensor:
    """Split a projection (B, T, parts * n * size) into parts with n heads, (B, n, T, size) each."""
    v = v.unflatten(-1, (parts, n, -1))  # (B, T, parts, n, size)
    return v.permute(2, 0, 3, 1, 4)  # (parts, B, n, T, size), so that each part is a batch of heads


# The Backpack: senses, their weights, and their sum.
class SenseNetwork(nn.Module):
    """Eq. 10 as in the authors' code: embeddings e (.., d) -> the k senses of each (.., k, d)."""

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
        r = e + self.ln_0(e)  # (.., d), an embedding plus its own LayerNorm
        r = r + self.mlp(self.ln_1(r))  # (.., d); this residual was not intended (appendix A.1)
        C = self.final_mlp(self.ln_2(r))  # (.., k*d), senses side by side; nor was this ln_2
        return C.unflatten(-1, (self.n_sense, -1))  # (.., k, d), one row per sense


class SenseWeights(nn.Module):
    """Eq. 12: h (B, T, d) -> alpha (B, k, T, T), causal attention without values.

    One head per sense: alpha_l is the softmax over j <= i of query_l key_l^T / sqrt(d/k), so the
    weights of each sense sum to 1. The paper has no division and no bias; its code has both.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        query, key = split_heads(self.c_attn(h), 2, self.n_sense)  # (B, k, T, d/k) each
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT  # (B, k, T, T)
        is_later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)  # (T, T), where j > i
        scores = scores.masked_fill(is_later, -math.inf)
        return scores.softmax(-1, dtype=self.c_attn.weight.dtype)  # even under autocast


def weighted_sum(alpha: Tensor, C: Tensor) -> Tensor:
    """Compute Eq. 2, weights (B, k, T, T) and senses (B, T, k, d) -> o (B, T, d)."""
    B, k, _, T = alpha.shape
    assert C.shape[:3] == (B, T, k), C.shape  # einsum would broadcast an axis of size 1
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """A Backpack language model; ValueError if config has no senses.

    contextualizer is any module (B, T, d) -> (B, T, d) that does not look ahead, such as a wrapped
    LSTM (the paper's section 8). Its parameters are kept. The default is a new GPT-2.
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
                init_parameters(part, config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, C: Tensor | None = None,
                alpha: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, vocab_size) of the token after each position of idx (B, T).

        With targets (B, T), the next ids (-1 skips one), return their mean loss in nats per token.
        C (B, T, k, d) and alpha (B, k, T, T) replace senses(idx) and alpha(idx), as to edit them.
        """
        h = self.contextualizer(self.wte(idx))                     # (B, T, d)           Eq. 11
        C = self.senses(idx) if C is None else C                   # (B, T, k, d)        Eq. 10
        alpha = self.sense_weights(h) if alpha is None else alpha  # (B, k, T, T)        Eq. 12
        o = weighted_sum(alpha, C)                                 # (B, T, d)           Eq. 2
        logits = self.project(o)                                   # (B, T, vocab_size)  Eq. 9
        return logits if targets is None else mean_loss(logits, targets)

    def senses(self, idx: Tensor) -> Tensor:
        """Compute Eq. 10, the senses C of ids of any shape (..): (.., k, d)."""
        return self.sense_network(self.wte(idx))

    def alpha(self, idx: Tensor) -> Tensor:
        """Compute Eq. 11 and 12, the weights of senses in the texts idx (B, T): (B, k, T, T)."""
        return self.sense_weights(self.contextualizer(self.wte(idx)))

    def project(self, v: Tensor) -> Tensor:
        """Compute Eq. 9, v E^T, for vectors v (.., d), such as o or a sense: (.., vocab_size)."""
        return F.linear(v, self.wte.weight)

    @torch.no_grad()
    def generate(self, idx: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, *,
                 edit: Callable | None = None, stop: int | None = None) -> Tensor:
        """Continue texts idx (B, T) by n ids: (B, T + n), or fewer once all have drawn stop.

        An edit is a function (text, C) -> C. Temperature 0 takes the likeliest id.
        """
        n_prompt = idx.shape[1]
        for _ in range(n):
            text = idx[:, -self.config.block_size:]  # (B, T), what the model can read
            if edit is None:
                logits = self(text)  # (B, T, vocab_size)
            else:
                C = edit(text, self.senses(text))  # (B, T, k, d)
                assert C is not None  # forward would take the senses as they are
                logits = self(text, C=C)
            logits = logits[:, -1, :self.config.n_vocab]  # (B, V), of the next token
            idx = torch.cat([idx, draw(logits, temperature, top_k)], dim=1)  # one token longer
            if stop is not None and (idx[:, n_prompt:] == stop).any(1).all():
                break
        return idx


# The contextualizer is a GPT-2. If you know nanoGPT, skip the rest, the baseline GPT included.
class Contextualizer(nn.Module):
    """Eq. 11, h = Transformer(E[x]): embeddings e (B, T, d) -> contextual vectors h (B, T, d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, e: Tensor) -> Tensor:
        T = e.shape[1]
        h = self.drop(e + self.wpe.weight[:T])  # (B, T, d) + (T, d), positions 0 to T - 1
        for block in self.blocks:
            h = block(h)  # (B, T, d)
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


class GPT(nn.Module):
    """The baseline Transformer, a GPT-2, whose logits are h E^T. It has no senses: n_sense is 0."""

    generate = Backpack.generate

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


def init_parameters(part: nn.Module, n_layer: int) -> None:
    """Initialize as GPT-2 does: normal entries, smaller ones in every c_proj, zero biases."""
    for name, module in part.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 / math.sqrt(2 * n_layer) if name.endswith('c_proj') else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average -log p(target) over targets (B, T) that are not -1: a scalar, in nats per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def draw(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Draw an id (B, 1) for each row of logits (B, V); top_k keeps the likeliest, None all."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f'temperature is {temperature}, top_k {top_k}: they must be >= 0 and >= 1')
    if temperature < 1e-30:  # 0, or nearly
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        top, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, ids, top)  # (B, V), -inf elsewhere
    probs = (logits / temperature).softmax(-1)
    return torch.multinomial(probs, 1)
