"""PPLM, plug-and-play control of a Transformer (Dathathri et al. 2020), to compare in Table 12."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from docs.dev.topics import Writers, topics_of
from rucksack.fast import Cache, contextualize
from rucksack.loaded import LoadedModel
from rucksack.model import GPT
from rucksack.vocabulary import BAGS, bag_ids

# Settings, named as in its code.
NUM_ITERATIONS = 3
KL_SCALE = 0.01
GAMMA = 1.5
GM_SCALE = 0.9
WINDOW_LENGTH = 5
# Figure 2's; --steps 0 .01 .04 .05 .06 .07 makes the table in results.md, with the paper's five.
STEP_SIZES = (0, 0.04, 0.07, 0.1, 0.2, 0.5, 1)
TOY_STEP_SIZES = (0, 0.2, 0.3, 0.5)


def read_on(model: GPT, token: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Read one more token (n,) of n texts, after t tokens; gradients flow to the past.

    past (layers, n, t, 3*d) has their queries, keys and values. Returns logits (n, V), and past
    with the new token.
    """
    t = past.shape[2]
    cache = Cache(t + 1)
    for block, of_layer in zip(model.contextualizer.blocks, past):
        cache.tensors[block] = F.pad(of_layer, (0, 0, 0, 1))  # (n, t + 1, 3*d), with room for it
    e = model.wte(token[:, None])  # (n, 1, d)
    h = contextualize(model.contextualizer, e, t, cache)  # (n, 1, d)
    V = model.config.n_vocab
    logits = F.linear(h[:, 0], model.wte.weight[:V])  # (n, V)
    return logits, torch.stack(list(cache.tensors.values()))


@torch.enable_grad()
def steer(model: GPT, token: Tensor, past: Tensor, bag: list[int], plain: Tensor,
          step: float, norms: Tensor) -> Tensor:
    """Move the keys and values of n texts against the gradient of a loss.

    The loss is low if the next token is in the bag and the probabilities are near the plain ones
    (n, V). As in the published code, only the first WINDOW_LENGTH positions move, and gradients are
    divided by the largest norm so far for that text and layer, which norms (layers, n, 1, 1) keeps.
    Past queries get no gradient, because they are not used again.
    """
    delta = torch.zeros_like(past)
    for _ in range(NUM_ITERATIONS):
        delta.requires_grad_()
        logits, _ = read_on(model, token, past + delta)
        probs = logits.softmax(-1).clamp(min=1e-20)  # (n, V)
        log_ratio = (probs / plain).log()
        divergence = (probs * log_ratio).sum(-1)  # (n,), Kullback-Leibler
        p_bag = probs[:, bag].sum(-1)  # (n,)
        loss = KL_SCALE * divergence - p_bag.log()
        gradient, = torch.autograd.grad(loss.sum(), delta)
        gradient[:, :, WINDOW_LENGTH:] = 0
        norm = gradient.norm(dim=(2, 3), keepdim=True)
        torch.maximum(norms, norm, out=norms)
        delta = (delta - step * gradient / norms ** GAMMA).detach()
    return past + delta


@torch.no_grad()
def pplm(model: GPT, idx: Tensor, n: int, bag: list[int], step: float) -> Tensor:
    """Continue texts idx (B, 1) to (B, 1 + n) with a Transformer under PPLM.

    Before every token, the keys and values of the text so far are steered, and they stay steered.
    The token is drawn from steered^0.9 * plain^0.1. Step 0 means no control.
    """
    c = model.config
    B = len(idx)
    past = torch.zeros(c.n_layer, B, 0, 3 * c.n_embd, device=idx.device)
    plain_past = past
    norms = past.new_full((c.n_layer, B, 1, 1), 1e-15)
    for t in range(n):
        token = idx[:, -1]
        logits, plain_past = read_on(model, token, plain_past)
        plain = logits.softmax(-1).clamp(min=1e-20)  # (B, V)
        if t > 0 and step > 0:
            past = steer(model, token, past, bag, plain, step, norms)
        logits, past = read_on(model, token, past)
        steered = logits.softmax(-1)
        probs = steered ** GM_SCALE * plain ** (1 - GM_SCALE)
        drawn = torch.multinomial(probs, 1)  # (B, 1)
        idx = torch.cat([idx, drawn], dim=1)  # one token longer
    return idx


def pplm_writers(loaded: LoadedModel, steps: list[float] | None) -> dict[float, Writers]:
    """Map step sizes to a Transformer's writers for each topic (see topics.measure).

    A bag's words of one token count alone, unless there are none.
    """
    default = TOY_STEP_SIZES if loaded.is_toy else STEP_SIZES
    writers = {}
    for step in steps or default:
        writers[step] = {}
        for label in topics_of(loaded):
            words = loaded.single_tokens(BAGS[label]) or BAGS[label]
            bag = bag_ids(loaded.encoding, words)
            writers[step][label] = partial(pplm, loaded.model, bag=bag, step=step)
    return writers
