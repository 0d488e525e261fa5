"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    python train.py config/train_toy.py --init_from=resume
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (lines key = value), then from --key=value.
The run writes out/<run>/ckpt.pt (the latest state), previous.pt (the one before), best.pt (the lowest
validation loss) and log.csv. Kill it at any moment: resumed, on a CPU it ends in the same bits.
"""

import errno
import gc
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
import zlib
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import Backpack, Config
from rucksack.checkpoint import (
    CHECKPOINTS,
    Log,
    add_name,
    from_checkpoint,
    load_file,
    load_optimizer,
    lock_folder,
    save_checkpoint,
    shape_of,
)
from rucksack.common import Parser, UserError, drop_unwritable_output, fail, find_device, one_line, printable
from rucksack.data import DATA_NAME, Blocks, blocks_of_step, inputs_of, read_meta
from rucksack.published import from_pretrained
from rucksack.settings import literal, read_config, setting, typed


@dataclass
class Settings:
    """Everything a run depends on."""

    out_dir: str = setting('', 'folder of the run (empty: out/<config name>, with _gpt for a Transformer)')
    init_from: str = setting('scratch', 'scratch, resume, or weights to fine-tune: file, folder or Hub name')
    overwrite: bool = setting(False, 'let scratch replace the checkpoint in out_dir')
    allow_changes: bool = setting(False, 'let resume go on with other settings or data than it began with')
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
    command: ClassVar[str] = 'python train.py'  # how the run was asked for; without init_from

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


def parse_args(argv: list[str]) -> Settings:
    """Settings from the command line: config files in order, then --key=value."""
    parser = Parser(
        prog='train.py', usage='train.py [config.py ...] [--key=value ...]', allow_abbrev=False,
        description='Train a Backpack or its baseline Transformer.')
    parser.add_argument('configs', nargs='*', metavar='config.py', help='files of key = value lines')
    for f in fields(Settings):
        parser.add_argument(f'--{f.name}', metavar=f.type.__name__,
                            help=f'{f.metadata["meaning"]} [{f.default}]'.replace('%', '%%'))
    args, unknown = parser.parse_known_intermixed_args(argv)
    for word in unknown:
        typed(Settings, word.split('=')[0].lstrip('-'), None, 'command line')
    values = {}
    for path in args.configs:
        values |= read_config(Settings, path)
    for f in fields(Settings):
        if (text := getattr(args, f.name)) is not None:
            values[f.name] = typed(Settings, f.name, text if f.type is str else literal(text), 'command line')
    settings = Settings(**values)
    if not settings.out_dir:
        name = Path(args.configs[-1]).stem if args.configs else settings.dataset
        name = name.removeprefix('train_').removeprefix('gpt_')
        settings.out_dir = f'out/{name}_gpt' if settings.model == 'gpt' else f'out/{name}'
    again = [f'--{name}={text}' for name, text in vars(args).items()
             if text is not None and name not in ('configs', 'init_from', 'overwrite', 'allow_changes')]
    start = 'python train.py'
    if 'RANK' in os.environ:
        start = f'torchrun --nproc_per_node={os.environ.get("LOCAL_WORLD_SIZE", "N")} train.py'
    settings.command = f'{start} {shlex.join(args.configs + again)}'
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
    for name in ('learning_rate', 'min_lr', 'weight_decay'):
        if getattr(s, name) > 100:
            raise UserError(f'{name} is {getattr(s, name)}; it must be at most 100')
    if s.batch_size * s.block_size > 1 << 20 or s.batch_size * s.gradient_accumulation_steps > 1_000_000:
        raise UserError(f'batch_size {s.batch_size} x block_size {s.block_size} tokens can be at most 2**20, '
                        f'times gradient_accumulation_steps {s.gradient_accumulation_steps} texts 1,000,000')
    if not re.fullmatch(DATA_NAME, s.dataset):
        raise UserError(f'dataset is {s.dataset!r}; it must be the name of a folder below data/')
    if not s.init_from:
        raise UserError('init_from is empty; it can be scratch, resume, or weights to fine-tune')
    if s.model == 'backpack' and s.n_sense < 1:
        raise UserError(f'n_sense is {s.n_sense}; a Backpack has at least 1, a Transformer is --model=gpt')


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

    def say(self, text: str) -> None:
        """Print once, whatever the number of processes. Nobody may be there to read it: training goes on."""
        if self.rank == 0:
            try:
                print(printable(text), flush=True)
            except OSError:
                drop_unwritable_output()

    def mean(self, x: Tensor) -> Tensor:
        """Mean of numbers over all processes; x itself becomes their sum."""
        if self.world > 1:
            dist.all_reduce(x)
        return x / self.world

    def largest(self, n: int) -> int:
        """Largest of a number over all processes, found on the CPU while a GPU computes."""
        if self.world > 1:
            dist.all_reduce(numbers := torch.tensor(n), dist.ReduceOp.MAX)
            n = numbers.item()
        return n


def find_machine(settings: Settings) -> Machine:
    """Choose device and dtype, and join the other processes where torchrun started several."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    if (n := settings.gradient_accumulation_steps) % world:
        fitting = [n // world * world] * (n > world) + [(n // world + 1) * world]
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        worlds = [max(d for d in divisors if d < world), *[d for d in divisors if d > world][:1]]
        raise UserError(f'gradient_accumulation_steps is {n}; it counts micro-batches over all processes and '
                        f'must be a multiple of their number, {world}: take {" or ".join(map(str, fitting))}'
                        f', or {" or ".join(map(str, worlds))} process{"es" * (worlds != [1])}')
    device = find_device('auto') if settings.device == 'auto' else settings.device
    device = find_device(f'cuda:{local}' if device == 'cuda' else device)
    dtype = settings.dtype
    if dtype == 'auto':
        dtype = 'bfloat16' if device.startswith('cuda') and torch.cuda.is_bf16_supported() else 'float32'
    if device.startswith('cuda'):
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    if world > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if device.startswith('cuda') else 'gloo')
    return Machine(device, dtype, rank, world)


# -----------------------------------------------------------------------------
# Start, checkpoint, resume.


def checkpoint_path(settings: Settings) -> Path:
    """Where the latest complete state is."""
    return Path(settings.out_dir) / 'ckpt.pt'


def config_from(**numbers) -> Config:
    """The Config of a user's numbers; UserError where they do not fit together."""
    try:
        return Config(**numbers)
    except ValueError as error:
        raise UserError(str(error))


def start_model(settings: Settings, meta: dict, device: str, checkpoint: dict) -> Backpack:
    """The model as the run starts with it; checkpoint is what it resumes, {} if it does not."""
    s, path = settings, checkpoint_path(settings)
    there = checkpoints_beside(path)
    if there and not checkpoint and not s.overwrite:
        raise UserError(f'{there[0]} exists; go on with --init_from=resume, replace it with '
                        '--overwrite=True, or choose another --out_dir')
    if checkpoint:
        model = from_checkpoint(checkpoint, path)
    elif s.init_from == 'scratch':
        config = config_from(  # with the vocabulary padded to a multiple of 64, which GPUs like
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64, n_vocab=meta['vocab_size'],
            block_size=s.block_size, n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, dropout=s.dropout,
            n_sense=s.n_sense if s.model == 'backpack' else 0, sense_hidden=s.sense_hidden)
        check_memory(config, s, device)
        torch.manual_seed(s.seed)
        model = Backpack(config)
    else:
        model = from_pretrained(s.init_from)
    model.tokenizer = model.tokenizer or meta['tokenizer']
    if model.tokenizer != meta['tokenizer']:
        raise UserError(f'{s.init_from} and data/{s.dataset} have different tokenizers; take other data')
    return model


def checkpoints_beside(path: Path) -> list[Path]:
    """The checkpoints that there are in the folder of one, itself among them."""
    return [other for name in CHECKPOINTS if os.path.exists(other := path.with_name(name))]


def check_memory(config: Config, settings: Settings, device: str) -> None:
    """UserError where a step needs more memory than there is, by what it takes at the very least: weights,
    gradients and two moments, and in bfloat16 a few vectors of each token.
    """
    try:
        n_params = shape_of(config).n_params()['total']
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
        raise UserError(f'no model can be so large ({one_line(error)}); take smaller sizes')
    tokens = settings.batch_size * settings.block_size
    need = 16 * n_params + 2 * tokens * config.n_embd * (8 * config.n_layer + 2 * config.n_sense)
    there = torch.cuda.get_device_properties(device).total_memory if device.startswith('cuda') \
        else os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    if need > there:
        raise UserError(f'{n_params / 1e6:,.1f}M parameters and {tokens:,} tokens at a time need more than '
                        f'{need / 1e9:,.0f} GB, {device} has {there / 1e9:,.0f}; take a smaller model, or a '
                        'smaller --batch_size with more --gradient_accumulation_steps')


# What a resumed run may set anew: it is in the numbers that come out by rounding at most, as is the number of
# processes. max_iters may be larger, too.
FREE = ('out_dir', 'init_from', 'overwrite', 'allow_changes', 'eval_interval', 'log_interval', 'device',
        'compile')
SHAPE = ('model', 'n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'block_size', 'dropout')
STATE = {'step': int, 'best_val_loss': float, 'val_loss': float, 'settings': dict, 'optimizer': dict,
         'log': str, 'data': str}  # what a checkpoint holds of a run, beside the model


def read_state(settings: Settings, path: Path) -> dict:
    """The latest checkpoint; UserError where it holds no run, or one the settings would not continue."""
    if not os.path.exists(path):
        if there := checkpoints_beside(path):
            raise UserError(f'{path} does not exist, but {there[0]}; to go on: cp {there[0]} {path}')
        raise UserError(f'{path} does not exist: there is nothing to resume; start with {settings.command}')
    checkpoint = load_file(path)
    if not all(type(checkpoint.get(name)) is kind for name, kind in STATE.items()) \
            or checkpoint['step'] < 0 or not checkpoint['log'].isascii():
        raise UserError(f'{path} holds no state of a run; fine-tune weights with --init_from={path}')
    was = {f.name: checkpoint['settings'].get(f.name) for f in fields(Settings)
           if type(checkpoint['settings'].get(f.name)) is f.type}
    changed = [f.name for f in fields(Settings)
               if f.name not in FREE and was.get(f.name) != getattr(settings, f.name)]
    longer = was.get('max_iters', math.inf) < settings.max_iters

    def listed(names: list[str]) -> str:
        """Settings, what they were and what they are."""
        return ', '.join(f'{name} {was.get(name)}, now {getattr(settings, name)}' for name in names)

    if fixed := [name for name in changed if name in SHAPE]:
        raise UserError(f'{path} has {listed(fixed)}, which a run keeps; resume with the same, or fine-tune '
                        f'its weights into another --out_dir with --init_from={path}')
    if changed and not (changed == ['max_iters'] and longer) and not settings.allow_changes:
        raise UserError(f'{path} has {listed(changed)}; resume with the same, or add --allow_changes=True')
    return checkpoint | {'changed': listed(changed)}


# -----------------------------------------------------------------------------
# The loop.


def learning_rate_at(step: int, settings: Settings) -> float:
    """Linear warmup, then linear decay to min_lr; steps count from 0."""
    last = settings.lr_decay_iters or settings.max_iters
    if step < settings.warmup_iters:
        return settings.learning_rate * (step + 1) / settings.warmup_iters
    share = min(1.0, (step - settings.warmup_iters) / max(1, last - settings.warmup_iters))
    return settings.learning_rate + share * (settings.min_lr - settings.learning_rate)


def gradients(model, data: Blocks, step: int, settings: Settings, machine: Machine) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters; returns this process's share of the loss.

    The loss of each micro-batch is divided by their number; processes synchronise once, after the last.
    """
    s, n = settings, settings.gradient_accumulation_steps
    micro = blocks_of_step(s.seed, step, s.batch_size * n, data.n).reshape(n, s.batch_size)
    own, losses = range(machine.rank, n, machine.world), []
    for i in own:
        batch = inputs_of(*data(micro[i]), machine.device)
        # the masks of dropout depend on the step and the micro-batch alone, as the texts do
        torch.manual_seed((s.seed << 32) + step * n + i)
        with nullcontext() if i == own[-1] or machine.world == 1 else model.no_sync():
            with machine.autocast():
                _, loss = model(**batch)
            (loss / len(own)).backward()
        losses.append(loss.detach() / len(own))
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, data: Blocks, settings: Settings, machine: Machine) -> float:
    """Mean loss, nats per token, on the same texts every time, spread evenly over the bin; dropout off."""
    size = settings.batch_size
    n = min(data.n, settings.eval_iters * size)
    chosen = np.arange(n) * data.n // n
    total = torch.zeros((), device=machine.device, dtype=next(model.parameters()).dtype)
    model.eval()
    for start in range(machine.rank * size, n, machine.world * size):
        rows = chosen[start:start + size]
        batch = inputs_of(*data(rows), machine.device)
        with machine.autocast():
            total += model(**batch)[1] * len(rows)
    model.train()
    return machine.mean(total).item() * machine.world / n


class Run:
    """One training run: the model, the optimizer and the files of out_dir."""

    def __init__(self, settings: Settings, machine: Machine):
        s, folder = settings, Path('data') / settings.dataset
        checkpoint = read_state(s, checkpoint_path(s)) if s.init_from == 'resume' else {}
        meta = read_meta(folder)
        self.settings, self.machine, self.changed = settings, machine, checkpoint.get('changed')
        self.model = start_model(settings, meta, machine.device, checkpoint)
        config = self.model.config
        if config.n_vocab < meta['vocab_size'] or s.block_size > config.block_size:
            raise UserError(f'{s.init_from} has {config.n_vocab:,} words and block_size {config.block_size}; '
                            f'the run needs {meta["vocab_size"]:,} words and block_size {s.block_size}')
        self.train_data = Blocks(folder, 'train', meta, s.block_size)
        self.val_data = Blocks(folder, 'val', meta, s.block_size)
        self.data_facts = str([meta['tokens'], meta.get('sha256')])
        first = self.train_data(blocks_of_step(s.seed, 0, s.batch_size, self.train_data.n))[0]
        self.flops_per_token = self.model.flops_per_token(len(first.unique()) / first.numel())
        self.model.to(machine.device, torch.float64 if machine.dtype == 'float64' else torch.float32).train()
        self.optimizer = self.model.adamw(s.learning_rate, s.weight_decay, (s.beta1, s.beta2))
        self.step, self.best = checkpoint.get('step', 0), checkpoint.get('best_val_loss', math.inf)
        self.val_loss = checkpoint.get('val_loss')
        self.saved_step = self.step if checkpoint else None  # that ckpt.pt is of
        self.unchecked: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of the steps since a check
        self.signal = 0  # SIGINT, SIGTERM or SIGHUP, once this process got one
        if checkpoint:
            self.check_resumed(checkpoint)
        self.compiled = self.model
        if s.compile and machine.device.startswith('cuda'):
            self.compiled = torch.compile(self.model)
        self.parallel = self.compiled
        if machine.world > 1:
            self.join_others(zlib.crc32(f'{self.step} {checkpoint.get("log")} {self.data_facts}'.encode()))
        if machine.rank == 0:
            Path(s.out_dir).mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(s.out_dir)
            for name in () if checkpoint else CHECKPOINTS:
                Path(s.out_dir, name).unlink(missing_ok=True)  # of a run that this one replaces
            if checkpoint and not Path(s.out_dir, 'best.pt').exists():  # killed right before it had its name
                add_name(checkpoint_path(s), 'best.pt')
            self.log = Log(Path(s.out_dir) / 'log.csv', checkpoint.get('log', ''))

    def check_resumed(self, checkpoint: dict) -> None:
        """Take over the rest of a checkpoint; UserError where the run cannot go on from it."""
        s, path = self.settings, checkpoint_path(self.settings)
        if checkpoint['data'] != self.data_facts and not s.allow_changes:
            raise UserError(f'data/{s.dataset} is not what {path} was trained on; make it as it was, or add '
                            '--allow_changes=True')
        if s.max_iters < self.step:
            raise UserError(f'max_iters is {s.max_iters}, but {path} is at step {self.step}; take as many')
        self.model.load_state_dict(checkpoint['model'])  # again, for float64, which it was not yet
        load_optimizer(self.optimizer, checkpoint['optimizer'], path)

    def join_others(self, mark: int) -> None:
        """Share the training with the other processes, once all have found the same: mark is its checksum."""
        if -self.machine.largest(-mark) < self.machine.largest(mark):
            raise UserError('the processes do not go on from the same step on the same data; let all of them '
                            f'see the same {checkpoint_path(self.settings)} and data/{self.settings.dataset}')
        on_gpu = self.machine.device.startswith('cuda')
        self.parallel = DistributedDataParallel(self.compiled, [self.machine.device] if on_gpu else None)

    def describe(self) -> None:
        """Print what is about to happen."""
        s, m, n = self.settings, self.machine, self.model.n_params()
        kind = 'Transformer'
        if self.model.config.n_sense:
            kind = f'Backpack of {self.model.config.n_sense} senses'
        threads = f' of {torch.get_num_threads()} threads' if m.device == 'cpu' else ''
        m.say(f'{kind}, {n["total"] / 1e6:.1f}M parameters, on {m.world} x {m.device}{threads} in {m.dtype}')
        epochs = s.max_iters * s.tokens_per_step / (self.train_data.n * s.block_size)
        m.say(f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.3f} epochs of '
              f'data/{s.dataset}; log and checkpoints in {s.out_dir}')
        if s.warmup_iters > s.max_iters:
            m.say(f'warmup_iters is {s.warmup_iters:,}: the learning rate rises to the end of the run, and '
                  f'stays below {s.learning_rate:g}')
        if self.saved_step is not None:
            m.say(f'resumed from {checkpoint_path(s)} after step {self.saved_step}'
                  + (f'; changed: {self.changed}' if self.changed else ''))

    def update(self) -> None:
        """One optimizer step; keeps this process's loss and the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate_at(self.step, self.settings)
        loss = gradients(self.parallel, self.train_data, self.step, self.settings, self.machine)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.unchecked.append((loss, norm))

    def check(self) -> tuple[float, float]:
        """Loss, over all processes, and gradient norm of the last step. FloatingPointError if those of any
        step since the last check, or the weights and moments now, are not finite. Waits for the device.
        """
        losses, norms = (torch.stack(column).cpu().double() for column in zip(*self.unchecked))
        pairs = list(zip(self.machine.mean(losses).tolist(), norms.tolist()))
        for step, (loss, norm) in enumerate(pairs, self.step - len(pairs) + 1):
            if not math.isfinite(loss + norm):
                self.stop_for(f'the loss is {loss} and the gradient norm {norm}', step)
        state = [*self.model.parameters(), *(moments[name] for moments in self.optimizer.state.values()
                                             for name in ('exp_avg', 'exp_avg_sq'))]
        if not torch.stack([t.isfinite().all() for t in state]).all():
            self.stop_for(f'the weights are no longer finite, the gradient norm was {norm}', self.step)
        self.unchecked = []
        return loss, norm

    def stop_for(self, what: str, step: int) -> None:
        """Raise FloatingPointError: a number has gone wrong. The last checkpoint stays as it is."""
        s = self.settings
        command = re.sub(r' --learning_rate=\S+', '', s.command) + f' --learning_rate={s.learning_rate / 2:g}'
        where = f'step {step}: {what}, at learning rate {learning_rate_at(max(0, step - 1), s):.2e}'
        raise FloatingPointError(
            f'{where}; there is no checkpoint yet, begin with a lower rate: {command}'
            if self.saved_step is None else
            f'{where}; {checkpoint_path(s)}, of step {self.saved_step}, is the last good state, go on with a '
            f'lower rate: {command} --init_from=resume --allow_changes=True')

    def evaluate(self) -> bool:
        """Take the validation loss, and log it; whether it is the lowest so far."""
        s, m = self.settings, self.machine
        self.val_loss = evaluate(self.compiled, self.val_data, s, m)
        if not math.isfinite(self.val_loss):
            self.stop_for(f'the validation loss is {self.val_loss}', self.step)
        m.say(f'step {self.step}: validation loss {self.val_loss:.4f}')
        if m.rank == 0:
            self.log.write(step=self.step, val_loss=self.val_loss)
        better, self.best = self.val_loss < self.best, min(self.val_loss, self.best)
        return better

    def save(self, best: bool) -> None:
        """Write the state as ckpt.pt, and as best.pt if it is the best."""
        if self.machine.rank == 0:
            save_checkpoint(checkpoint_path(self.settings), {
                'model': self.model.state_dict(), 'model_config': asdict(self.model.config),
                'tokenizer': self.model.tokenizer, 'optimizer': self.optimizer.state_dict(),
                'settings': asdict(self.settings), 'step': self.step, 'val_loss': self.val_loss,
                'best_val_loss': self.best, 'log': self.log.text, 'data': self.data_facts}, best)
        self.saved_step = self.step

    def report(self, loss: float, norm: float, seconds: float, steps: int) -> None:
        """One log line: the numbers of the last step, and the speed since the line before."""
        s, m, speed = self.settings, self.machine, steps * self.settings.tokens_per_step / seconds
        rate, left = learning_rate_at(self.step - 1, s), (s.max_iters - self.step) * s.tokens_per_step / speed
        mfu = speed * self.flops_per_token / m.peak_flops if m.peak_flops else None
        m.say(f'step {self.step}: loss {loss:.4f}, lr {rate:.2e}, grad norm {norm:.2f}, {speed:,.0f} tokens/s'
              + (f', MFU {mfu:.1%}' if mfu else '') + f', {clock(left)} left')
        if m.rank == 0:
            self.log.write(step=self.step, loss=loss, learning_rate=rate, grad_norm=norm, mfu=mfu or '',
                           tokens_per_second=round(speed), seconds_left=round(left))

    def train(self) -> int:
        """Steps until max_iters, an evaluation and a checkpoint at every eval_interval and at the end; or
        until a signal, and then a checkpoint. Returns the signal, 0 if there was none.
        """
        s = self.settings
        if self.saved_step is None:
            self.save(self.evaluate())
        began, first = time.perf_counter(), self.step
        while self.step < s.max_iters:
            if signum := self.machine.largest(self.signal):
                if self.unchecked:
                    self.check()
                if self.saved_step < self.step:
                    self.save(False)
                return signum
            self.update()
            to_log, to_save = (self.step % interval == 0 or self.step == s.max_iters
                               for interval in (s.log_interval, s.eval_interval))
            if to_log or to_save:
                loss, norm = self.check()
            if to_log:
                self.report(loss, norm, time.perf_counter() - began, self.step - first)
                began, first = time.perf_counter(), self.step
            if to_save:
                paused = time.perf_counter()
                self.save(self.evaluate())
                began += time.perf_counter() - paused
        return 0

    @contextmanager
    def patience(self):
        """While it lasts, SIGINT, SIGTERM or SIGHUP ends the run after its step; a second one at once.

        Not so under torchrun, which may pass on a Ctrl-C that the terminal has sent to all already.
        """
        def asked(signum: int, frame) -> None:
            """Take note of a signal."""
            if not self.signal and self.machine.rank == 0:
                with suppress(OSError):  # the same Ctrl-C may have ended the reader
                    os.write(2, b'\ntrain.py: finishing the step, then a checkpoint\n')
            self.signal = signum
            if 'RANK' not in os.environ:
                for number, handler in before.items():
                    signal.signal(number, handler)

        before = {number: signal.getsignal(number)
                  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # as under nohup
            del before[signal.SIGHUP]
        try:
            for number in before:
                signal.signal(number, asked)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, 1:02:03."""
    return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}'


def work(settings: Settings) -> int:
    """Run with these settings; returns the exit code."""
    check(settings)
    machine = find_machine(settings)
    settings.dtype = machine.dtype  # as found, for a resumed run to compare
    try:
        run = Run(settings, machine)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UserError(f'the run cannot start: {error}')
    run.describe()
    code = 0
    try:
        with run.patience():
            signum = run.train()
        if signum:
            code = 128 + signum
            machine.say(f'stopped after step {run.step}; to go on: {settings.command} --init_from=resume')
        else:
            machine.say(f'done: {checkpoint_path(settings)}')
    except FloatingPointError as error:  # in all processes
        code = 1
        if machine.rank == 0:
            print(f'train.py: {error}', file=sys.stderr)
    finally:
        if machine.rank == 0:
            os.close(run.lock)
    if machine.world > 1:
        dist.barrier()  # none leaves, and takes its connections along, while another still writes
    return code


def advice(settings: Settings) -> str:
    """How to go on after a run was stopped from without."""
    path = checkpoint_path(settings)
    if os.path.exists(path):
        return f'; {path} is complete, only the steps since then are lost: {settings.command} ' \
               '--init_from=resume'
    return f'; there is no checkpoint yet, begin again: {settings.command}'


def main(argv: list[str]) -> None:
    """Run the command line."""
    settings = Settings()
    warnings.simplefilter('ignore', SyntaxWarning)  # of settings; what is wrong with them is said in one line
    try:
        settings = parse_args(argv)
        code = work(settings)
        if dist.is_initialized():
            gc.collect()  # DDP holds the group: free it first, or destroying the group can hang
            dist.destroy_process_group()
        if code:
            sys.exit(code)
    except UserError as error:  # the same in all processes of a node: one speaks
        fail('train.py', str(error)) if os.environ.get('LOCAL_RANK', '0') == '0' else sys.exit(2)
    except OSError as error:
        fail('train.py', f'stopped: {error}{advice(settings)}', 1)
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or 'allocate memory' in text:
            fail('train.py', 'out of memory; take a smaller --batch_size and more '
                 f'--gradient_accumulation_steps{advice(settings)}')
        if isinstance(error, dist.DistError) or 'gloo' in text or 'Connection' in text:
            fail('train.py', 'stopped: another process has ended, or cannot be reached '
                 f'({one_line(error)}){advice(settings)}', 1)
        raise
    except KeyboardInterrupt:
        fail('train.py', f'stopped{advice(settings)}', 130)


if __name__ == '__main__':
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')
    main(sys.argv[1:])
