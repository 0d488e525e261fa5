"""The machine a run uses: device, number format, and the other processes of torchrun."""

import ctypes
import gc
import os
import signal
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rucksack.cli import discard_output
from rucksack.device import bfloat16_unit, find_device
from rucksack.errors import UserError


@dataclass
class Machine:
    """The device and number format of this process, its rank, and the number of processes."""

    device: str
    dtype: str
    rank: int
    world: int

    def __post_init__(self) -> None:
        self.on_gpu = self.device.startswith('cuda')
        unit = bfloat16_unit(self.device)
        self.name = f'{self.device} ({torch.get_num_threads()} threads, fast bfloat16: {unit})'
        if self.on_gpu:
            self.name = torch.cuda.get_device_name(self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass, which computes products in dtype."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.dtype == 'bfloat16')

    def print0(self, text: str, file=None) -> None:
        """Print from the first process alone."""
        if self.rank == 0:
            try:
                print(text, file=file, flush=True)
            except BrokenPipeError:  # whoever read this has left; the run goes on
                discard_output()

    def sum_over_processes(self, x: Tensor) -> float:
        """Sum a number over all processes."""
        if self.world > 1:
            dist.all_reduce(x)
        return x.item()

    def note_signals(self) -> None:
        """Note the next SIGINT or SIGTERM instead of stopping; a second one stops at once."""
        self.signal = 0

        def note(number: int, frame) -> None:
            self.signal = number
            self.forget_signals()

        handle_signals(note, note)

    def forget_signals(self) -> None:
        """Give SIGINT and SIGTERM back their default handlers."""
        handle_signals(signal.default_int_handler, signal.SIG_DFL)

    def noted_signal(self) -> int:
        """Return the number of a signal that any process has noted, or 0."""
        number = torch.tensor(self.signal)
        if self.world > 1:
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    def check_agreement(self, facts: str, folders: str) -> None:
        """Raise UserError unless all processes read the same facts from the folders."""
        checksum = zlib.crc32(facts.encode())
        if self.sum_over_processes(torch.tensor(checksum)) != self.world * checksum:
            raise UserError(f'the processes see different files in {folders}: share them')

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copy the tensors of a batch to the device, without waiting for the step before."""
        if self.on_gpu:  # copies from pinned memory run in the background
            tensors = [tensor.contiguous().pin_memory() for tensor in tensors]
        tensors = [tensor.to(self.device, non_blocking=self.on_gpu) for tensor in tensors]
        for tensor in tensors:
            if tensor.dim() == 1:  # distinct ids: one compiled graph for any number of them
                torch._dynamo.mark_dynamic(tensor, 0)
        return tensors

    def can_compile(self) -> bool:
        """Tell whether torch.compile works here, by compiling a small function."""
        if self.device == 'mps':
            return False
        try:
            torch.compile(torch.sin)(torch.ones(2, device=self.device))
        except Exception:  # of many types: no compiler, no Python.h, a folder with a space
            return False
        return True

    def wrap(self, module: nn.Module, compile: bool) -> nn.Module:
        """Compile a module if asked to, and put DDP around it if there are several processes.

        Where it cannot be compiled, it stays as it is.
        """
        if compile and self.can_compile():
            self.print0('compiling, which takes a minute or two ...')
            module = torch.compile(module)
        elif compile:
            self.print0(f'{self.device}: without torch.compile, which fails here; it needs CUDA, '
                        'or a C++ compiler and the headers of Python')
        if self.world > 1:
            module = DistributedDataParallel(module, [self.device] if self.on_gpu else None)
        return module


def handle_signals(interrupt: Callable, terminate: Callable | signal.Handlers) -> None:
    """Set the handlers of SIGINT and SIGTERM; do nothing in a thread, where Python cannot."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def configure_machine(device: str, dtype: str, micro_batches: int = 0) -> Machine:
    """Choose device and dtype, and join the other processes if torchrun started several.

    UserError unless the number of processes divides micro_batches.
    """
    world = int(os.environ.get('WORLD_SIZE', 1))
    rank = int(os.environ.get('RANK', 0)) if world > 1 else 0
    if micro_batches % world != 0:
        raise UserError(f'gradient_accumulation_steps is {micro_batches}; it must be a multiple '
                        f'of {world}, the number of processes')
    device = find_device(device)
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    on_gpu = device.startswith('cuda')
    if on_gpu:
        torch.set_num_threads(min(2, torch.get_num_threads()))  # more would slow other runs down
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    if dtype == 'auto':
        dtype = 'bfloat16' if bfloat16_unit(device) else 'float32'
    if device == 'cpu':
        keep_freed_memory()
        # Otherwise the threads of a compiled model sum gradients slowly, in no fixed order.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if dtype == 'bfloat16':  # in bfloat16, flash attention is slower than matrix products
            torch.backends.cuda.enable_flash_sdp(False)
    if world > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if on_gpu else 'gloo')
    return Machine(device, dtype, rank, world)


def leave_processes(code: int) -> None:
    """Wait for the other processes, if there are any, and close the connections to them.

    After a failure (code 1), do not wait: the others may never get here.
    """
    if dist.is_initialized() and code != 1:
        dist.barrier()  # until all have finished writing
        gc.collect()  # DDP holds the process group: free it first, or destroying the group can hang
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let glibc reuse memory instead of returning it to the system, since new pages take time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, 'mallopt'):
        for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(threshold, 0x7fffffff)  # the largest int: never
