"""One solution to each step of docs/exercise.md. Tests import it; alone, it does nothing."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from rucksack.model import MLP, Contextualizer


class SenseNetwork(nn.Module):
    """Step 1: embeddings (.., d) -> senses (.., k, d)."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.n_sense = config.n_sense
        self.ln_0 = nn.LayerNorm(d)
        self.ln_1 = nn.LayerNorm(d)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = MLP(d, config.sense_hidden, d)
        self.final_mlp = MLP(d, config.sense_hidden, config.n_sense * d)

    def forward(self, e):
        r = e + self.ln_0(e)
        r = r + self.mlp(self.ln_1(r))
        C = self.final_mlp(self.ln_2(r))
        return C.unflatten(-1, (self.n_sense, -1))


class SenseWeights(nn.Module):
    """Step 2: h (B, T, d) -> alpha (B, k, T, T)."""

    def __init__(self, config):
        super().__init__()
        self.n_sense = config.n_sense
        self.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)

    def forward(self, h):
        T = h.shape[1]
        query, key = self.c_attn(h).chunk(2, dim=-1)
        query = query.unflatten(-1, (self.n_sense, -1)).transpose(1, 2)  # (B, k, T, d/k)
        key = key.unflatten(-1, (self.n_sense, -1)).transpose(1, 2)
        scores = query @ key.mT / math.sqrt(key.shape[-1])  # (B, k, T, T)
        is_later = torch.ones(T, T, dtype=torch.bool).triu(1)
        return scores.masked_fill(is_later, -math.inf).softmax(-1)


def weighted_sum(alpha, C):
    """Step 3: alpha (B, k, T, T) and C (B, T, k, d) -> o (B, T, d)."""
    return torch.einsum('blij,bjld->bid', alpha, C)


class Backpack(nn.Module):
    """Step 4: ids (B, T) -> logits (B, T, V), or the loss."""

    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.contextualizer = Contextualizer(config)
        self.sense_network = SenseNetwork(config)
        self.sense_weights = SenseWeights(config)

    def forward(self, idx, targets=None, C=None):
        e = self.wte(idx)
        if C is None:
            C = self.sense_network(e)
        alpha = self.sense_weights(self.contextualizer(e))
        o = weighted_sum(alpha, C)
        logits = F.linear(o, self.wte.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def scale(idx, C, word, sense, factor):
    """Step 5: a copy of C in which one sense of one word is scaled."""
    edited = C.clone()
    chosen = edited[:, :, sense]  # (B, T, d), a view
    chosen[idx == word] *= factor
    return edited
