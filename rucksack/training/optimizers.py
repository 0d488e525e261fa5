"""The optimizers of a training run: AdamW, and Muon for matrices."""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rucksack.cli import bfloat16_unit
from rucksack.model import GPT, Backpack

MOMENTUM = 0.95  # as in torch's Muon


def make_optimizers(model: Backpack | GPT, name: str, learning_rate: float, weight_decay: float,
                    betas: tuple[float, float], *, decay_embeddings: bool = True,
                    muon_lr: float = 6e-3, loaded_lr: float = 1.0) -> list[Optimizer]:
    """Make AdamW ('adamw'), or AdamW and Muon ('muon').

    Muon takes every matrix but the embeddings. It orthogonalizes each update, so that no direction
    of a matrix outruns the others. With AdamW, the scores of SenseWeights can grow until a softmax
    is saturated, and that sense stops learning.
    weight_decay is on matrices (embeddings optional), never on biases and norms.
    Unless loaded_lr is 1, each group has a 'factor' by which the caller multiplies learning rates:
    loaded_lr for embeddings and contextualizer, 1 for senses and their weights.
    """
    embeddings = []
    linears = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            embeddings.append(module.weight)
        if isinstance(module, nn.Linear):
            linears[path] = module
    biases_and_norms = [p for p in model.parameters() if p.dim() == 1]
    matrices = [module.weight for module in linears.values()]
    known = {*embeddings, *biases_and_norms, *matrices}
    others = [p for p in model.parameters() if p not in known]  # such as the matrices of an LSTM
    embedding_decay = weight_decay if decay_embeddings else 0.0
    groups = [
        {'params': biases_and_norms, 'weight_decay': 0.0},
        {'params': embeddings, 'weight_decay': embedding_decay}]
    if name == 'adamw':
        others = matrices + others
    if others:
        groups.append({'params': others, 'weight_decay': weight_decay})
    groups = with_factors(groups, model, loaded_lr)
    adamw = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    if name == 'adamw':
        return [adamw]

    of_shape = defaultdict(list)  # (rows, columns) of a part -> matrices with such parts
    for path, module in linears.items():
        rows = module.out_features
        if path.endswith(('c_attn', 'final_mlp.c_proj')):  # queries, keys and values; k senses
            rows = model.config.n_embd
        of_shape[rows, module.in_features].append(module.weight)
    for_muon = [{'params': matrices, 'rows': rows} for (rows, _), matrices in of_shape.items()]
    for_muon = with_factors(for_muon, model, loaded_lr)
    return [adamw, Muon(for_muon, {'lr': muon_lr, 'weight_decay': weight_decay})]


def with_factors(groups: list[dict], model: Backpack | GPT, loaded_lr: float) -> list[dict]:
    """Split each group by its factor on the learning rate; unsplit if loaded_lr is 1."""
    if loaded_lr == 1:
        return groups
    new = {p for name, p in model.named_parameters() if name.startswith('sense_')}
    split = []
    for group in groups:
        senses = [p for p in group['params'] if p in new]
        loaded = [p for p in group['params'] if p not in new]
        split.append({**group, 'params': senses, 'factor': 1.0})
        split.append({**group, 'params': loaded, 'factor': loaded_lr})
    return [group for group in split if group['params']]


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
            for matrix in group['params']:
                state = self.state[matrix]
                if not state:
                    state['momentum_buffer'] = torch.zeros_like(matrix)
                momentum = state['momentum_buffer'].lerp_(matrix.grad, 1 - MOMENTUM)
                update = matrix.grad.lerp(momentum, MOMENTUM)  # Nesterov's
                updates.append(update.unflatten(0, (-1, group['rows'])))  # (parts, rows, columns)
            directions = orthogonalized(torch.cat(updates))  # (all parts, rows, columns)
            size = 0.2 * math.sqrt(max(directions.shape[1:]))  # for a root mean square of 0.2
            directions = directions.split([len(update) for update in updates])
            for matrix, direction in zip(group['params'], directions):
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
    if X.dtype == torch.float32 and bfloat16_unit(str(X.device)):
        X = X.bfloat16()  # five iterations are no more exact than bfloat16
    norm = X.norm(dim=(1, 2), keepdim=True)  # (n, 1, 1), at least the largest singular value
    X = X / norm.clamp(min=1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # as in torch's Muon
    for _ in range(5):
        gram = X @ X.mT  # (n, rows, rows)
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if is_tall else X
