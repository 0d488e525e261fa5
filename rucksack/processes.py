"""The processes that torchrun starts."""

import gc
import os

import torch.distributed as dist
from torch import Tensor

from rucksack.errors import UserError, user_errors


def find_processes() -> tuple[int, int, int]:
    """Return the rank of this process, its rank on this machine, and the number of processes.

    torchrun sets all three. Without torchrun they are 0, 0 and 1.
    """
    with user_errors('WORLD_SIZE', 'start several processes with torchrun, or unset it'):
        world = int(os.environ.get('WORLD_SIZE', 1))
    if world <= 1:
        return 0, 0, 1
    for name in ('RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        if name not in os.environ:
            raise UserError(f'WORLD_SIZE is {world} but {name} is not set; start several processes '
                            'with torchrun, or unset WORLD_SIZE')
    return int(os.environ['RANK']), int(os.environ.get('LOCAL_RANK', 0)), world


def all_reduce(x: Tensor, operation=dist.ReduceOp.SUM) -> float:
    """Return the sum of a number over all processes, or its maximum. x is overwritten."""
    if dist.is_initialized():
        dist.all_reduce(x, operation)
    return x.item()


def leave_processes(code: int) -> None:
    """Wait for the other processes and disconnect; after a failure (code 1), do not wait."""
    if dist.is_initialized() and code != 1:
        dist.barrier()  # until all have finished writing
        gc.collect()  # DDP holds the process group: free it first, or destroying the group can hang
        dist.destroy_process_group()
