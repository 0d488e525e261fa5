"""Find stuck senses. The loss does not show them, and a saturated softmax hardly recovers."""

import torch
from torch import Tensor

from rucksack.model import Backpack


@torch.no_grad()
def sense_gauge(model: Backpack, idx: Tensor) -> Tensor:
    """Measure on the texts idx (B, T) how far each sense's weights (Eq. 12) depend on the text.

    Returns two measures (2, k), means over texts and positions:
    - the weight of the current token: near 1, the sense never looks back;
    - how far shuffling a text moves the weights, in total variation distance, from 0 (unchanged)
      to 1 (no overlap): near 0, the weights depend only on position.
    The first 32 positions of a text have few tokens to choose from, so they are left out (in a text
    shorter than 64, the first half is).
    """
    T = idx.shape[1]
    first = min(32, T // 2)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(T, generator=generator)  # (T,); a CPU index also indexes a GPU tensor
    measured = []
    for one in idx.split(1):  # one text at a time, because alpha is large
        alpha = model.alpha(one)[0, :, first:]  # (k, T - first, T)
        other = model.alpha(one[:, shuffled])[0, :, first:]
        current = alpha.diagonal(first, -2, -1)  # (k, T - first)
        distance = (alpha - other).abs().sum(-1) / 2  # (k, T - first), total variation
        both = torch.stack([current, distance])  # (2, k, T - first)
        measured.append(both.mean(-1))  # (2, k)
    return torch.stack(measured).mean(0)


def stuck_senses(model: Backpack, idx: Tensor) -> dict[str, int]:
    """Count stuck senses on the texts idx (B, T), as columns of the log.

    A stuck sense gives over 0.97 of its weight to the current token, or has weights that depend
    only on position. In the first steps from scratch, many senses still do.
    """
    on_current, moved = sense_gauge(model, idx)  # (k,) each
    return {
        'senses_on_current_token': (on_current > 0.97).sum().item(),
        'senses_by_position': (moved < 0.05).sum().item()}
