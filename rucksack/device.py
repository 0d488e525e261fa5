"""The device and the processes of a run."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from rucksack.errors import user_errors


def find_device(name: str) -> str:
    """Choose the device; auto is CUDA, else MPS, else the CPU. Raises UserError if it fails."""
    if name != 'auto':
        with user_errors(f'device {name}', problem='cannot be used'):
            torch.ones(1, device=name).item()
        return name
    if torch.cuda.is_available():
        return 'cuda'
    return 'mps' if torch.backends.mps.is_available() else 'cpu'


def is_bfloat16_fast(device: str) -> bool:
    """Tell whether a device multiplies bfloat16 much faster than float32."""
    if device.startswith('cuda'):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return device == 'cpu' and units


def set_up_device(device: str, dtype: str, local_rank: int = 0) -> tuple[str, str]:
    """Resolve auto, and make training fast and, on a CPU, bit-identical from run to run."""
    device = find_device(device)
    if device == 'cuda':
        device = f'cuda:{local_rank}'
    if dtype == 'auto':
        dtype = 'bfloat16' if is_bfloat16_fast(device) else 'float32'
    if device.startswith('cuda'):
        torch.set_num_threads(min(2, torch.get_num_threads()))  # more would slow other runs down
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    elif device == 'cpu':
        keep_freed_memory()
        # Otherwise the threads of a compiled model sum gradients slowly, in no fixed order.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if dtype == 'bfloat16':  # in bfloat16, flash attention is slower than matrix products
            torch.backends.cuda.enable_flash_sdp(False)
    return device, dtype


def keep_freed_memory() -> None:
    """Let glibc reuse memory instead of returning it to the system, since new pages take time."""
    with suppress(AttributeError, TypeError):  # elsewhere
        for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(threshold, 0x7fffffff)  # the largest int: never


def to_device(batch: list[Tensor], device: str) -> list[Tensor]:
    """Copy tensors to a device; on CUDA, without waiting for the previous step."""
    if device.startswith('cuda'):
        return [
            x.contiguous().pin_memory().to(device, non_blocking=True)
            for x in batch]
    return [x.to(device) for x in batch]


def can_compile(device: str) -> bool:
    """Check that torch.compile works here by compiling a small function, and print a notice."""
    try:
        if device.startswith('mps'):
            raise RuntimeError
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception:  # many causes: no compiler, no Python.h, a folder with a space
        print(f'{device}: running without torch.compile, which needs CUDA or a C++ compiler')
        return False
    print('compiling; this takes a minute or two ...', flush=True)
    return True


def find_processes() -> tuple[int, int, int]:
    """Return this process's rank, its rank on this machine, and how many torchrun has started."""
    with user_errors('WORLD_SIZE', 'use torchrun or unset it', 'does not come from torchrun'):
        world = int(os.environ.get('WORLD_SIZE', 1))
        if world <= 1:
            return 0, 0, 1
        return int(os.environ['RANK']), int(os.environ.get('LOCAL_RANK', 0)), world


def all_reduce(x: Tensor, operation=dist.ReduceOp.SUM) -> float:
    """Return the sum of a number over all processes, or its maximum. x is overwritten."""
    if dist.is_initialized():
        dist.all_reduce(x, operation)
    return x.item()


@contextmanager
def clean_exit() -> Iterator[None]:
    """At the end, wait for other processes, disconnect, and undo torch's determinism."""
    try:
        yield
        if dist.is_initialized():
            dist.barrier()  # until all have finished writing
            gc.collect()  # DDP holds the group: free it first, or destroying the group can hang
            dist.destroy_process_group()
    finally:
        torch.use_deterministic_algorithms(False)  # set_up_device turned it on
