"""The optimizers of a training run: AdamW, and Muon for matrices."""

import math
from collections import defaultdict
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rucksack.device import bfloat16_unit
from rucksack.model import GPT, Backpack

MOMENTUM = 0.95  # as in torch's Muon
STACKED = ('c_attn', 'final_mlp.c_proj')  # queries, keys and values; senses


class Rates(Protocol):
    """The settings of train.py that optimizers read."""

    optimizer: str
    learning_rate: float
    muon_lr: float
    loaded_lr: float
    weight_decay: float
    decay_embeddings: bool
    beta1: float
    beta2: float


def make_optimizers(model: Backpack | GPT, s: Rates) -> list[Optimizer]:
    """Make AdamW ('adamw'), or AdamW and Muon ('muon').

    Muon takes every matrix but the embeddings. It orthogonalizes each update, so that no direction
    of a matrix outruns the others. With AdamW, the scores of SenseWeights can grow until a softmax
    is saturated, and that sense stops learning.
    weight_decay is on matrices (embeddings optional), never on biases and norms.
    Each group has a 'factor' by which the caller multiplies its learning rate: 1 for senses and
    their weights, loaded_lr for embeddings and contextualizer.
    """
    for_adamw = defaultdict(list)  # (weight decay, factor) -> parameters
    for_muon = defaultdict(list)  # (rows, columns, factor) of a part -> matrices with such parts
    for path, module in model.named_modules():
        factor = 1.0 if path.startswith('sense_') else s.loaded_lr
        is_undecayed = isinstance(module, nn.Embedding) and not s.decay_embeddings
        for p in module.parameters(recurse=False):
            if s.optimizer == 'muon' and isinstance(module, nn.Linear) and p.dim() == 2:
                rows = module.out_features
                if path.endswith(STACKED):
                    rows = model.config.n_embd
                for_muon[rows, module.in_features, factor].append(p)
            elif p.dim() == 1 or is_undecayed:
                for_adamw[0.0, factor].append(p)
            else:
                for_adamw[s.weight_decay, factor].append(p)
    groups = [{'params': params, 'weight_decay': decay, 'factor': factor}
              for (decay, factor), params in for_adamw.items()]
    adamw = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)
    if s.optimizer == 'adamw':
        return [adamw]
    groups = [{'params': matrices, 'rows': rows, 'factor': factor}
              for (rows, _, factor), matrices in for_muon.items()]
    return [adamw, Muon(groups, {'lr': s.muon_lr, 'weight_decay': s.weight_decay})]


def set_rates(optimizers: list[Optimizer], share: float) -> None:
    """Set the learning rate of each group: share * its optimizer's peak * the group's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group['lr'] = share * optimizer.defaults['lr'] * group['factor']


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for stacked matrices: each part is updated by itself.

    Each group has params, matrices (parts * rows, columns), and rows, the number of rows in a part.
    A group's parts have one shape, so one batch of products updates them all: a GPU takes longer to
    start many small products than to compute them.
    A part is updated as by torch.optim.Muon with adjust_lr_fn='match_rms_adamw', so that learning
    rates are comparable with AdamW's. Unlike torch's, it multiplies in bfloat16 only where that is
    fast: on a CPU without bfloat16 instructions, float32 is many times faster.
    """

    @torch.no_grad()
    def step(self):
        """Update every part with its rows of the gradient."""
        for group in self.param_groups:
            updates = []
            trained = [p for p in group['params'] if p.grad is not None]  # others are frozen
            if not trained:
                continue
            for matrix in trained:
                state = self.state[matrix]
                if not state:
                    state['momentum_buffer'] = torch.zeros_like(matrix)
                momentum = state['momentum_buffer'].lerp_(matrix.grad, 1 - MOMENTUM)
                update = matrix.grad.lerp(momentum, MOMENTUM)  # Nesterov's
                updates.append(update.unflatten(0, (-1, group['rows'])))  # (parts, rows, columns)
            directions = orthogonalized(torch.cat(updates))  # (all parts, rows, columns)
            size = 0.2 * math.sqrt(max(directions.shape[1:]))  # for a root mean square of 0.2
            directions = directions.split([len(update) for update in updates])
            for matrix, direction in zip(trained, directions):
                direction = direction.flatten(0, 1)  # (parts * rows, columns)
                matrix.mul_(1 - group['lr'] * group['weight_decay'])
                matrix.sub_(direction, alpha=group['lr'] * size)


def orthogonalized(X: Tensor) -> Tensor:
    """Move all singular values of matrices (n, rows, columns) near 1 by Newton-Schulz iterations.

    Each iteration maps a singular value s to a s + b s^3 + c s^5.
    """
    is_tall = X.shape[1] > X.shape[2]
    if is_tall:
        # Transposed, X X^T is smaller. Contiguous, a matrix rounds the same alone or in a batch.
        X = X.mT.contiguous()
    if bfloat16_unit(str(X.device)):
        X = X.bfloat16()  # five iterations are no more exact than bfloat16
    norm = X.norm(dim=(1, 2), keepdim=True)  # (n, 1, 1), at least the largest singular value
    X = X / norm.clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # as in torch's Muon
    for _ in range(5):
        gram = X @ X.mT  # (n, rows, rows)
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if is_tall else X
