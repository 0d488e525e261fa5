"""A model while it trains: DistinctIds computes its loss faster; stuck_senses measures it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rucksack.model import GPT, Backpack, mean_loss


def distinct_ids(idx: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct ids of texts idx (B, T): ids (n,) and places (B, T), idx = ids[places]."""
    ids, places = idx.unique(return_inverse=True)
    ids = F.pad(ids, (0, -len(ids) % 64))  # a multiple of 64, so that few shapes occur
    return ids, places


class DistinctIds(nn.Module):
    """Computes the senses of an id once per batch. A GPT, which has none, is called unchanged.

    The caller finds the distinct ids: a compiled graph cannot depend on how many there are.
    """

    def __init__(self, model: Backpack | GPT):
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """Return model(idx, targets) for texts (B, T), given the distinct_ids of idx.

        In evaluation mode, the loss leaves out the padding rows of E. In training they stay,
        because products are faster with a multiple of 64 rows.
        """
        if self.model.config.n_sense == 0:
            logits = self.model(idx)  # (B, T, vocab_size)
        else:
            senses = self.model.senses(ids)  # (n, k, d)
            # senses[places] would sum an id's gradients in bfloat16 under autocast, where 256 + 1
            # is 256: a frequent id would lose most of them. F.embedding sums in float32.
            table = senses.flatten(1).to(self.model.wte.weight.dtype)  # (n, k*d)
            C = F.embedding(places, table)  # (B, T, k*d), senses of every token
            C = C.to(senses.dtype)
            C = C.unflatten(-1, senses.shape[1:])  # (B, T, k, d)
            logits = self.model(idx, C=C)  # (B, T, vocab_size)
        if not self.training:
            logits = logits[..., :self.model.config.n_vocab]  # (B, T, V)
        return mean_loss(logits, targets)


@torch.no_grad()
def sense_gauge(model: Backpack, idx: Tensor) -> Tensor:
    """Measure on the texts idx (B, T) how far each sense's weights (Eq. 12) depend on the text.

    Returns two measures (2, k), means over texts and positions:
    - the weight of the current token: near 1, the sense never looks back;
    - how far shuffling a text moves the weights, in total variation distance, from 0 (unchanged)
      to 1 (no overlap): near 0, the weights depend only on position.
    The first 32 positions (at most half a text) have few tokens to choose from: they are left out.
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
    only on position, and a saturated softmax hardly recovers. In the first steps, many still do.
    """
    on_current, moved = sense_gauge(model, idx)  # (k,) each
    return {
        'senses_on_current_token': (on_current > 0.97).sum().item(),
        'senses_by_position': (moved < 0.05).sum().item()}
