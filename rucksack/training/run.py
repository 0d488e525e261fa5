"""The folder of a training run: locked while the run trains; its checkpoints and its log."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from rucksack.cli import UserError, lock_folder, reading
from rucksack.model import GPT, Backpack
from rucksack.training import checkpoint as ckpt

COLUMNS = ['step', 'tokens', 'loss', 'val_loss', 'senses_on_current_token', 'senses_by_position',
           'learning_rate', 'muon_lr', 'grad_norm', 'tokens_per_second']  # of log.csv


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints in the folder of a run: ckpt.pt, best.pt and every ckpt-STEP.pt."""
    files = sorted(folder.glob('*.pt'))
    return [file for file in files if re.fullmatch(r'ckpt|ckpt-\d+|best', file.stem)]


def refuse_to_replace(path: Path) -> None:
    """Raise UserError if the folder of a checkpoint holds checkpoints or a log already."""
    for file in [*checkpoints_in(path.parent), *path.parent.glob('log.csv')]:
        raise UserError(f'{file} exists; continue it with --init_from=resume, '
                        'replace it with --overwrite, or choose another --out_dir')


def check_finite(step: int, tensors: Iterable[Tensor]) -> None:
    """Raise FloatingPointError if a weight or moment is not finite: it must not be saved."""
    is_finite = [tensor.isfinite().all() for tensor in tensors]
    if not torch.stack(is_finite).all():
        raise FloatingPointError(f'step {step}: a weight or an optimizer moment is not finite')


class RunFolder:
    """The folder of a run, in which path is the latest checkpoint; only the first process writes.

    facts are stored in every checkpoint beside the weights; state is the checkpoint to resume, or
    {}. Until a new run has saved its first checkpoint, nothing of an older run is touched.
    """

    def __init__(self, path: Path, tokens_per_step: int, facts: dict, state: dict, rank: int):
        self.path = path
        self.log_path = path.with_name('log.csv')
        self.tokens_per_step = tokens_per_step
        self.facts = facts
        self.saved_step = state.get('step')  # of the last checkpoint
        self.best_val_loss = state.get('best_val_loss', math.inf)
        self.log_text = state.get('log', ','.join(COLUMNS) + '\n')  # full log, for checkpoints
        self.is_open = rank == 0
        self.wandb = None
        if not self.is_open:
            return
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        busy = f'another process is training in {folder}; choose another --out_dir'
        self.lock = lock_folder(folder, busy)
        for name in ('ckpt', 'ckpt-[0-9]*', 'best'):
            for partial in folder.glob(f'{name}.pt.*partial'):  # left by a killed run
                partial.unlink()
        if state:
            self.log_path.write_text(self.log_text)  # without the rows after the checkpoint
            if state['val_loss'] == self.best_val_loss:
                ckpt.copy_to_best(path)  # in case the run was killed before this copy

    def start_wandb(self) -> None:
        """Log to Weights & Biases too; WANDB_PROJECT and WANDB_NAME name the run."""
        with reading('--wandb_log', 'pip install wandb', problem='cannot be used'):
            import wandb
        if self.is_open:
            self.wandb = wandb.init(config=self.facts['settings'])

    def log(self, step: int, row: dict) -> None:
        """Add a row to log.csv and, if enabled, to Weights & Biases.

        FloatingPointError if its loss is not finite.
        """
        loss = row.get('loss', row.get('val_loss'))
        if not math.isfinite(loss):
            raise FloatingPointError(f'step {step}: the loss is {loss}')
        if not self.is_open:
            return
        row = {'step': step, 'tokens': step * self.tokens_per_step, **row}
        cells = []
        for name in COLUMNS:
            value = row.get(name, '')
            if isinstance(value, float):
                value = f'{value:.6g}'
            cells.append(str(value))
        line = ','.join(cells) + '\n'
        self.log_text += line
        if self.saved_step is not None:
            with open(self.log_path, 'a') as file:
                file.write(line)
        if self.wandb:
            self.wandb.log(row, step=step)

    def save(self, step: int, model: Backpack | GPT, optimizers: list[Optimizer],
             val_loss: float = math.inf) -> None:
        """Write ckpt.pt, with all that resuming needs; copy it to best.pt if it is the best yet.

        Without an evaluation, val_loss is inf. FloatingPointError if a weight or a moment is not
        finite.
        """
        is_evaluated = val_loss < math.inf
        if step == self.saved_step and not is_evaluated:  # saved already, perhaps with its loss
            return
        tensors = list(model.parameters())
        for optimizer in optimizers:
            for moments in optimizer.state.values():
                tensors.extend(moments.values())
        check_finite(step, tensors)
        is_best = is_evaluated and val_loss <= self.best_val_loss
        if is_best:
            self.best_val_loss = val_loss
        if self.is_open:
            ckpt.save_checkpoint(self.path, self.facts | {
                'step': step,
                'model': model.state_dict(),
                'optimizers': {type(o).__name__: o.state_dict() for o in optimizers},
                'val_loss': val_loss,
                'best_val_loss': self.best_val_loss,
                'threads': torch.get_num_threads(),
                'log': self.log_text})
            if self.saved_step is None:  # it has replaced an older run's, whose others go too
                for file in checkpoints_in(self.path.parent):
                    if file != self.path:
                        file.unlink()
                self.log_path.write_text(self.log_text)
        self.saved_step = step
        if self.is_open and is_best:
            ckpt.copy_to_best(self.path)

    def keep(self, step: int, model: Backpack | GPT) -> None:
        """Write the weights to ckpt-STEP.pt, which later steps do not replace."""
        check_finite(step, model.parameters())
        if self.is_open:
            state = self.facts | {'step': step, 'model': model.state_dict()}
            ckpt.save_checkpoint(self.path.with_stem(f'ckpt-{step}'), state)

    def close(self) -> None:
        """Unlock the folder."""
        if self.is_open:
            os.close(self.lock)
