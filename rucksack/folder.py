"""The folder of a training run: locked while the run trains, with a log that has no gap."""

import os
import re
from dataclasses import asdict
from pathlib import Path

from rucksack import checkpoint as ckpt
from rucksack.common import UserError, lock_folder

COLUMNS = ['step', 'tokens', 'seconds', 'loss', 'val_loss', 'senses_on_current_token',
           'senses_by_position', 'learning_rate', 'grad_norm', 'tokens_per_second', 'mfu']  # of log.csv
CHECKPOINT = r'(ckpt(-\d+)?|previous|best)\.pt'


def refuse_to_replace(path: Path) -> None:
    """UserError if the folder of a checkpoint holds a run already."""
    found = ckpt.beside(path)
    if found:
        raise UserError(f'{found[0]} exists; go on with --init_from=resume, replace it with --overwrite, '
                        'or choose another --out_dir')


class RunFolder:
    """out_dir, open for writing in the first process; in the others nothing happens.

    s are the settings of train.py, state the checkpoint that the run resumes, or {}.
    """

    def __init__(self, s, state: dict, rank: int):
        self.tokens_per_step = s.tokens_per_step
        self.log_text = state.get('log') or ','.join(COLUMNS) + '\n'  # all of it, to be in checkpoints
        self.is_open = rank == 0
        self.wandb = None
        if not self.is_open:
            return
        folder = s.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(folder, f'another process trains in {folder}; choose another --out_dir')
        if s.overwrite and not state:
            for path in folder.glob('*.pt'):
                if re.fullmatch(CHECKPOINT, path.name):
                    path.unlink()
        if state and not (folder / 'best.pt').exists():  # killed right before it got its name
            ckpt.add_name(s.path, 'best.pt')
        self.log_file = open(folder / 'log.csv', 'w', buffering=1)  # a line is on the disk at once
        self.log_file.write(self.log_text)
        if s.wandb_log:
            import wandb
            self.wandb = wandb.init(project=s.wandb_project, name=s.wandb_run_name or None,
                                    config=asdict(s))

    def log(self, step: int, seconds: float, row: dict[str, float | None]) -> None:
        """Add a row to log.csv and, where it is wanted, to Weights & Biases."""
        if not self.is_open:
            return
        tokens = step * self.tokens_per_step
        row = {'step': step, 'tokens': tokens, 'seconds': round(seconds, 1), **row}
        line = ','.join(written(row.get(name)) for name in COLUMNS) + '\n'
        self.log_text += line
        self.log_file.write(line)
        if self.wandb:
            self.wandb.log(row, step=step)

    def close(self) -> None:
        """Let other processes in."""
        if self.is_open:
            self.log_file.close()
            os.close(self.lock)


def written(value: float | None) -> str:
    """A number as log.csv has it, no longer than it is exact."""
    if value is None:
        return ''
    if isinstance(value, float):
        return f'{value:.6g}'
    return str(value)
