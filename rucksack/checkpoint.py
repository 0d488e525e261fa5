"""Our own checkpoints: written by train.py, and loaded without running code in them."""

import zipfile
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rucksack.errors import user_errors
from rucksack.files import atomic
from rucksack.model import GPT, Backpack, Config


def load_file(path: Path, mmap: bool = False) -> dict:
    """Load the dictionary in a torch.save file (PyTorch 1.6 or newer); no code in it runs.

    With mmap, tensors stay on disk until they are used, and their checksums are not verified.
    """
    with user_errors(path):
        if not mmap and zipfile.ZipFile(path).testzip():  # torch ignores CRCs
            raise ValueError('a checksum is wrong')
        return dict(torch.load(path, map_location='cpu', weights_only=True, mmap=mmap))


def save(path: Path, state: dict) -> None:
    """Write the state of a run, whole or not at all. FloatingPointError if it is not finite."""
    tensors = list(state['model'].values())
    for optimizer in state['optimizers'].values():
        for moments in optimizer['state'].values():
            tensors.extend(moments.values())
    if not all(tensor.isfinite().all() for tensor in tensors):  # keep the last good state
        raise FloatingPointError(f'a parameter or a moment is not finite at step {state["step"]}')
    with atomic(path) as temporary, open(temporary, 'wb') as file:
        torch.save(state, file)  # to a Python file, whose errors name a full disk


def make_model(config: Config) -> Backpack | GPT:
    """Make an untrained model: a Backpack or, without senses, a GPT."""
    return Backpack(config) if config.n_sense else GPT(config)


class WithoutInit(TorchFunctionMode):
    """A context in which torch.nn.init draws no numbers: loaded parameters would replace them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function of torch, unless it draws."""
        if func.__name__ not in ('normal_', 'kaiming_uniform_', 'uniform_'):
            return func(*args, **kwargs or {})


def model_with(config: Config, weights: dict[str, Tensor]) -> Backpack | GPT:
    """Make a model with given weights, in the default dtype; torch refuses them unless all fit."""
    with WithoutInit():
        model = make_model(config)
    model.load_state_dict(weights)
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f'{name} has a value that is not finite')
    return model.eval()


def from_checkpoint(checkpoint: dict) -> Backpack | GPT:
    """Load the model in a checkpoint from train.py."""
    return model_with(Config(**checkpoint['model_config']), checkpoint['model'])


def count_parameters(model: Backpack | GPT) -> dict[str, int]:
    """Count the parameters, in 'total' and outside the sense network ('contextualizer')."""
    counts = {'total': 0, 'contextualizer': 0}
    for name, p in model.named_parameters():
        counts['total'] += p.numel()
        if 'sense_network.' not in name:
            counts['contextualizer'] += p.numel()
    return counts
