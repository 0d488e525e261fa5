"""The folder of a training run, and its log: log.csv, the terminal, and Weights & Biases."""

import csv
import math
import re
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from rucksack.cli import printable
from rucksack.device import name_of
from rucksack.errors import UserError, user_errors
from rucksack.files import write_file
from rucksack.model import GPT, Backpack
from rucksack.weights import count_parameters

COLUMNS = ['step', 'tokens', 'loss', 'val_loss', 'senses_on_current_token', 'senses_by_position',
           'learning_rate', 'muon_lr', 'grad_norm', 'tokens_per_second']  # columns of log.csv


def out_dir_of(s, flags: set[str], configs: list[str]) -> str:
    """Name the folder of a run after its last config or, without one, its dataset.

    A Transformer's folder ends in _gpt. To resume without --model, the one that has a checkpoint
    counts; raises UserError if both have.
    """
    name = Path(configs[-1]).stem.removeprefix('train_') if configs else s.dataset
    folders = {'backpack': f'out/{name}', 'gpt': f'out/{name}_gpt'}
    if s.init_from == 'resume' and 'model' not in flags and s.model == 'backpack':
        found = [folder for folder in folders.values() if Path(folder, 'ckpt.pt').exists()]
        if len(found) == 2:
            raise UserError(f'{found[0]} and {found[1]} both have a run to resume; add --model or '
                            '--out_dir')
        if found:
            return found[0]
    return folders[s.model]


def refuse_to_replace(folder: Path) -> None:
    """Raise UserError if a folder has log.csv, ckpt.pt, best.pt or a ckpt-STEP.pt."""
    for file in sorted(folder.glob('*')):  # none if another process has yet to make the folder
        if re.fullmatch(r'log\.csv|(ckpt|ckpt-\d+|best)\.pt', file.name):
            raise UserError(f'{file} exists; continue the run with --init_from=resume, '
                            'replace it with --overwrite, or choose another --out_dir')


def remove_kept(folder: Path) -> None:
    """Remove every ckpt-STEP.pt in a folder."""
    for file in folder.iterdir():
        if re.fullmatch(r'ckpt-\d+\.pt', file.name):
            file.unlink()


class RunLog:
    """The log of a run with settings s; only the first process writes it.

    For a resumed run, it keeps the rows up to the step of the checkpoint. An older log.csv stays
    until there is a row to write, so that --overwrite replaces it together with the checkpoint.
    """

    def __init__(self, s, checkpoint: dict, rank: int):
        self.s = s
        self.path = Path(s.out_dir, 'log.csv')
        self.is_first = rank == 0
        self.start_clock(checkpoint.get('step', 0))
        self.wandb = None
        self.wandb_id = checkpoint.get('wandb_id')
        if not self.is_first:
            return
        if s.wandb_log:
            self.start_wandb()
        self.old_rows = ','.join(COLUMNS) + '\n' + self.rows_until(checkpoint.get('step'))

    def rows_until(self, step: int | None) -> str:
        """Read the rows up to a step; for None, a new run, there are none."""
        if step is None or not self.path.exists():
            return ''
        with user_errors(self.path, 'move it away'):
            rows = self.path.read_text(encoding='utf-8').splitlines(keepends=True)[1:]
            whole = [row for row in rows if row.endswith('\n')]  # a kill can cut the last row short
            return ''.join(row for row in whole if int(row.split(',')[0]) <= step)

    def start_wandb(self) -> None:
        """Begin or continue a Weights & Biases run; WANDB_PROJECT and WANDB_NAME name it.

        Raises UserError without wandb or a login.
        """
        hint = 'pip install wandb and log in, or drop --wandb_log'
        with user_errors('--wandb_log', hint, problem='cannot be used'):
            import wandb
            self.wandb = wandb.init(config=asdict(self.s), id=self.wandb_id, resume='allow')
        self.wandb_id = self.wandb.id

    def start_clock(self, step: int) -> None:
        """Count tokens per second from now on."""
        self.clock = step, time.perf_counter()

    def add(self, step: int, row: dict) -> None:
        """Print a row and log it; a training step's row also gets the speed.

        Raises FloatingPointError if its loss is not finite.
        """
        for name in row.keys() & {'loss', 'val_loss'}:
            if not math.isfinite(row[name]):
                raise FloatingPointError(f'{name} is {row[name]} at step {step}')
        row = {'step': step, 'tokens': step * self.s.tokens_per_step, **row}
        if 'loss' in row:
            start, seconds = self.clock
            tokens = (step - start) * self.s.tokens_per_step
            row['tokens_per_second'] = round(tokens / (time.perf_counter() - seconds))
        self.start_clock(step)
        print(self.line(row), flush=True)
        if self.is_first:
            if self.old_rows:
                write_file(self.path, self.old_rows)
                self.old_rows = ''
            rounded = {name: f'{x:.6g}' for name, x in row.items() if isinstance(x, float)}
            with open(self.path, 'a', encoding='utf-8') as file:
                csv.DictWriter(file, COLUMNS, lineterminator='\n').writerow(row | rounded)
        if self.wandb:
            self.wandb.log(row, step=step)

    def line(self, row: dict) -> str:
        """Format a row for the terminal, with the time left if it has a speed."""
        numbers = []
        for name, x in row.items():
            number = f'{x:.5g}' if isinstance(x, float) else f'{x:,}'
            numbers.append(f'{name} {number}')
        if 'tokens_per_second' in row:
            tokens_left = (self.s.max_iters - row['step']) * self.s.tokens_per_step
            left = timedelta(seconds=tokens_left // max(1, row['tokens_per_second']))
            numbers.append(f'{left} left')
        if 'senses_by_position' in row:
            numbers.append('stuck senses are normal early on; later, see docs/training.md')
        return ', '.join(numbers)


def summary(s, model: Backpack | GPT, device: str, world: int, n_tokens: int) -> str:
    """Say what a run trains, where, and on how many tokens."""
    millions = count_parameters(model)['total'] / 1e6
    epochs = s.max_iters * s.tokens_per_step / n_tokens
    return printable(
        f'{type(model).__name__}, {millions:.1f}M parameters, on {world} x {name_of(device)} in '
        f'{s.dtype}\n{s.max_iters:,} steps of {s.tokens_per_step:,} tokens, {epochs:.3f} epochs of '
        f'data/{s.dataset}; log and checkpoints in {s.out_dir}')
