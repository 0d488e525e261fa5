"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    python train.py config/train_toy.py --init_from=resume
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (lines key = value), then from --key=value.
The run writes out/<run>/ckpt.pt (the latest state), best.pt (the lowest validation loss) and log.csv.
"""

import argparse
import ast
import csv
import difflib
import json
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import (
    Backpack,
    Config,
    UserError,
    distinct_words,
    find_device,
    from_checkpoint,
    from_pretrained,
    load_file,
)


def setting(default, meaning: str):
    """A field of Settings with its line of --help."""
    return field(default=default, metadata={'meaning': meaning})


@dataclass
class Settings:
    """Everything a run depends on."""

    out_dir: str = setting('', 'folder of the run (empty: out/<config name>, with _gpt for a Transformer)')
    init_from: str = setting('scratch', 'scratch, resume, or weights to fine-tune: file, folder or Hub name')
    overwrite: bool = setting(False, 'let scratch replace the checkpoint in out_dir')
    dataset: str = setting('openwebtext', 'folder below data/ that prepare.py made')
    model: str = setting('backpack', 'backpack or gpt, the baseline Transformer')
    n_layer: int = setting(12, 'layers of the contextualizer')
    n_head: int = setting(12, 'attention heads')
    n_embd: int = setting(768, 'width d')
    n_sense: int = setting(16, 'senses of a word, k')
    sense_hidden: int = setting(0, 'hidden size of the sense MLPs (0: 4 * n_embd)')
    block_size: int = setting(512, 'length of a training text, tokens')
    dropout: float = setting(0.0, 'in the contextualizer')
    batch_size: int = setting(32, 'texts in a micro-batch')
    gradient_accumulation_steps: int = setting(1, 'micro-batches in a step, over all processes together')
    max_iters: int = setting(100_000, 'optimizer steps')
    learning_rate: float = setting(6e-4, 'at its highest')
    warmup_iters: int = setting(5000, 'steps of linear warmup')
    lr_decay_iters: int = setting(0, 'step at which the linear decay ends (0: max_iters)')
    min_lr: float = setting(0.0, 'where the decay ends')
    weight_decay: float = setting(0.1, 'on matrices')
    beta1: float = setting(0.9, 'AdamW')
    beta2: float = setting(0.95, 'AdamW')
    grad_clip: float = setting(1.0, 'largest gradient norm (0: no clipping)')
    eval_interval: int = setting(1000, 'steps between evaluations, each with a checkpoint')
    eval_iters: int = setting(100, 'batches of validation texts, the same every time')
    log_interval: int = setting(10, 'steps between log lines')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto, float32, bfloat16 (autocast) or float64')
    compile: bool = setting(True, 'torch.compile; only CUDA uses it')
    seed: int = setting(1337, 'of the weights, the order of the data and the dropout')

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


# -----------------------------------------------------------------------------
# Settings from files and from the command line.


def typed(name: str, value, source: str):
    """The value, as the type of the setting; UserError where its type is another or nothing has that name."""
    types = {f.name: f.type for f in fields(Settings)}
    if name not in types:
        near = difflib.get_close_matches(name, types, 1, cutoff=0)[0]
        raise UserError(f'{source}: there is no setting {name}; did you mean {near}? --help lists all')
    if types[name] is float and type(value) is int:
        value = float(value)
    if type(value) is not types[name] or (types[name] is float and not math.isfinite(value)):
        raise UserError(f'{source}: {name} is {value!r}; it must be of type {types[name].__name__}')
    return value


def read_config(path: str) -> dict:
    """The settings in a config file: lines key = value with Python literals, parsed and never executed."""
    try:
        lines = ast.parse(Path(path).read_text(encoding='utf-8')).body
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f'{path} cannot be read as a config file ({error}); config/ has examples')
    values = {}
    for line in lines:
        source = f'{path}, line {line.lineno}'
        try:
            (target,) = line.targets
            name, value = target.id, ast.literal_eval(line.value)
        except (AttributeError, TypeError, ValueError):
            raise UserError(f'{source}: a config file holds only lines key = value, with plain values')
        values[name] = typed(name, value, source)
    return values


def literal(text: str):
    """A number or truth value as Python writes it; anything else stays text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_args(argv: list[str]) -> Settings:
    """Settings from the command line: config files in order, then --key=value."""
    parser = argparse.ArgumentParser(
        prog='train.py', usage='train.py [config.py ...] [--key=value ...]', allow_abbrev=False,
        description='Train a Backpack or its baseline Transformer.')
    parser.add_argument('configs', nargs='*', metavar='config.py', help='files of key = value lines')
    for f in fields(Settings):
        parser.add_argument(f'--{f.name}', metavar=f.type.__name__,
                            help=f'{f.metadata["meaning"]} [{f.default}]'.replace('%', '%%'))
    parser.error = lambda message: parser.exit(2, f'train.py: {message}; see python train.py --help\n')
    args, unknown = parser.parse_known_intermixed_args(argv)
    for word in unknown:
        typed(word.split('=')[0].lstrip('-'), None, 'command line')
    values = {}
    for path in args.configs:
        values |= read_config(path)
    for f in fields(Settings):
        if (text := getattr(args, f.name)) is not None:
            values[f.name] = typed(f.name, text if f.type is str else literal(text), 'command line')
    settings = Settings(**values)
    if not settings.out_dir:
        name = Path(args.configs[-1]).stem if args.configs else settings.dataset
        name = name.removeprefix('train_').removeprefix('gpt_')
        settings.out_dir = f'out/{name}_gpt' if settings.model == 'gpt' else f'out/{name}'
    return settings


def check(settings: Settings) -> None:
    """UserError for a value that no run can use."""
    s = settings
    for name in ('batch_size', 'gradient_accumulation_steps', 'block_size', 'eval_interval', 'eval_iters',
                 'log_interval'):
        if getattr(s, name) < 1:
            raise UserError(f'{name} is {getattr(s, name)}; it must be at least 1')
    for name in ('max_iters', 'learning_rate', 'warmup_iters', 'lr_decay_iters', 'min_lr', 'weight_decay',
                 'grad_clip', 'seed'):
        if getattr(s, name) < 0:
            raise UserError(f'{name} is {getattr(s, name)}; it must not be negative')
    if not (s.beta1 < 1 and 0 <= s.beta1 and s.beta2 < 1 and 0 <= s.beta2):
        raise UserError(f'beta1 and beta2 are {s.beta1} and {s.beta2}; they must be at least 0 and below 1')
    if s.model not in ('backpack', 'gpt'):
        raise UserError(f'model is {s.model!r}; it can be backpack or gpt')
    if s.dtype not in ('auto', 'float32', 'bfloat16', 'float64'):
        raise UserError(f'dtype is {s.dtype!r}; it can be auto, float32, bfloat16 or float64')
    if s.seed >= 1 << 31:
        raise UserError(f'seed is {s.seed}; it must be below 2**31')
    if s.model == 'backpack' and s.n_sense < 1:
        raise UserError(f'n_sense is {s.n_sense}; a Backpack has at least 1, a Transformer is --model=gpt')


# -----------------------------------------------------------------------------
# Data: the batch of a step is a pure function of (seed, step).


def how_to_make(folder: Path) -> str:
    """The command that makes a data folder."""
    own = folder.name not in ('toy', 'openwebtext')
    return f'python prepare.py {folder.name}' + ' --text FILE...' * own


def read_meta(folder: Path) -> dict:
    """meta.json of a data folder; a folder without one, as nanoGPT makes it, holds GPT-2 tokens."""
    if not folder.is_dir():
        raise UserError(f'{folder} does not exist; run {how_to_make(folder)}')
    if not (folder / 'meta.json').exists():
        return {'tokenizer': {'name': 'gpt2'}, 'vocab_size': 50257, 'dtype': 'uint16'}
    try:
        meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
        n, dtype = meta['vocab_size'], meta['dtype']
        if type(n) is int and n > 0 and dtype in ('uint16', 'uint32') and type(meta['tokenizer']) is dict:
            return {'tokenizer': meta['tokenizer'], 'vocab_size': n, 'dtype': dtype}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f'{folder / "meta.json"} is damaged; run {how_to_make(folder)} --overwrite')


class Blocks:
    """A bin cut into texts of block_size tokens, each with its targets, the same texts one token later."""

    def __init__(self, path: Path, dtype: str, block_size: int, vocab_size: int):
        again = how_to_make(path.parent)
        if not path.is_file():
            raise UserError(f'{path} does not exist; run {again}')
        n_tokens, odd = divmod(path.stat().st_size, np.dtype(dtype).itemsize)
        if odd:
            raise UserError(f'{path} is not a whole number of {dtype} tokens; run {again} --overwrite')
        if n_tokens < block_size + 1:
            raise UserError(f'{path} holds {n_tokens:,} tokens, but one text takes block_size + 1 = '
                            f'{block_size + 1}; take more text, or a smaller --block_size')
        self.tokens = np.memmap(path, dtype=np.dtype(dtype).newbyteorder('<'), mode='r')
        self.block_size = block_size
        self.n = (n_tokens - 1) // block_size
        largest = max(int(self.tokens[i:i + (1 << 24)].max()) for i in range(0, n_tokens, 1 << 24))
        if largest >= vocab_size:
            raise UserError(f'{path} holds the token id {largest}, beyond the vocabulary of {vocab_size:,}; '
                            f'run {again} --overwrite')

    def __call__(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Texts and targets (len(chosen), block_size) of the chosen blocks."""
        spans = chosen[:, None] * self.block_size + np.arange(self.block_size + 1)
        ids = torch.from_numpy(self.tokens[spans].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """The order of the n blocks in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def blocks_of_step(seed: int, step: int, size: int, n: int) -> np.ndarray:
    """The size blocks of a step: epochs run on without a seam, and each has every block once."""
    places = np.arange(step * size, (step + 1) * size)
    return np.array([epoch_order(seed, int(place) // n, n)[place % n] for place in places])


# -----------------------------------------------------------------------------
# The machine.

# FLOP/s of dense bf16 matrix products, by the vendor's data sheets
PEAK_BF16 = {'B200': 2250e12, 'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'L4': 121e12,
             'A10': 125e12, '4090': 165e12, '3090': 71e12}


@dataclass
class Machine:
    """Where a run computes: this process's device and number format, and its place among the processes."""

    device: str
    dtype: str
    rank: int
    world: int

    @property
    def peak_flops(self) -> float | None:
        """Peak bf16 FLOP/s of all devices together, None where unknown."""
        name = torch.cuda.get_device_name(self.device) if self.device.startswith('cuda') else ''
        return next((peak * self.world for key, peak in PEAK_BF16.items() if key in name), None)

    def autocast(self):
        """The context of a forward pass."""
        kind = self.device.split(':')[0]
        return torch.autocast(kind, torch.bfloat16) if self.dtype == 'bfloat16' else nullcontext()

    def say(self, text: str, file=None) -> None:
        """Print once, whatever the number of processes."""
        if self.rank == 0:
            print(text, file=file, flush=True)

    def mean(self, x: Tensor) -> float:
        """Mean of a number over all processes."""
        if self.world > 1:
            dist.all_reduce(x)
        return x.item() / self.world


def find_machine(settings: Settings) -> Machine:
    """Choose device and dtype, and join the other processes where torchrun started several."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    if settings.gradient_accumulation_steps % world:
        raise UserError(f'gradient_accumulation_steps is {settings.gradient_accumulation_steps}; it counts '
                        f'micro-batches over all processes and must be a multiple of their number, {world}')
    device = find_device(settings.device)
    if device == 'cuda':
        device = f'cuda:{local}'
    dtype = settings.dtype
    if dtype == 'auto':
        dtype = 'bfloat16' if device.startswith('cuda') and torch.cuda.is_bf16_supported() else 'float32'
    if device.startswith('cuda'):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    if world > 1:
        dist.init_process_group('nccl' if device.startswith('cuda') else 'gloo')
    return Machine(device, dtype, rank, world)


# -----------------------------------------------------------------------------
# Start, checkpoint, resume.


def checkpoint_path(settings: Settings) -> Path:
    """Where the latest complete state is."""
    return Path(settings.out_dir) / 'ckpt.pt'


def start_model(settings: Settings, meta: dict) -> tuple[Backpack, dict]:
    """The model as the run starts with it, and the checkpoint that it resumes ({} if it does not)."""
    s, path = settings, checkpoint_path(settings)
    if s.init_from != 'resume' and path.exists() and not s.overwrite:
        raise UserError(f'{path} exists; go on with --init_from=resume, replace it with --overwrite=True, '
                        'or choose another --out_dir')
    checkpoint = {}
    if s.init_from == 'scratch':
        torch.manual_seed(s.seed)
        model = Backpack(Config(  # with the vocabulary padded to a multiple of 64, which GPUs like
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64, n_vocab=meta['vocab_size'],
            block_size=s.block_size, n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, dropout=s.dropout,
            n_sense=s.n_sense if s.model == 'backpack' else 0, sense_hidden=s.sense_hidden))
    elif s.init_from == 'resume':
        checkpoint = read_state(s, path)
        model = from_checkpoint(checkpoint, path)
    else:
        model = from_pretrained(s.init_from)
    model.tokenizer = model.tokenizer or meta['tokenizer']
    if model.tokenizer != meta['tokenizer']:
        raise UserError(f'{s.init_from} and data/{s.dataset} have different tokenizers; take other data')
    return model, checkpoint


def read_state(settings: Settings, path: Path) -> dict:
    """The latest checkpoint; UserError where it holds no run, or one of another shape."""
    if not path.exists():
        raise UserError(f'{path} does not exist yet; start the run without --init_from=resume')
    checkpoint = load_file(path)
    if not {'step', 'optimizer', 'best_val_loss', 'settings'} <= checkpoint.keys():
        raise UserError(f'{path} holds no state of a run; fine-tune weights with --init_from={path}')
    for name in ('model', 'n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'block_size', 'dropout'):
        was, asked = checkpoint['settings'].get(name), getattr(settings, name)
        if was != asked:
            raise UserError(f'{path} has {name} {was}, the settings ask for {asked}; resume with the same')
    return checkpoint


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a checkpoint under its name only when it is complete."""
    partial = path.with_suffix('.partial')
    try:
        with open(partial, 'wb') as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Log:
    """out/<run>/log.csv; after a resume it goes on behind the step of the checkpoint."""

    COLUMNS = ('step', 'loss', 'val_loss', 'learning_rate', 'grad_norm', 'tokens_per_second', 'mfu',
               'seconds_left')

    def __init__(self, path: Path, step: int):
        rows = []
        if step and path.exists():
            with open(path, newline='') as file:
                rows = [row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= step]
        partial = path.with_suffix('.partial')
        with open(partial, 'w', newline='') as file:
            csv.writer(file).writerows([self.COLUMNS, *rows])
        os.replace(partial, path)
        self.file = open(path, 'a', newline='')
        self.writer = csv.writer(self.file)

    def write(self, **row) -> None:
        """Append a row; a column without a value stays empty."""
        self.writer.writerow([row.get(name, '') for name in self.COLUMNS])
        self.file.flush()


# -----------------------------------------------------------------------------
# The loop.


def learning_rate_at(step: int, settings: Settings) -> float:
    """Linear warmup, then linear decay to min_lr; steps count from 0."""
    last = settings.lr_decay_iters or settings.max_iters
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / settings.warmup_iters
    share = min(1.0, (step - settings.warmup_iters) / max(1, last - settings.warmup_iters))
    return settings.learning_rate + share * (settings.min_lr - settings.learning_rate)


def inputs_of(idx: Tensor, targets: Tensor, device: str) -> dict:
    """What a model takes to learn from texts and targets (B, T), on the device: these, their distinct words.

    To CUDA they go from pinned memory, copied while it still computes on what came before.
    """
    def move(t: Tensor) -> Tensor:
        """A tensor on the device."""
        return t.pin_memory().to(device, non_blocking=True) if device.startswith('cuda') else t.to(device)

    words, place = map(move, distinct_words(idx))
    torch._dynamo.mark_dynamic(words, 0)  # one compiled model for any number of them
    return {'idx': move(idx), 'targets': move(targets), 'distinct': (words, place), 'loss_only': True}


def gradients(model, data: Blocks, step: int, settings: Settings, machine: Machine) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters; returns this process's share of the loss.

    The loss of each micro-batch is divided by their number; processes synchronise once, after the last.
    """
    s, n = settings, settings.gradient_accumulation_steps
    chosen = blocks_of_step(s.seed, step, s.batch_size * n, data.n)
    micro = chosen.reshape(n, s.batch_size)[machine.rank::machine.world]
    # the masks of dropout are a function of the step too, so that a resumed run draws the same
    torch.manual_seed((s.seed << 32) + step * machine.world + machine.rank)
    total = torch.zeros((), device=machine.device)
    for i, rows in enumerate(micro):
        batch = inputs_of(*data(rows), machine.device)
        with nullcontext() if i == len(micro) - 1 or machine.world == 1 else model.no_sync():
            with machine.autocast():
                _, loss = model(**batch)
            (loss / len(micro)).backward()
        total += loss.detach() / len(micro)
    return total


@torch.no_grad()
def evaluate(model, data: Blocks, settings: Settings, machine: Machine) -> float:
    """Mean loss, nats per token, on the same texts every time, spread evenly over the bin; dropout off."""
    size = settings.batch_size
    n = min(data.n, settings.eval_iters * size)
    chosen = np.arange(n) * data.n // n
    total = torch.zeros((), device=machine.device)
    model.eval()
    for start in range(machine.rank * size, n, machine.world * size):
        rows = chosen[start:start + size]
        batch = inputs_of(*data(rows), machine.device)
        with machine.autocast():
            total += model(**batch)[1] * len(rows)
    model.train()
    return machine.mean(total) * machine.world / n


class Run:
    """One training run: the model, the optimizer and the files of out_dir."""

    def __init__(self, settings: Settings, machine: Machine):
        s, folder = settings, Path('data') / settings.dataset
        meta = read_meta(folder)
        self.settings, self.machine = settings, machine
        self.model, checkpoint = start_model(settings, meta)
        config = self.model.config
        if config.n_vocab < meta['vocab_size'] or s.block_size > config.block_size:
            raise UserError(f'{s.init_from} has {config.n_vocab:,} words and block_size {config.block_size}; '
                            f'the run needs {meta["vocab_size"]:,} words and block_size {s.block_size}')
        shape = meta['dtype'], s.block_size, meta['vocab_size']
        self.train_data = Blocks(folder / 'train.bin', *shape)
        self.val_data = Blocks(folder / 'val.bin', *shape)
        first = self.train_data(blocks_of_step(s.seed, 0, s.batch_size, self.train_data.n))[0]
        self.flops_per_token = self.model.flops_per_token(len(first.unique()) / first.numel())
        self.model.to(machine.device, torch.float64 if machine.dtype == 'float64' else torch.float32).train()
        self.optimizer = self.model.adamw(s.learning_rate, s.weight_decay, (s.beta1, s.beta2))
        self.step, self.best = checkpoint.get('step', 0), checkpoint.get('best_val_loss', math.inf)
        if checkpoint:
            self.optimizer.load_state_dict(checkpoint['optimizer'])
        if s.max_iters < self.step:
            raise UserError(f'max_iters is {s.max_iters}, but {checkpoint_path(s)} is at step {self.step}')
        self.compiled = self.model
        if s.compile and machine.device.startswith('cuda'):
            self.compiled = torch.compile(self.model)
        self.parallel = self.compiled
        if machine.world > 1:
            dist.barrier()  # all have looked for a checkpoint before the first of them writes one
            on_gpu = machine.device.startswith('cuda')
            self.parallel = DistributedDataParallel(self.compiled, [machine.device] if on_gpu else None)
        if machine.rank == 0:
            Path(s.out_dir).mkdir(parents=True, exist_ok=True)
            self.log = Log(Path(s.out_dir) / 'log.csv', self.step)

    def describe(self) -> None:
        """Print what is about to happen."""
        s, m, n = self.settings, self.machine, self.model.n_params()
        kind = 'Transformer'
        if self.model.config.n_sense:
            kind = f'Backpack of {self.model.config.n_sense} senses'
        m.say(f'{kind}, {n["total"] / 1e6:.1f}M parameters, on {m.world} x {m.device} in {m.dtype}')
        epochs = s.max_iters * s.tokens_per_step / (self.train_data.n * s.block_size)
        m.say(f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.1f} epochs of '
              f'data/{s.dataset}; log and checkpoints in {s.out_dir}')

    def update(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns this process's loss and the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate_at(self.step, self.settings)
        loss = gradients(self.parallel, self.train_data, self.step, self.settings, self.machine)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm

    def stop_unless_finite(self, what: str, value: float) -> None:
        """End the run, exit code 1, when a number has gone wrong; the last checkpoint stays as it is."""
        if not math.isfinite(value):
            path = checkpoint_path(self.settings)
            self.machine.say(f'train.py: the {what} is {value} after step {self.step}; {path} is the last '
                             'good state, resume it with a lower --learning_rate', file=sys.stderr)
            sys.exit(1)

    def save(self) -> None:
        """Evaluate, and write ckpt.pt and, after the lowest validation loss so far, best.pt."""
        s, m = self.settings, self.machine
        val_loss = evaluate(self.compiled, self.val_data, s, m)
        self.stop_unless_finite('validation loss', val_loss)
        m.say(f'step {self.step}: validation loss {val_loss:.4f}')
        better, self.best = val_loss < self.best, min(val_loss, self.best)
        if m.rank == 0:
            state = {'model': self.model.state_dict(), 'model_config': asdict(self.model.config),
                     'tokenizer': self.model.tokenizer, 'optimizer': self.optimizer.state_dict(),
                     'settings': asdict(s), 'step': self.step, 'val_loss': val_loss,
                     'best_val_loss': self.best}
            self.log.write(step=self.step, val_loss=val_loss)
            save_checkpoint(checkpoint_path(s), state)
            if better:
                save_checkpoint(Path(s.out_dir) / 'best.pt', state)

    def report(self, loss: Tensor, norm: Tensor, seconds: float, steps: int) -> None:
        """One log line: the numbers of the last step, and the speed since the line before."""
        s, m = self.settings, self.machine
        loss, norm, speed = m.mean(loss), norm.item(), steps * s.tokens_per_step / seconds
        self.stop_unless_finite('loss', loss)
        self.stop_unless_finite('gradient norm', norm)
        rate, left = learning_rate_at(self.step - 1, s), (s.max_iters - self.step) * s.tokens_per_step / speed
        mfu = speed * self.flops_per_token / m.peak_flops if m.peak_flops else None
        m.say(f'step {self.step}: loss {loss:.4f}, lr {rate:.2e}, grad norm {norm:.2f}, {speed:,.0f} tokens/s'
              + (f', MFU {mfu:.1%}' if mfu else '') + f', {clock(left)} left')
        if m.rank == 0:
            self.log.write(step=self.step, loss=loss, learning_rate=rate, grad_norm=norm, mfu=mfu or '',
                           tokens_per_second=round(speed), seconds_left=round(left))

    def train(self) -> None:
        """Steps until max_iters; an evaluation and a checkpoint at every eval_interval and at the end."""
        s, seconds, steps = self.settings, 0.0, 0
        if self.step == 0:
            self.save()
        while self.step < s.max_iters:
            began, first = time.perf_counter(), self.step
            to_log = to_save = False
            while not (to_log or to_save):
                loss, norm = self.update()
                to_log, to_save = (self.step % interval == 0 or self.step == s.max_iters
                                   for interval in (s.log_interval, s.eval_interval))
            loss.item()  # wait for the device before looking at the clock
            seconds, steps = seconds + time.perf_counter() - began, steps + self.step - first
            if to_log:
                self.report(loss, norm, seconds, steps)
                seconds, steps = 0.0, 0
            if to_save:
                self.save()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, 1:02:03."""
    return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}'


def main(argv: list[str]) -> None:
    """Run the command line."""
    try:
        settings = parse_args(argv)
        check(settings)
        machine = find_machine(settings)
        run = Run(settings, machine)
        run.describe()
        run.train()
        if machine.world > 1:
            dist.barrier()  # none leaves, and takes its connections along, while another still writes
        machine.say(f'done: {checkpoint_path(settings)}')
    except UserError as error:
        if os.environ.get('RANK', '0') == '0':
            print(f'train.py: {error}', file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f'train.py: stopped, the last complete checkpoint stays as it is: {error}', file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print('\ntrain.py: stopped; the same command with --init_from=resume goes on from the checkpoint')
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1:])
