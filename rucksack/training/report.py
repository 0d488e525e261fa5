"""What a training run prints: its summary, the lines of its log, and what to do if it stops."""

from datetime import timedelta
from pathlib import Path

import torch

from rucksack.cli import LocalError
from rucksack.loaded import count_parameters
from rucksack.model import GPT, Backpack
from rucksack.training.machine import Machine


def describe(model: Backpack | GPT, machine: Machine, state: dict) -> str:
    """Say what a run trains, and where; with the state of a resumed run, if it rounds as before."""
    millions = count_parameters(model)['total'] / 1e6
    text = (f'{type(model).__name__}, {millions:.1f}M parameters, on {machine.world} x '
            f'{machine.name} in {machine.dtype}')
    threads = torch.get_num_threads()
    if state:
        text += f'\nresumed after step {state["step"]}'
    if state.get('threads', threads) != threads:
        text += (f'\nit was trained with {state["threads"]} threads, and there are {threads} now: '
                 f'for the same bits, set OMP_NUM_THREADS={state["threads"]}')
    return text


def evaluation_lines(step: int, row: dict, warmup_iters: int, advised: bool) -> tuple[str, bool]:
    """Format the log's row of an evaluation for the terminal, a line on stuck senses included.

    After the warmup, stuck senses get advice, once; also returns whether they have had it.
    """
    lines = f'step {step}: validation loss {row["val_loss"]:.4f}'
    if 'senses_by_position' in row:
        on_current = row['senses_on_current_token']
        by_position = row['senses_by_position']
        lines += (f'\nstuck senses: {on_current} attend only to the current token, '
                  f'{by_position} depend only on position')
        is_stuck = on_current + by_position > 0
        if is_stuck and step <= warmup_iters:
            lines += ' (normal at first)'
        elif is_stuck and not advised:
            lines += ('\nA stuck sense does not read the text: it adds little to the model, and '
                      'seldom recovers. Start again with --optimizer=muon, or with lower learning '
                      'rates.')
            advised = True
    return lines, advised


def log_line(step: int, row: dict, tokens_left: int) -> str:
    """Format a row of the log for the terminal, with the time left."""
    speed = row['tokens_per_second']
    time_left = timedelta(seconds=tokens_left // max(1, speed))
    rates = f'lr {row["learning_rate"]:.2e}'
    if 'muon_lr' in row:
        rates += f' (Muon {row["muon_lr"]:.2e})'
    return (f'step {step}: loss {row["loss"]:.4f}, {rates}, grad norm '
            f'{row["grad_norm"]:.2f}, {speed:,} tokens/s, {time_left} left')


def stopped(error: Exception, path: Path, saved_step: int | None, rank: int) -> str:
    """Say why a run stopped, and what it has saved: the checkpoint at path, of saved_step.

    LocalError, raised from here, for a device without enough memory; any other RuntimeError is
    raised again.
    """
    saved = 'nothing was saved'
    if saved_step is not None:
        saved = f'the last good checkpoint is {path}, from step {saved_step}'
    # A CPU's allocator has no error of its own.
    if isinstance(error, torch.OutOfMemoryError) or 'allocate memory' in str(error):
        raise LocalError(f'process {rank}: out of memory; lower --batch_size and raise '
                         f'--gradient_accumulation_steps to match; {saved}')
    if isinstance(error, RuntimeError):
        raise error
    return f'train.py: stopped: {error}; {saved}'
