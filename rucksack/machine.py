"""Where a run computes: the device, its number format, and the other processes of torchrun."""

import ctypes
import os
import resource
import shutil
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import Backpack
from rucksack.common import UserError, bfloat16_unit, find_device, printable

PEAK_BF16 = {'B200': 2250e12, 'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'L4': 121e12,
             'A10': 125e12, '4090': 165e12, '3090': 71e12}  # FLOP/s of dense products, by the data sheets


@dataclass
class Machine:
    """This process's device and number format, and its place among the processes."""

    device: str
    dtype: str
    rank: int
    world: int
    why: str = 'as set'  # that dtype

    def __post_init__(self) -> None:
        self.on_gpu = self.device.startswith('cuda')
        self.name = torch.cuda.get_device_name(self.device) if self.on_gpu else \
            f'{self.device} ({torch.get_num_threads()} threads)'
        self.peak_flops = next((x * self.world for key, x in PEAK_BF16.items() if key in self.name), None)

    def peak_memory(self) -> int:
        """The most bytes this process has used on its device so far."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)

    def autocast(self):
        """The context of a forward pass."""
        kind = self.device.split(':')[0]
        return torch.autocast(kind, torch.bfloat16) if self.dtype == 'bfloat16' else nullcontext()

    def print0(self, text: str, file=None) -> None:
        """Print once, whatever the number of processes."""
        if self.rank == 0:
            print(printable(text), file=file, flush=True)

    def over_all(self, x: Tensor, operation=dist.ReduceOp.SUM) -> float:
        """The sum, or another reduction, of a number over all processes."""
        if self.world > 1:
            dist.all_reduce(x, operation)
        return x.item()

    def check_same(self, text: str, otherwise: str) -> None:
        """UserError(otherwise) unless all processes give the same text."""
        mark = zlib.crc32(text.encode())
        if self.over_all(torch.tensor(mark)) != self.world * mark:
            raise UserError(otherwise)

    def mfu(self, flops: float) -> float | None:
        """The share of the peak rate that so many operations a second are; None where it is not known."""
        return None if self.peak_flops is None else flops / self.peak_flops

    def compile(self, module: Callable) -> Callable:
        """The module or function under torch.compile, where this machine can: a CPU needs a C++ compiler."""
        if on_cpu := self.device == 'cpu' and any(map(shutil.which, ('g++', 'clang++'))):
            torch.use_deterministic_algorithms(True)  # else threads add up gradients in any order, and slowly
            torch.utils.deterministic.fill_uninitialized_memory = False
        if self.on_gpu or on_cpu:
            return torch.compile(module)
        self.print0(f'{self.device}: training without torch.compile, which needs CUDA or a C++ compiler')
        return module


def find_machine(device: str, dtype: str) -> Machine:
    """Choose device and dtype, and join the other processes where torchrun started several."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    device = find_device(device)
    if on_gpu := device.startswith('cuda'):
        device = f'cuda:{local}' if device == 'cuda' else device
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    why = 'as set'
    if dtype == 'auto':
        unit = bfloat16_unit(device)
        dtype, why = ('bfloat16', f'it has {unit}') if unit else ('float32', 'it has no fast bfloat16')
    if device == 'cpu':
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: keep freed memory, new pages take time
            getattr(ctypes.CDLL(None), 'mallopt', max)(option, (1 << 31) - 1)
        if dtype == 'bfloat16':  # in which a CPU's flash attention is slower than plain products
            torch.backends.cuda.enable_flash_sdp(False)
    if world > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if on_gpu else 'gloo')
    return Machine(device, dtype, rank, world, why)


def flops_per_token(model: Backpack, distinct: float = 1.0) -> float:
    """Floating point operations to train on one token of a text of block_size tokens.

    That is a multiplication and an addition per weight, three times: forward, backward to weights,
    backward to inputs. Attention and Eqs. 2 and 12 count as if they were not causal. distinct is
    the share of tokens whose senses are computed.
    """
    c = model.config
    weights = c.vocab_size * c.n_embd  # Eq. 9
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            share = distinct if name.startswith('sense_network.') else 1
            weights += module.weight.numel() * share
    weights += 2 * c.n_layer * c.block_size * c.n_embd  # attention: scores, sum of values
    if c.n_sense:
        weights += (1 + c.n_sense) * c.block_size * c.n_embd  # Eq. 12: scores, Eq. 2: sum
    return 3 * 2 * weights
