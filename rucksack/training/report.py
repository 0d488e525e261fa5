"""What a training run prints: its summary, and the lines of its log."""

from datetime import timedelta

import torch

from rucksack.data import TokenDataset
from rucksack.errors import LocalError
from rucksack.model import GPT, Backpack
from rucksack.training.machine import Machine
from rucksack.weights import count_parameters


def summary(model: Backpack | GPT, machine: Machine, state: dict) -> str:
    """Say what a run trains, and where; with the state of a resumed run, if it rounds as before."""
    millions = count_parameters(model)['total'] / 1e6
    text = (f'{type(model).__name__}, {millions:.1f}M parameters, on {machine.world} x '
            f'{machine.name} in {machine.dtype}')
    if state:
        text += f'\nresumed after step {state["step"]}'
    threads = state.get('threads')  # of the run so far
    if threads not in (None, torch.get_num_threads()):
        text += f'; it had {threads} threads: for the same bits, set OMP_NUM_THREADS={threads}'
    return text


def plan(n_steps: int, tokens_per_step: int, data: TokenDataset, out_dir: str) -> str:
    """Say how much a run reads, and where it writes."""
    epochs = n_steps * tokens_per_step / len(data.tokens)
    return (f'{n_steps:,} steps of {tokens_per_step:,} tokens: {epochs:.3f} epochs of '
            f'{data.path.parent}; log and checkpoints in {out_dir}')


def evaluation_lines(step: int, row: dict) -> str:
    """Format the log's row of an evaluation for the terminal."""
    lines = f'step {step}: validation loss {row["val_loss"]:.4f}'
    if 'senses_by_position' in row:
        lines += ('\nstuck senses (normal at first, else see docs/training.md): '
                  f'{row["senses_on_current_token"]} attend only to the current token, '
                  f'{row["senses_by_position"]} depend only on position')
    return lines


def log_line(step: int, row: dict, tokens_left: int) -> str:
    """Format a row of the log for the terminal, with the time left."""
    speed = row['tokens_per_second']
    time_left = timedelta(seconds=tokens_left // max(1, speed))
    muon = f' (Muon {row["muon_lr"]:.2e})' if 'muon_lr' in row else ''
    return (f'step {step}: loss {row["loss"]:.4f}, lr {row["learning_rate"]:.2e}{muon}, '
            f'grad norm {row["grad_norm"]:.2f}, {speed:,} tokens/s, {time_left} left')


def explained(error: RuntimeError | MemoryError, saved: str) -> Exception:
    """Say in a LocalError that a device has not enough memory; any other error stays as it is."""
    # The CPU's allocator of torch has no error of its own.
    of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if of_memory or 'allocate memory' in str(error):
        return LocalError('out of memory; lower --batch_size and raise '
                          f'--gradient_accumulation_steps to match; {saved}')
    return error
