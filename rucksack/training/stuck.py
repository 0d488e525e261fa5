"""Is a sense stuck? The loss does not show it, and a saturated softmax hardly recovers."""

import torch
from torch import Tensor

from rucksack.data import TokenDataset
from rucksack.model import Backpack
from rucksack.training.machine import Machine


@torch.no_grad()
def sense_gauge(model: Backpack, idx: Tensor) -> Tensor:
    """Measure on the texts idx (B, T) how far each sense's weights (Eq. 12) depend on the text.

    Returns (2, k). First, the weight of the current token: near 1, the sense never looks back.
    Second, the total variation distance by which the weights move when the tokens of a text are
    shuffled, 0 unchanged to 1 no overlap: near 0, the weights depend only on position.
    Both are means over texts and positions. They leave out the first 32 positions of a text (half
    of a text shorter than 64), which have few tokens to choose from.
    """
    T = idx.shape[1]
    first = min(32, T // 2)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(T, generator=generator)  # (T,); a CPU index also indexes a GPU tensor
    measured = []
    for text in idx.split(1):  # one at a time, as alpha is large
        alpha = model.alpha(text)[0, :, first:]  # (k, T - first, T)
        other = model.alpha(text[:, shuffled])[0, :, first:]
        current = alpha.diagonal(first, -2, -1)  # (k, T - first)
        distance = (alpha - other).abs().sum(-1) / 2  # (k, T - first), total variation
        both = torch.stack([current, distance])  # (2, k, T - first)
        measured.append(both.mean(-1))  # (2, k)
    return torch.stack(measured).mean(0)


def stuck_senses(model: Backpack, data: TokenDataset, machine: Machine) -> dict[str, int]:
    """Count the senses that do not read 16 texts of the data, as columns of the log.

    These are senses that give over 0.97 of their weight to the current token, and senses whose
    weights depend only on position; a sense can be both. In the first steps from scratch, senses
    are often of the second kind.
    """
    idx, _ = data(data.spread(16))  # (16, block_size)
    with machine.autocast():
        on_current, moved = sense_gauge(model, idx.to(machine.device))  # (k,) each
    return {
        'senses_on_current_token': (on_current > 0.97).sum().item(),
        'senses_by_position': (moved < 0.05).sum().item()}
