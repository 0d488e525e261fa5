"""The folder of a training run: locked while the run trains; its checkpoints and its log."""

import csv
import math
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from rucksack.errors import UserError, user_errors
from rucksack.files import atomic, locked_folder, write_file
from rucksack.model import GPT, Backpack

COLUMNS = ['step', 'tokens', 'loss', 'val_loss', 'senses_on_current_token', 'senses_by_position',
           'learning_rate', 'muon_lr', 'grad_norm', 'tokens_per_second']  # of log.csv
HEADER = ','.join(COLUMNS) + '\n'


def locked(folder: Path) -> AbstractContextManager:
    """Lock the folder of a run, which is made if need be; UserError if a run trains in it.

    Of several processes, the first one locks it for all.
    """
    if os.environ.get('RANK', '0') != '0':
        return nullcontext()
    busy = f'another process is training in {folder}; choose another --out_dir'
    return locked_folder(folder, busy)


def files_of_run(folder: Path, end: str = '') -> list[Path]:
    """List what a run has written: log.csv, ckpt.pt, best.pt and every ckpt-STEP.pt.

    With end, a pattern, list files whose names go on so.
    """
    names = rf'(log\.csv|(ckpt|ckpt-\d+|best)\.pt){end}'
    return [file for file in sorted(folder.glob('*')) if re.fullmatch(names, file.name)]


def refuse_to_replace(folder: Path) -> None:
    """Raise UserError if the folder of a run holds checkpoints or a log already."""
    for file in files_of_run(folder):
        raise UserError(f'{file} exists; continue it with --init_from=resume, '
                        'replace it with --overwrite, or choose another --out_dir')


def read_log(folder: Path, step: int) -> str:
    """Read log.csv up to a step, with its header; without the file, there is a header alone."""
    path = folder / 'log.csv'
    if not path.exists():
        return HEADER
    with user_errors(path, 'move it away'):
        header, *rows = path.read_text(encoding='utf-8').splitlines(keepends=True)
        return header + ''.join(row for row in rows if int(row.split(',')[0]) <= step)


def check_loss(step: int, loss: float) -> None:
    """Raise FloatingPointError if the loss of a step is not finite."""
    if not math.isfinite(loss):
        raise FloatingPointError(f'step {step}: the loss is {loss}')


def check_finite(step: int, tensors: Iterable[Tensor]) -> None:
    """Raise FloatingPointError if a parameter or moment is not finite: it must not be saved."""
    is_finite = [tensor.isfinite().all() for tensor in tensors]
    if not torch.stack(is_finite).all():
        raise FloatingPointError(f'step {step}: a parameter or an optimizer moment is not finite')


def write_state(path: Path, state: dict) -> None:
    """Write a state to a file; OSError if the disk is full."""
    try:
        with open(path, 'wb') as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch.save hides a full disk behind an error of its own
        raise error.__context__ or error


@dataclass
class RunFolder:
    """The folder of a run, with ckpt.pt, best.pt and log.csv; only the first process writes.

    facts are stored in every checkpoint beside the parameters. state is the checkpoint to resume,
    or {}; the optimizers take their moments from it. Until a new run has saved its first
    checkpoint, nothing of an older run is touched.
    """

    folder: Path
    model: Backpack | GPT
    optimizers: list[Optimizer]
    facts: dict
    state: InitVar[dict]
    is_writer: bool

    def __post_init__(self, state: dict) -> None:
        self.checkpoint = self.folder / 'ckpt.pt'
        if state:
            hint = f'fine-tune its weights with --init_from={self.checkpoint}'
            with user_errors(self.checkpoint, hint):
                self.restore(state['optimizers'])
        self.saved_step = state.get('step')  # of the last checkpoint
        log = state.get('log', HEADER)
        rows = csv.DictReader(log.splitlines())
        losses = {int(row['step']): float(row['val_loss']) for row in rows if row['val_loss']}
        self.evaluated_step = max(losses, default=None)  # the last one
        self.best_val_loss = min([state.get('best_val_loss', math.inf), *losses.values()])
        self.facts['wandb_id'] = state.get('wandb_id')
        self.wandb = None
        if not self.is_writer:
            return
        if self.facts['settings']['wandb_log']:
            self.start_wandb()
        for partial in files_of_run(self.folder, r'\..*partial'):  # left by a killed run
            partial.unlink()
        if state:
            write_file(self.folder / 'log.csv', log)  # without the rows after the checkpoint

    def restore(self, states: dict) -> None:
        """Take the moments of each parameter from a checkpoint; betas and the like stay as set.

        Moments of another shape would make a fused kernel write past them: ValueError.
        """
        for optimizer in self.optimizers:
            params = [p for group in optimizer.param_groups for p in group['params']]
            saved = states[type(optimizer).__name__]['state']
            for i, moments in saved.items():
                p = params[i]
                for name, moment in moments.items():
                    shape = () if name == 'step' else p.shape
                    if moment.shape != shape:
                        raise ValueError(f'the shape of {name}')
                    optimizer.state[p][name] = moment.to(p.device)

    def start_wandb(self) -> None:
        """Begin a run of Weights & Biases, or go on with one; WANDB_PROJECT and WANDB_NAME name it.

        UserError if there is no wandb, or no login.
        """
        hint = 'pip install wandb and log in, or leave it out'
        with user_errors('--wandb_log', hint, problem='cannot be used'):
            import wandb
            self.wandb = wandb.init(
                config=self.facts['settings'], id=self.facts['wandb_id'], resume='allow')
        self.facts['wandb_id'] = self.wandb.id

    def log(self, step: int, row: dict) -> None:
        """Add a row to log.csv and, if enabled, to Weights & Biases."""
        row = {'step': step, **row}
        rounded = {name: f'{x:.6g}' for name, x in row.items() if isinstance(x, float)}
        if self.is_writer:
            with open(self.folder / 'log.csv', 'a') as file:
                csv.DictWriter(file, COLUMNS, lineterminator='\n').writerow(row | rounded)
        if self.wandb:
            self.wandb.log(row, step=step)

    def log_evaluation(self, step: int, row: dict) -> None:
        """Log an evaluation; if its loss is the lowest so far, make best.pt a copy of ckpt.pt.

        A new run is saved first. FloatingPointError if the loss is not finite.
        """
        loss = float(f'{row["val_loss"]:.6g}')  # as in log.csv
        check_loss(step, loss)
        self.save(step)
        if loss <= self.best_val_loss:
            self.best_val_loss = loss
            if self.is_writer:
                with atomic(self.folder / 'best.pt') as temporary:
                    shutil.copyfile(self.checkpoint, temporary)
        self.log(step, row)

    def save(self, step: int) -> None:
        """Write ckpt.pt, with all that resuming needs, unless it has this step.

        FloatingPointError if a parameter or a moment is not finite.
        """
        if step == self.saved_step:
            return
        tensors = list(self.model.parameters())
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                tensors.extend(moments.values())
        check_finite(step, tensors)
        if self.is_writer:
            state = self.facts | {
                'step': step,
                'model': self.model.state_dict(),
                'optimizers': {type(o).__name__: o.state_dict() for o in self.optimizers},
                'best_val_loss': self.best_val_loss,
                'threads': torch.get_num_threads()}
            with atomic(self.checkpoint) as temporary:
                write_state(temporary, state)
                if self.saved_step is None:  # an older run goes when the new one is on the disk
                    for file in set(files_of_run(self.folder)) - {self.checkpoint}:
                        file.unlink()
            if self.saved_step is None:
                write_file(self.folder / 'log.csv', HEADER)
        self.saved_step = step

    def keep(self, step: int) -> None:
        """Write the parameters to ckpt-STEP.pt, which later steps do not replace."""
        check_finite(step, self.model.parameters())
        if self.is_writer:
            state = self.facts | {'step': step, 'model': self.model.state_dict()}
            with atomic(self.folder / f'ckpt-{step}.pt') as temporary:
                write_state(temporary, state)

    def what_is_saved(self) -> str:
        """Say which checkpoint there is."""
        if self.saved_step is None:
            return 'nothing was saved'
        return f'{self.checkpoint} is saved at step {self.saved_step}'

    def interrupted(self) -> str:
        """Say what an interrupted run has saved and, if it has, how to go on with it."""
        line = f'interrupted: {self.what_is_saved()}'
        if self.saved_step is not None:
            line += f'; continue with python train.py --init_from=resume --out_dir={self.folder}'
        return line
