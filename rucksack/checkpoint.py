"""Checkpoints of train.py: read with suspicion, written whole, resumed to the same bits."""

import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from model import Backpack, Config
from rucksack.common import UserError, one_line, sync
from rucksack.data import DATA_NAME

CHECKPOINTS = ('ckpt.pt', 'previous.pt', 'best.pt')  # of a run: the latest, the one before, the best
STATE = {'step': int, 'seconds': float, 'best_val_loss': float, 'val_loss': float, 'settings': dict,
         'optimizers': dict, 'log': str, 'data': str}  # what a checkpoint holds of a run, beside the model
MOMENTS = {'AdamW': ('exp_avg', 'exp_avg_sq'), 'Muon': ('momentum_buffer',)}  # that torch keeps of a weight
RUN = {'dataset': (str, DATA_NAME), 'tokens': (int, r'\d+'), 'dtype': (str, 'float32|bfloat16|float64'),
       'compile': (bool, '.*')}  # what a model knows of its run


def beside(path: Path) -> list[Path]:
    """The checkpoints in the folder of one, itself among them."""
    return [path.with_name(name) for name in CHECKPOINTS if path.with_name(name).exists()]


def load_file(path: Path) -> dict:
    """The dictionary in a .safetensors or a file of torch.save, whose code is never run; UserError if it is
    not whole.
    """
    try:
        if not path.is_file():
            raise ValueError('there is no such file')
        if path.suffix == '.safetensors':
            return load_safetensors(path)
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # its CRCs, which PyTorch ignores
            raise ValueError('a checksum is wrong')
        return dict(torch.load(path, map_location='cpu', weights_only=True))
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        others = [other for other in beside(path) if path.name in CHECKPOINTS and other != path]
        hint = f'to use another: cp {others[0]} {path}' if others else 'make or fetch it again'
        raise UserError(f'{path} is damaged or holds no weights ({one_line(error)}); {hint}')


def load_state(config: Config, names: Callable, state: dict[str, Tensor], path: Path) -> Backpack:
    """The model with the weights of a file, named there as by names(model); UserError unless all fit."""
    last, rows = f'.{config.n_layer - 1}.ln_1.weight', {'wte': config.vocab_size, 'wpe': config.block_size}
    if not any(key.endswith(last) for key in state) or not all(any(  # before memory is taken for it
            key.endswith(f'{name}.weight') and getattr(w, 'shape', None) == (n, config.n_embd)
            for key, w in state.items()) for name, n in rows.items()):
        raise UserError(f'{path} has another number of layers, or other embeddings, than its config says')
    model = Backpack(config)
    own = names(model)
    for key in sorted(own.keys() | state.keys()):
        if key not in state or key not in own:
            raise UserError(f'{path}: {"missing" if key in own else "unexpected"} weight {key}')
        check_weight(state[key], own[key], f'{path}: {key}')
        own[key].copy_(state[key])
    return model.eval()


def check_weight(weight: object, like: Tensor, name: str) -> None:
    """UserError unless what a file holds is a tensor of finite real numbers, of another's shape."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.layout != torch.strided \
            or weight.is_meta or weight.shape != like.shape:
        raise UserError(f'{name} is no tensor of real numbers of shape {tuple(like.shape)}')
    if not weight.isfinite().all():
        raise UserError(f'{name} holds numbers that are not finite')


def from_checkpoint(checkpoint: dict, path: Path) -> Backpack:
    """The model inside a checkpoint of train.py: weights, config, and the description of its tokenizer."""
    try:
        state = {str(key): weight for key, weight in checkpoint['model'].items()}
        model = load_state(Config(**checkpoint['model_config']), Backpack.state_dict, state, path)
        model.tokenizer = json.loads(json.dumps(checkpoint['tokenizer']))  # plain values, or a TypeError
        run = checkpoint.get('settings', {}) | {'step': checkpoint.get('step')}
        sizes = [run.get(n) for n in ('step', 'batch_size', 'gradient_accumulation_steps', 'block_size')]
        run['tokens'] = math.prod(sizes) if all(type(n) is int for n in sizes) else None
        model.run = {name: run[name] for name, (kind, form) in RUN.items()
                     if type(run.get(name)) is kind and re.fullmatch(form, str(run[name]))}
        return model
    except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        why = f'{path} is no checkpoint of train.py ({type(error).__name__}: {one_line(error)})'
        raise error if isinstance(error, UserError) else UserError(why)


def newest_backpack() -> tuple[Backpack, Path] | None:
    """The Backpack in out/ whose checkpoint was written last, and its folder; None if there is none."""
    for path in sorted(Path('out').glob('*/ckpt.pt'), key=lambda p: p.stat().st_mtime, reverse=True):
        model = from_checkpoint(load_file(path), path)
        if model.config.n_sense:
            return model, path.parent
    return None


def save_checkpoint(path: Path, state: dict, best: bool | None = None) -> None:
    """Write a state whole or not at all; if best is not None, previous.pt and best.pt go with it."""
    partial, latest = path.with_suffix('.partial'), best is not None
    try:
        partial.unlink(missing_ok=True)  # left by a killed run: it may be best.pt by another name
        with open(partial, 'wb') as file:
            torch.save(state, file)
        sync(partial)
        first = not path.exists()
        if latest and not first:
            add_name(path, 'previous.pt')
            if best:
                add_name(partial, 'best.pt')
        os.replace(partial, path)
        if latest and first:  # ckpt.pt comes before all others, as resume looks for it
            add_name(path, 'best.pt')
        sync(path.parent)
    except RuntimeError as error:  # torch.save hides what stopped it, as a full disk, behind one of its own
        raise error.__context__ if isinstance(error.__context__, OSError) else error
    finally:
        partial.unlink(missing_ok=True)


def add_name(path: Path, name: str) -> None:
    """Give a file a second name, which it keeps when the first one goes to another file."""
    partial = path.with_name(f'{name}.partial')
    partial.unlink(missing_ok=True)
    try:
        os.link(path, partial)
    except OSError:  # a file system without links
        shutil.copyfile(path, partial)
    os.replace(partial, path.with_name(name))
    partial.unlink(missing_ok=True)  # there still if both were names of one file: then a rename does nothing


def read_state(path: Path) -> dict:
    """The latest checkpoint of a run; UserError where there is none."""
    if not beside(path):
        raise UserError(f'{path} does not exist: nothing to resume; start without --init_from=resume')
    checkpoint = load_file(path)
    if not all(type(checkpoint.get(name)) is kind for name, kind in STATE.items()) or checkpoint['step'] < 0:
        raise UserError(f'{path} holds no state of a run; fine-tune its weights with --init_from={path}')
    return checkpoint


def load_optimizers(optimizers: list[torch.optim.Optimizer], states: dict[str, dict], path: Path) -> None:
    """Take the moments of each parameter from a checkpoint; betas and the like are those of the run."""
    try:
        for optimizer in optimizers:
            name = type(optimizer).__name__
            optimizer.load_state_dict(optimizer.state_dict() | {'state': states[name]['state']})
            for p, moments in optimizer.state.items():
                for moment in MOMENTS[name]:
                    check_weight(moments[moment], p, f'{path}: {moment}')
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f'{path} has another optimizer ({one_line(error)}); fine-tune it by --init_from')
