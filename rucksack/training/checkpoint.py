"""Checkpoints of train.py: loaded without running code, written whole, resumed bit for bit."""

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from rucksack.cli import UserError, reading
from rucksack.model import GPT, Backpack, Config

# -----------------------------------------------------------------------------
# Reading.


def load_file(path: Path) -> dict:
    """Load the dictionary in a .safetensors or a torch.save file; no code in it is run."""
    with reading(path):
        if path.suffix == '.safetensors':
            return load_safetensors(path)
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch ignores CRCs
            raise ValueError('a checksum is wrong')
        return dict(torch.load(path, map_location='cpu', weights_only=True))


def make_model(config: Config) -> Backpack | GPT:
    """Make an untrained model: a Backpack or, without senses, a GPT."""
    return Backpack(config) if config.n_sense else GPT(config)


def model_with(config: Config, weights: dict[str, Tensor]) -> Backpack | GPT:
    """Make a model with given weights, in the default dtype; torch complains unless all fit."""
    with torch.device('meta'):
        model = make_model(config)
    dtype = torch.get_default_dtype()
    own = {name: weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
           for name, weight in weights.items()}
    model.load_state_dict(own, assign=True)
    return model.eval()


def from_checkpoint(checkpoint: dict, path: Path) -> Backpack | GPT:
    """Load the model inside a checkpoint of train.py."""
    with reading(path):
        return model_with(Config(**checkpoint['model_config']), checkpoint['model'])


@dataclass(frozen=True)
class Training:
    """How a model was trained, as its checkpoint says."""

    dataset: str
    compile: bool


def training_of(checkpoint: dict) -> Training:
    """Read how a checkpoint was trained."""
    settings = checkpoint['settings']
    return Training(settings['dataset'], settings['compile'])


def newest_backpack() -> Path | None:
    """Find the folder in out/ with the Backpack saved last; None if there is none."""
    for path in sorted(Path('out').glob('*/ckpt.pt'), key=os.path.getmtime, reverse=True):
        if load_file(path).get('model_config', {}).get('n_sense'):  # nanoGPT's have no such part
            return path.parent
    return None


# -----------------------------------------------------------------------------
# Resuming and saving a run.


def read_state(path: Path) -> dict:
    """Read the checkpoint of a run, to resume it; UserError for one with parameters alone."""
    state = load_file(path)
    if 'optimizers' not in state:
        raise UserError(f'{path} holds weights but no run to resume; '
                        f'fine-tune them with --init_from={path}')
    return state


def load_optimizers(optimizers: list[torch.optim.Optimizer], states: dict) -> None:
    """Copy the moments of each parameter from a checkpoint; betas and the like stay as set.

    Moments of another shape would make a fused kernel write past them: ValueError.
    """
    for optimizer in optimizers:
        params = [p for group in optimizer.param_groups for p in group['params']]
        saved = states[type(optimizer).__name__]['state']
        for i, moments in saved.items():
            p = params[i]
            for name, moment in moments.items():
                shape = () if name == 'step' else p.shape
                if moment.shape != shape:
                    raise ValueError(f'the shape of {name}')
                own = torch.empty(shape, device=p.device)
                optimizer.state[p][name] = own.copy_(moment)


def write_state(path: Path, state: dict) -> None:
    """Write a state to a file; OSError if the disk is full."""
    try:
        with open(path, 'wb') as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch.save hides a full disk behind an error of its own
        raise error.__context__ or error
