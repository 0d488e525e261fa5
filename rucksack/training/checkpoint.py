"""Checkpoints of train.py: validated on loading, written atomically, resumed bit for bit."""

import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from rucksack.cli import UserError, appearing_whole, one_line
from rucksack.model import GPT, Backpack, Config

# The state of a run that a checkpoint holds besides the model.
STATE = {
    'step': int,
    'seconds': float,
    'best_val_loss': float,
    'val_loss': float,
    'settings': dict,
    'optimizers': dict,
    'log': str,
    'data': str}
MOMENTS = {'AdamW': {'step', 'exp_avg', 'exp_avg_sq'}, 'Muon': {'momentum_buffer'}}


# -----------------------------------------------------------------------------
# Reading.


def load_file(path: Path) -> dict:
    """Load the dictionary in a .safetensors or a torch.save file; no code in it is run.

    UserError if the file is damaged.
    """
    try:
        if path.suffix == '.safetensors':
            return load_safetensors(path)
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch ignores CRCs
            raise ValueError('a checksum is wrong')
        return dict(torch.load(path, map_location='cpu', weights_only=True))
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        hint = 'make or download it again'
        best = path.with_name('best.pt')
        if path.name == 'ckpt.pt' and best.exists():
            hint = f'to use the best checkpoint: cp {best} {path}'
        raise UserError(f'{path} is damaged or holds no weights ({one_line(error)}); {hint}')


def make_model(config: Config) -> Backpack | GPT:
    """Make an untrained model: a Backpack or, without senses, a GPT."""
    return Backpack(config) if config.n_sense else GPT(config)


def model_with(config: Config, weights: dict[str, Tensor], path: Path) -> Backpack | GPT:
    """Make a model, in float32, with the weights of a file; UserError unless all fit."""
    try:
        if config.n_layer > len(weights):  # making them would take forever
            raise ValueError(f'its config has {config.n_layer} layers')
        for name, weight in weights.items():
            if not weight.is_floating_point() or not weight.isfinite().all():
                raise ValueError(f'{name} has values that are not finite real numbers')
        with torch.device('meta'):
            model = make_model(config)
        own = {name: weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
               for name, weight in weights.items()}
        model.load_state_dict(own, assign=True)
        return model.eval()
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f'{path}: {error}')


def from_checkpoint(checkpoint: dict, path: Path) -> Backpack | GPT:
    """Load the model inside a checkpoint of train.py."""
    try:
        config = Config(**checkpoint['model_config'])
        weights = dict(checkpoint['model'])
    except Exception as error:  # a damaged file can raise anything
        cause = f'{type(error).__name__}: {one_line(error)}'
        raise UserError(f'{path} is not a checkpoint of this version of train.py ({cause}); use '
                        'the version that wrote it')
    return model_with(config, weights, path)


@dataclass(frozen=True)
class Training:
    """How a model was trained, as its checkpoint says."""

    dataset: str
    tokens: int
    dtype: str
    compile: bool


def training_of(checkpoint: dict) -> Training | None:
    """Read how a checkpoint was trained; None if it does not say."""
    try:
        s = checkpoint['settings']
        tokens_per_step = s['batch_size'] * s['gradient_accumulation_steps'] * s['block_size']
        return Training(str(s['dataset']), int(checkpoint['step'] * tokens_per_step),
                        str(s['dtype']), bool(s['compile']))
    except Exception:  # a damaged file can raise anything
        return None


def newest_backpack() -> Path | None:
    """Find the folder in out/ with the Backpack saved last; None if there is none."""
    checkpoints = sorted(Path('out').glob('*/ckpt.pt'), key=lambda path: path.stat().st_mtime)
    for path in reversed(checkpoints):
        if from_checkpoint(load_file(path), path).config.n_sense:
            return path.parent
    return None


# -----------------------------------------------------------------------------
# Resuming and saving a run.


def read_state(path: Path) -> dict:
    """Read the checkpoint of a run, to resume it; UserError if there is none."""
    if not path.exists() and not path.with_name('best.pt').exists():
        raise UserError(f'{path} does not exist: nothing to resume; '
                        'start without --init_from=resume')
    state = load_file(path)
    for name, kind in STATE.items():
        if type(state.get(name)) is not kind or state['step'] < 0:
            raise UserError(f'{path} holds weights but no run to resume; '
                            f'fine-tune them with --init_from={path}')
    return state


def load_optimizers(optimizers: list[torch.optim.Optimizer], states: dict[str, dict],
                    path: Path) -> None:
    """Load the moments of each parameter from a checkpoint; betas and the like stay as set."""
    try:
        for optimizer in optimizers:
            moments = states[type(optimizer).__name__]['state']
            optimizer.load_state_dict(optimizer.state_dict() | {'state': moments})
            for p, moments_of_p in optimizer.state.items():
                if moments_of_p.keys() != MOMENTS[type(optimizer).__name__]:
                    raise ValueError('the moments of a weight are not complete')
                for name, moment in moments_of_p.items():
                    if moment.shape not in (p.shape, ()):
                        raise ValueError(f'{name} has the shape {tuple(moment.shape)}')
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f'{path} was saved with another optimizer ({one_line(error)}); '
                        f'fine-tune its weights with --init_from={path}')


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a state, whole or not at all."""
    try:
        with appearing_whole(path) as partial, open(partial, 'wb') as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch.save hides a full disk behind an error of its own
        raise error.__context__ if isinstance(error.__context__, OSError) else error


def copy_to_best(path: Path) -> None:
    """Make best.pt a copy of a checkpoint."""
    with appearing_whole(path.with_name('best.pt')) as partial:
        shutil.copyfile(path, partial)
