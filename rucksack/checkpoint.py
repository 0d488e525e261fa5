"""Checkpoints: save, load, lock, resume."""

import fcntl
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model import Backpack, Config
from rucksack.common import UserError, one_line, sync
from rucksack.data import DATA_NAME

CHECKPOINTS = ('ckpt.pt', 'previous.pt', 'best.pt')  # of a run: the latest, the one before, the best


def load_file(path: Path, look_beside: bool = True) -> dict:
    """The dictionary of tensors and plain values in a file that torch.save wrote; code in it is never run.

    Such a file is a zip archive with a checksum (CRC-32) for each tensor, which torch.load does not look at.
    UserError, with the name of another checkpoint beside it that is whole, where the file is not.
    """
    if not os.path.isfile(path):
        raise UserError(f'{path} is no file')
    try:
        if zipfile.is_zipfile(path):  # else it is older than PyTorch 1.6, or damaged
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
                if unpacked > path.stat().st_size or archive.testzip():
                    raise ValueError('a checksum is wrong')
        content = torch.load(path, map_location='cpu', weights_only=True)
        if not isinstance(content, dict):
            raise ValueError(f'it holds a {type(content).__name__}, no dictionary')
        return content
    except (PermissionError, MemoryError) as error:
        raise UserError(f'{path} cannot be read ({one_line(error)})')
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        reason = f'{path} is damaged or holds no weights ({one_line(error)})'
    beside = [path.with_name(name) for name in CHECKPOINTS if path.name in CHECKPOINTS and path.name != name]
    for other in beside if look_beside else []:
        try:
            load_file(other, look_beside=False)
        except UserError:
            continue
        raise UserError(f'{reason}; {other} is whole: read that one, or to train on: cp {other} {path}')
    raise UserError(f'{reason}; make or fetch it again')


class Undrawn(TorchFunctionMode):
    """Within it no weights are drawn. On the meta device that would import torch's compiler: two seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ('normal_', 'uniform_'):
            return args[0] if args else kwargs['tensor']
        return func(*args, **(kwargs or {}))


def shape_of(config: Config) -> Backpack:
    """A model that has shapes alone, on the meta device, and no memory for weights."""
    with torch.device('meta'), Undrawn():
        return Backpack(config)


def load_state(model: Backpack, named: Callable[[Backpack], dict[str, Tensor]], state: dict[str, Tensor],
               path: Path) -> Backpack:
    """A model that has shapes alone, on the meta device, with memory for its weights and a copy of those in a
    file, which name them as in named(model). A missing, unknown or misshapen one is a UserError.
    """
    own = named(model)
    for key in sorted(own.keys() | state.keys()):
        if key not in state:
            raise UserError(f'{path}: {key} is missing')
        if key not in own:
            raise UserError(f'{path}: {key} is no weight of this architecture')
        check_weight(state[key], own[key], f'{path}: {key}')
    for key, weight in named(model.to_empty(device='cpu')).items():
        weight.copy_(state[key])
    return model.eval()


def check_weight(weight: object, like: Tensor, name: str) -> None:
    """UserError unless what a file holds is a dense tensor of finite real numbers, of another's shape."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta \
            or weight.layout != torch.strided or weight.nbytes > weight.untyped_storage().nbytes():
        raise UserError(f'{name} is no dense tensor of real numbers')
    if weight.shape != like.shape:
        raise UserError(f'{name} is {tuple(weight.shape)}, not {tuple(like.shape)}')
    if not weight.isfinite().all():
        raise UserError(f'{name} holds numbers that are not finite')


def from_checkpoint(checkpoint: dict, path: Path) -> Backpack:
    """The model inside a checkpoint of train.py: weights, config, and the description of its tokenizer."""
    try:
        model = shape_of(Config(**checkpoint['model_config']))
        model.tokenizer = json.loads(json.dumps(checkpoint['tokenizer']))  # plain values, or a TypeError
        settings = checkpoint.get('settings', {})
        sizes = ('batch_size', 'gradient_accumulation_steps', 'block_size')
        seen = [checkpoint.get('step'), *(settings.get(size) for size in sizes)]
        if all(type(n) is int and 0 <= n < 1 << 31 for n in seen):
            model.trained_tokens = math.prod(seen)
        name = settings.get('dataset')
        model.trained_on = name if isinstance(name, str) and re.fullmatch(DATA_NAME, name) else None
        state = {str(key): weight for key, weight in checkpoint['model'].items()}
    except (TypeError, LookupError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f'{path} is no checkpoint of train.py ({type(error).__name__}: {one_line(error)})')
    return load_state(model, Backpack.state_dict, state, path)


def newest_backpack() -> tuple[Backpack, Path]:
    """The Backpack in out/ whose checkpoint was written last, and where that is."""
    for path in sorted(Path('out').glob('*/ckpt.pt'), key=lambda p: p.stat().st_mtime, reverse=True):
        model = from_checkpoint(load_file(path), path)
        if model.config.n_sense:
            return model, path
    raise UserError('no Backpack in out/ yet; run python train.py config/train_toy.py, or name one by --from')


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict, path: Path) -> None:
    """Take the moments of each parameter from a checkpoint; betas and the like are those of the run."""
    try:
        own, moments = optimizer.state_dict(), state['state']
        for i, p in enumerate(p for group in optimizer.param_groups for p in group['params']):
            if moments:  # there are none before the first step
                for name in ('exp_avg', 'exp_avg_sq'):
                    check_weight(moments[i][name], p, f'{path}: {name} of parameter {i}')
                check_weight(moments[i]['step'], torch.zeros(()), f'{path}: the step of parameter {i}')
                if moments[i]['exp_avg_sq'].min() < 0 or moments[i]['step'] < 1:
                    raise ValueError('a negative square, or step')
                own['state'][i] = {name: moments[i][name] for name in ('step', 'exp_avg', 'exp_avg_sq')}
        optimizer.load_state_dict(own)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f'{path} has the optimizer of another model ({one_line(error)}); fine-tune its '
                        'weights instead')


def save_checkpoint(path: Path, state: dict, best: bool) -> None:
    """Write a checkpoint, which gets its name only when it is complete and on the disk, and is best.pt too if
    asked; the one that had the name before becomes previous.pt.
    """
    partial = path.with_suffix('.partial')
    try:
        partial.unlink(missing_ok=True)  # of a killed run: it may be best.pt by another name
        with open(partial, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        first = not path.exists()
        if not first:
            add_name(path, 'previous.pt')
            if best:
                add_name(partial, 'best.pt')
        os.replace(partial, path)
        if first:  # ckpt.pt before all others: whoever resumes looks for it
            add_name(path, 'best.pt')
        sync(path.parent)
    except RuntimeError as error:  # torch.save hides what stopped it, as a full disk, behind one of its own
        raise error.__context__ if isinstance(error.__context__, (OSError, KeyboardInterrupt)) else error
    finally:
        partial.unlink(missing_ok=True)


def add_name(path: Path, name: str) -> None:
    """Give a file a second name, which it keeps when the first one goes to another file."""
    partial = path.with_name(f'{name}.partial')
    try:
        partial.unlink(missing_ok=True)
        try:
            os.link(path, partial)
        except OSError:  # a file system without links
            shutil.copyfile(path, partial)
            sync(partial)
        os.replace(partial, path.with_name(name))
    finally:
        partial.unlink(missing_ok=True)


def lock_folder(folder: str) -> int:
    """Keep other runs out of a folder until the descriptor returned is closed, or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f'another process trains in {folder}; wait for it, or choose another --out_dir')
    except OSError:  # a file system without locks
        pass
    return descriptor


class Log:
    """out/<run>/log.csv. A checkpoint has its text, so that a resumed run goes on from just that."""

    COLUMNS = ('step', 'loss', 'val_loss', 'learning_rate', 'grad_norm', 'tokens_per_second', 'mfu',
               'seconds_left')

    def __init__(self, path: Path, text: str = ''):
        self.text = text or ','.join(self.COLUMNS) + '\n'
        partial = path.with_suffix('.partial')
        partial.write_text(self.text)
        os.replace(partial, path)
        self.file = open(path, 'a')

    def write(self, **row) -> None:
        """Append a row; a column without a value stays empty."""
        line = ','.join(str(row.get(name, '')) for name in self.COLUMNS) + '\n'
        self.text += line
        self.file.write(line)
        self.file.flush()
