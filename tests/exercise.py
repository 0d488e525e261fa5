"""Solutions of docs/exercise.md beyond steps 1 to 4, which are model.py; tests run them."""

import re

import torch
from torch import nn
from torch.nn import functional as F

import rucksack
from rucksack.hub.published import to_our_names


def scale(idx, C, word, sense, factor):
    """Step 5: a copy of C in which one sense of one word is scaled."""
    edited = C.clone()
    chosen = edited[:, :, sense]  # (B, T, d), a view
    chosen[idx == word] *= factor
    return edited


# -----------------------------------------------------------------------------
# The rewards.

english, encoding = rucksack.load('english')


def says(c, n):
    """Reward 1: the text of the n tokens that the sense c (d,) raises most."""
    logits = english.wte.weight[:english.config.n_vocab] @ c  # (V,)
    return encoding.decode(logits.topk(n).indices.tolist())


def attention(query, key, C):
    """Reward 2: query and key (B, k, T, d/k) and C (B, T, k, d) -> o (B, T, d)."""
    values = C.transpose(1, 2)  # (B, k, T, d)
    y = F.scaled_dot_product_attention(query, key, values, is_causal=True)  # (B, k, T, d)
    return y.sum(1)


def terms(model, idx, v):
    """Reward 3: what each sense of the text (1, T) adds along v at the last position, (T, k)."""
    e = model.wte(idx)
    alpha = model.sense_weights(model.contextualizer(e))  # (1, k, T, T)
    scores = model.sense_network(e)[0] @ v  # (T, k)
    return alpha[0, :, -1].T * scores


def predict(factor):
    """Reward 4: probabilities (vocab_size,) of the next token once the sense is scaled."""
    E = english.wte.weight
    idx = torch.tensor([encoding.encode_ordinary('When the nurse came into the room,')])
    position = 2  # the position of nurse
    weight = english.alpha(idx)[0, 10, -1, position]
    added = weight * (E @ english.senses(idx)[0, position, 10])  # (vocab_size,)
    logits = english(idx)[0, -1] + (factor - 1) * added
    return logits.softmax(-1)


def train(model, ids, steps=800):
    """Reward 5: train a model on ids (n,), with Muon for matrices and AdamW for the rest."""
    for part in model.modules():  # model.py starts with smaller weights than the page
        if part is not model.wte and hasattr(part, 'reset_parameters'):
            part.reset_parameters()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    embeddings = [model.wte.weight, model.contextualizer.wpe.weight]
    for_muon = [p for p in matrices if all(p is not e for e in embeddings)]
    for_adamw = embeddings + [p for p in model.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(for_muon, lr=2e-2, weight_decay=0.1)
    adamw = torch.optim.AdamW(for_adamw, lr=6e-3, betas=(0.9, 0.99))
    for step in range(steps):
        for optimizer in (muon, adamw):
            rate = min(1, (step + 1) / 30) * (1 - step / steps)
            optimizer.param_groups[0]['lr'] = optimizer.defaults['lr'] * rate
            optimizer.zero_grad()
        starts = torch.randint(len(ids) - 64, (16, 1))
        blocks = ids[starts + torch.arange(65)]  # (16, 65)
        loss = model(blocks[:, :-1], blocks[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        if step % 100 == 0:
            print(f'step {step}: loss {loss.item():.3f}')


def load_published(model, state):
    """Reward 6: copy weights with the authors' names into a model."""
    own = to_our_names(state)
    _, d = model.wte.weight.shape
    for name, weight in own.items():
        layer = re.search(r'blocks\.(\d+)\.attn\.c_attn', name)
        if layer:
            weight[:d] /= int(layer[1]) + 1  # the queries
    model.load_state_dict(own)
