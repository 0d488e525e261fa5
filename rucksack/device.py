"""Which device to use, and whether it multiplies bfloat16 fast."""

import torch

from rucksack.errors import user_errors


def find_device(name: str) -> str:
    """Choose the device; auto is CUDA, else MPS, else the CPU. UserError if it does not work."""
    if name == 'auto':
        if torch.cuda.is_available():
            return 'cuda'
        if torch.backends.mps.is_available():
            return 'mps'
        return 'cpu'
    with user_errors(f'device {name}', 'use auto or cpu', problem='cannot be used'):
        torch.ones(1, device=name).item()
    return name


def bfloat16_unit(device: str) -> str | None:
    """Name the hardware that multiplies bfloat16 much faster than float32; None without any."""
    if device.startswith('cuda') and torch.cuda.is_bf16_supported(including_emulation=False):
        return 'tensor cores'
    if device == 'cpu' and torch.cpu._is_amx_tile_supported():
        return 'AMX'
    if device == 'cpu' and torch.cpu._is_avx512_bf16_supported():
        return 'AVX512-BF16'
    return None
