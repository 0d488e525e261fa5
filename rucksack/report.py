"""What a training run prints: its summary, the lines of its log, and what to do if it stops."""

from datetime import timedelta

import torch

from model import Backpack
from rucksack.common import LocalError, UserError, one_line
from rucksack.data import TokenDataset, texts_of_step
from rucksack.machine import Machine

# s has the settings of train.py.


def describe(model: Backpack, data: TokenDataset, s, machine: Machine) -> str:
    """Say in two lines what a run trains, where, and for how long."""
    kind = 'Transformer'
    if model.config.n_sense:
        kind = f'Backpack with {model.config.n_sense} senses'
    millions = model.n_params()['total'] / 1e6
    epochs = s.max_iters * s.tokens_per_step / (data.n * s.block_size)
    return (f'{kind}, {millions:.1f}M parameters, on {machine.world} x {machine.name} '
            f'in {s.dtype} ({machine.why})\n'
            f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.3f} epochs of '
            f'data/{s.dataset}; log and checkpoints in {s.out_dir}')


def distinct_share(data: TokenDataset, s) -> float:
    """Count the distinct ids per token of a batch: the share of tokens that need senses."""
    idx, _ = data(texts_of_step(s.seed, 0, s.batch_size, data.n))
    return len(idx.unique()) / idx.numel()


def log_line(step: int, row: dict, s) -> str:
    """Format a row of the log for the terminal, with the time left."""
    speed = row['tokens_per_second']
    tokens_left = (s.max_iters - step) * s.tokens_per_step
    time_left = timedelta(seconds=tokens_left // max(1, speed))
    mfu = ''
    if row['mfu'] is not None:
        mfu = f', MFU {row["mfu"]:.1%}'
    return (f'step {step}: loss {row["loss"]:.4f}, lr {row["learning_rate"]:.2e}, grad norm '
            f'{row["grad_norm"]:.2f}, {speed:,} tokens/s{mfu}, {time_left} left')


def how_to_restart(s) -> str:
    """Say what to do with a run that cannot be resumed."""
    return f'start a new run from its weights: --init_from={s.path} --out_dir=NEW'


def how_to_go_on(s, saved_step: int | None, error: Exception) -> str:
    """Say what to do with a stopped run; saved_step is the step of its last checkpoint."""
    if saved_step is None:
        return 'nothing was saved'
    how = 'continue it with --init_from=resume'
    if isinstance(error, torch.OutOfMemoryError):  # a resumed run keeps its batch size
        how = how_to_restart(s)
    if isinstance(error, FloatingPointError):  # resuming would fail the same way
        how = f'start a new run with --init_from={s.path} --out_dir=NEW and lower learning rates'
    return f'the last good checkpoint is {s.path}, from step {saved_step}; {how}'


def error_of_device(error: Exception, s, saved_step: int | None, rank: int) -> UserError:
    """Make the UserError for a device without enough memory, or for one that cannot compile."""
    if isinstance(error, torch.OutOfMemoryError):
        return LocalError(f'process {rank}: out of memory; lower --batch_size and raise '
                          '--gradient_accumulation_steps to match; '
                          + how_to_go_on(s, saved_step, error))
    return UserError(f'torch.compile failed ({one_line(error)}); add --compile=False')
