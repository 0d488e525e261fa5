"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (lines key = value), then from
--key=value. The run writes out/<run>/ckpt.pt (the latest state), previous.pt (the one before),
best.pt (the lowest validation loss), log.csv, and ckpt-STEP.pt by --keep_every. A run that was
killed and resumed ends in the same bits.
"""

import gc
import math
import os
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import Backpack, Config
from rucksack import checkpoint as ckpt
from rucksack.common import UserError, run_cli
from rucksack.data import DATA_NAME, DistinctIds, TokenDataset, inputs_of, read_meta, texts_of_step
from rucksack.folder import RunFolder, refuse_to_replace
from rucksack.machine import Machine, find_machine, flops_per_token
from rucksack.published import from_pretrained
from rucksack.settings import parse_settings, setting
from senses import sense_gauge

# -----------------------------------------------------------------------------
# Settings.


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on."""

    out_dir: str = setting('', 'folder of the run (empty: out/<config>, out/<config>_gpt, ..)')
    init_from: str = setting('scratch', 'scratch, resume, or weights: a file, folder or Hub name')
    overwrite: bool = setting(False, 'delete the checkpoints in out_dir and start again')
    dataset: str = setting('openwebtext', 'folder in data/ that prepare.py made')
    model: str = setting('backpack', 'backpack, or gpt: the baseline Transformer',
                         of=('backpack', 'gpt'))
    n_layer: int = setting(12, 'layers of the contextualizer', low=1)
    n_head: int = setting(12, 'attention heads', low=1)
    n_embd: int = setting(768, 'width d', low=1)
    n_sense: int = setting(16, 'senses of a token, k', low=1)
    sense_hidden: int = setting(0, 'hidden size of the sense MLPs (0: 4 * n_embd)')
    block_size: int = setting(512, 'length of a training text, tokens', low=1)
    dropout: float = setting(0.0, 'dropout in the contextualizer', below=1)
    batch_size: int = setting(32, 'texts in a micro-batch', low=1)
    gradient_accumulation_steps: int = setting(1, 'micro-batches a step, of all processes', low=1)
    max_iters: int = setting(100_000, 'optimizer steps')
    optimizer: str = setting('adamw', 'adamw, or muon: Muon for matrices, AdamW for the rest',
                             of=('adamw', 'muon'))
    learning_rate: float = setting(6e-4, 'peak learning rate of AdamW')
    muon_lr: float = setting(6e-3, 'peak learning rate of Muon')
    warmup_iters: int = setting(5000, 'steps of linear warmup')
    lr_decay_iters: int = setting(0, 'step at which the linear decay ends (0: max_iters)')
    min_lr: float = setting(0.0, 'learning rate at the end of the decay')
    weight_decay: float = setting(0.1, 'weight decay of matrices')
    decay_embeddings: bool = setting(True, 'apply weight decay to the embeddings too')
    beta1: float = setting(0.9, 'first beta of AdamW', below=1)
    beta2: float = setting(0.95, 'second beta of AdamW', below=1)
    grad_clip: float = setting(1.0, 'largest gradient norm (0: no clipping)')
    eval_interval: int = setting(1000, 'steps between evaluations, each with a checkpoint', low=1)
    eval_iters: int = setting(100, 'batches of validation texts, the same every time', low=1)
    keep_every: int = setting(0, 'keep the weights every N steps, as ckpt-STEP.pt (0: never)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too (pip install wandb)')
    wandb_project: str = setting('rucksack', 'project in Weights & Biases')
    wandb_run_name: str = setting('', 'name of the run there (empty: one is made up)')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto (bfloat16 where it is fast), float32, bfloat16 or float64',
                         of=('auto', 'float32', 'bfloat16', 'float64'))
    compile: bool = setting(True, 'torch.compile, on CUDA and on CPUs with a C++ compiler')
    seed: int = setting(1337, 'random seed for weights, order of the data and dropout')

    @property
    def path(self) -> Path:
        """The checkpoint of the run."""
        return Path(self.out_dir) / 'ckpt.pt'

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches of all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


# A resumed run may change these, which change results by rounding at most, and raise max_iters.
FREE = ('out_dir', 'init_from', 'overwrite', 'eval_interval', 'keep_every', 'log_interval',
        'device', 'compile', 'wandb_log', 'wandb_project', 'wandb_run_name')
# The weights decide these.
SHAPE = ('n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'dropout')


def parse_args(argv: list[str]) -> tuple[Settings, frozenset[str]]:
    """The settings from config files in order, then --key=value, and the names of those given."""
    values, configs, flags = parse_settings(Settings, 'train.py', __doc__.splitlines()[0], argv)
    s = Settings(**values)
    if not s.out_dir:
        s = replace(s, out_dir=default_out_dir(s, configs, flags))
    if not re.fullmatch(DATA_NAME, s.dataset):
        raise UserError(f'dataset is {s.dataset!r}; it must be the name of a folder in data/')
    world = int(os.environ.get('WORLD_SIZE', 1))
    if s.gradient_accumulation_steps % world != 0:
        raise UserError(f'gradient_accumulation_steps is {s.gradient_accumulation_steps}; it must '
                        f'be a multiple of {world}, the number of processes')
    return s, frozenset(values)


def default_out_dir(s: Settings, configs: list[str], flags: list[str]) -> str:
    """out/ and the name of the last config or of the data, with _gpt, or _K where --n_sense=K."""
    name = s.dataset
    if configs:
        name = Path(configs[-1]).stem.removeprefix('train_')
    if s.model == 'gpt':
        return f'out/{name}_gpt'
    if f'--n_sense={s.n_sense}' in flags:
        return f'out/{name}_{s.n_sense}'
    return f'out/{name}'


def with_shape_of(config: Config, source: str | Path, s: Settings,
                  given: frozenset[str]) -> Settings:
    """The settings with the shape that weights have; UserError if another one was given."""
    has = {name: getattr(config, name) for name in SHAPE}
    has['model'] = 'backpack' if config.n_sense else 'gpt'
    for name, value in has.items():
        asked = getattr(s, name)
        if name == 'sense_hidden' and asked == 0:
            asked = 4 * config.n_embd
        is_unused = name in ('n_sense', 'sense_hidden') and not config.n_sense
        if name in given and asked != value and not is_unused:
            raise UserError(f'{source} has {name}={value}; drop --{name}={asked}')
    return replace(s, **has)


def check_unchanged(s: Settings, state: dict, data_facts: str) -> str:
    """A line on what a resumed run changes; UserError if that is anything but max_iters."""
    start_anew = f'start a new run from its weights: --init_from={s.path} --out_dir=NEW'
    if state['data'] != data_facts:
        raise UserError(f'data/{s.dataset} is not what {s.path} was trained on; make it as it was, '
                        f'or {start_anew}')
    if s.max_iters < state['step']:
        raise UserError(f'{s.path} is already at step {state["step"]}, and --max_iters is '
                        f'{s.max_iters}; set it to at least {state["step"]}')
    changed = {}
    for name in {f.name for f in fields(s)} - set(FREE + SHAPE):
        before = state['settings'].get(name)
        if before != getattr(s, name):
            changed[name] = f'{name} {before}, now {getattr(s, name)}'
    text = ', '.join(sorted(changed.values()))
    if changed.keys() - {'max_iters'}:
        raise UserError(f'{s.path} was trained with {text}; use the same settings, or {start_anew}')
    return f'resumed from {s.path} after step {state["step"]}; changed: {text or "nothing"}'


# -----------------------------------------------------------------------------
# The parts of a step.


def random_model(s: Settings, meta: dict) -> Backpack:
    """An untrained model of the settings' shape; UserError if its numbers do not fit together."""
    torch.manual_seed(s.seed)
    try:
        model = Backpack(Config(
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64,  # GPUs like multiples of 64
            n_vocab=meta['vocab_size'],
            block_size=s.block_size, n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd,
            n_sense=s.n_sense if s.model == 'backpack' else 0,
            sense_hidden=s.sense_hidden, dropout=s.dropout))
    except ValueError as error:
        raise UserError(str(error))
    model.tokenizer = meta['tokenizer']
    return model


def model_for(s: Settings, weights: Backpack, source: str | Path, meta: dict) -> Backpack:
    """A model of these weights and the settings' dropout; UserError if the data do not fit it."""
    config = weights.config
    if weights.tokenizer not in (None, meta['tokenizer']) or config.n_vocab < meta['vocab_size']:
        raise UserError(f'{source} has another tokenizer than data/{s.dataset}; choose other data')
    if config.block_size < s.block_size:
        raise UserError(f'{source} has block_size={config.block_size}, and --block_size is '
                        f'{s.block_size}; set it to {config.block_size} or less')
    model = Backpack(replace(config, dropout=s.dropout))
    model.load_state_dict(weights.state_dict())
    model.tokenizer = meta['tokenizer']
    return model


def learning_rate_at(step: int, s: Settings, peak: float) -> float:
    """Linear warmup to the peak, then linear decay to min_lr; steps count from 0."""
    last = s.lr_decay_iters or s.max_iters
    if step < s.warmup_iters:
        return peak * (step + 1) / s.warmup_iters
    share = min(1.0, (step - s.warmup_iters) / max(1, last - s.warmup_iters))
    return peak + share * (s.min_lr - peak)


def gradients(model, data: TokenDataset, step: int, s: Settings, machine: Machine) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters; returns this process's share.

    Processes take the micro-batches in turn, and synchronise once, after their last one.
    """
    n = s.gradient_accumulation_steps
    micro_batches = texts_of_step(s.seed, step, s.batch_size * n, data.n).reshape(n, s.batch_size)
    own = range(machine.rank, n, machine.world)
    losses = []
    for i in own:
        idx, targets = data(micro_batches[i])  # (batch_size, block_size) each
        inputs = inputs_of(idx, targets, machine.device)
        torch.manual_seed((s.seed << 32) + step * n + i)  # dropout depends on this alone
        synchronise = i == own[-1] or machine.world == 1
        with nullcontext() if synchronise else model.no_sync():
            with machine.autocast():
                loss = model(*inputs) / len(own)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, data: TokenDataset, s: Settings, machine: Machine) -> float:
    """Mean loss, in nats per token, on the same texts every time, spread evenly over the bin."""
    n = min(data.n, s.eval_iters * s.batch_size)
    texts = np.arange(n) * data.n // n
    batches = np.split(texts, range(s.batch_size, n, s.batch_size))
    total = torch.zeros((), device=machine.device, dtype=next(model.parameters()).dtype)
    model.eval()
    for batch in batches[machine.rank::machine.world]:
        idx, targets = data(batch)
        with machine.autocast():
            total += model(*inputs_of(idx, targets, machine.device)) * len(batch)
    model.train()
    return machine.over_all(total) / n


def stuck_senses(model: Backpack, data: TokenDataset, machine: Machine) -> tuple[int, int]:
    """How many senses do not read the text, on 16 texts spread evenly over the bin.

    First those that give over 0.97 of their weight to the current token, then those whose weights
    follow position alone. The loss shows neither, and such a sense does not recover: its softmax is
    saturated and has no gradient. Before training all senses follow position alone.
    """
    n = min(data.n, 16)
    idx, _ = data(np.arange(n) * data.n // n)
    model.eval()
    with machine.autocast():
        on_current, moved = sense_gauge(model, idx.to(machine.device))  # (k,) each
    model.train()
    return (on_current > 0.97).sum().item(), (moved < 0.05).sum().item()


def check_finite(step: int, loss: float, model: Backpack, optimizers: list) -> None:
    """FloatingPointError if a loss, a weight or a moment is not finite: it must not be saved."""
    if not math.isfinite(loss):
        raise FloatingPointError(f'step {step}: the loss is {loss}')
    tensors = list(model.parameters())
    for optimizer in optimizers:
        for moments in optimizer.state.values():
            tensors.extend(moments.values())
    if not torch.stack([tensor.isfinite().all() for tensor in tensors]).all():
        raise FloatingPointError(f'step {step}: a weight or a moment is not finite')


def describe(model: Backpack, data: TokenDataset, s: Settings, machine: Machine) -> str:
    """What a run trains, where, and for how long, in two lines."""
    kind = 'Transformer'
    if model.config.n_sense:
        kind = f'Backpack of {model.config.n_sense} senses'
    millions = model.n_params()['total'] / 1e6
    epochs = s.max_iters * s.tokens_per_step / (data.n * s.block_size)
    return (f'{kind}, {millions:.1f}M parameters, on {machine.world} x {machine.name} '
            f'in {s.dtype} ({machine.why})\n'
            f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.3f} epochs of '
            f'data/{s.dataset}; log and checkpoints in {s.out_dir}')


def log_line(step: int, seconds: float, row: dict, s: Settings) -> str:
    """What a row of the log says on the terminal, with the time spent and left."""
    speed = row['tokens_per_second']
    left = (s.max_iters - step) * s.tokens_per_step / max(1, speed)
    parts = [
        f'step {step}: loss {row["loss"]:.4f}', f'lr {row["learning_rate"]:.2e}',
        f'grad norm {row["grad_norm"]:.2f}',
        f'{step * s.tokens_per_step:,} tokens in {timedelta(seconds=int(seconds))}',
        f'{speed:,} tokens/s']
    if row['mfu'] is not None:
        parts.append(f'MFU {row["mfu"]:.1%}')
    return ', '.join(parts) + f', {timedelta(seconds=int(left))} left'


def how_to_go_on(s: Settings, saved: int | None, error: Exception) -> str:
    """What is left of a run that had to stop, whose last checkpoint is of the step saved."""
    if saved is None:
        return 'nothing was saved'
    how = '--init_from=resume'
    if isinstance(error, FloatingPointError):  # a resumed run would come to the same end
        how = f'--init_from={s.path} --out_dir=NEW --learning_rate=LOWER'
    return f'the last good state is {s.path}, of step {saved}; go on by {how}'


# -----------------------------------------------------------------------------
# Training.


def train(s: Settings, given: frozenset[str] = frozenset()) -> int:
    """Train; returns the exit code, 1 if the run stopped itself. given: settings set explicitly."""
    # The data, and the checkpoint to resume.
    folder = Path('data') / s.dataset
    state = ckpt.read_state(s.path) if s.init_from == 'resume' else {}
    meta = read_meta(folder)
    train_data = TokenDataset(folder, 'train', meta, s.block_size)
    val_data = TokenDataset(folder, 'val', meta, s.block_size)
    data_facts = str([meta['tokens'], meta.get('sha256')])

    # The device and its number format; a resumed run keeps the format it began with.
    if state and s.dtype == 'auto':
        s = replace(s, dtype=state['settings'].get('dtype', 'auto'))
    machine = find_machine(s.device, s.dtype)
    s = replace(s, dtype=machine.dtype)

    # The model: from scratch, from the checkpoint to resume, or from given weights.
    resumed = ''
    if s.init_from != 'resume' and not s.overwrite:
        refuse_to_replace(s.path)
    if s.init_from == 'scratch':
        model = random_model(s, meta)
    elif s.init_from == 'resume':
        weights = ckpt.from_checkpoint(state, s.path)
        s = with_shape_of(weights.config, s.path, s, given)
        model = model_for(s, weights, s.path, meta)
        resumed = check_unchanged(s, state, data_facts)
    else:
        weights = from_pretrained(s.init_from)
        if 'dropout' in given:
            weights.config.dropout = s.dropout
        s = with_shape_of(weights.config, s.init_from, s, given)
        model = model_for(s, weights, s.init_from, meta)
    model.to(machine.device, torch.float64 if s.dtype == 'float64' else torch.float32).train()

    # The optimizers, with their moments where a run is resumed.
    optimizers = model.optimizers(
        s.optimizer, s.learning_rate, s.weight_decay, (s.beta1, s.beta2),
        decay_embeddings=s.decay_embeddings, muon_lr=s.muon_lr)
    if state:
        model.load_state_dict(state['model'])  # again: the first time was in float32
        ckpt.load_optimizers(optimizers, state['optimizers'], s.path)

    # Compiled, the model is one graph; DDP around it averages the gradients of all processes.
    compiled = DistinctIds(model)
    if s.compile:
        compiled = machine.compile(compiled)
    parallel = compiled
    if machine.world > 1:
        machine.check_same(
            f'{state.get("step")} {state.get("log")} {data_facts}',
            otherwise=f'the processes see different files in {s.out_dir} or {folder}: share them')
        parallel = DistributedDataParallel(compiled, [machine.device] * machine.on_gpu or None)

    # What is about to happen.
    out = RunFolder(s, state, machine.rank)
    machine.print0(describe(model, train_data, s, machine))
    if resumed:
        machine.print0(resumed)
    idx, _ = train_data(texts_of_step(s.seed, 0, s.batch_size, train_data.n))
    flops = flops_per_token(model, distinct=len(idx.unique()) / idx.numel())

    facts = {'model_config': asdict(model.config), 'tokenizer': model.tokenizer,
             'settings': asdict(s)}  # stored in every checkpoint alongside the weights
    iter_num = state.get('step', 0)
    saved = state.get('step')  # the step of the last checkpoint
    best_val_loss = state.get('best_val_loss', math.inf)
    run_start = time.perf_counter() - state.get('seconds', 0.0)
    interval_start = time.perf_counter()  # of the steps since the last log line
    interval_step = iter_num
    try:
        while True:
            # Evaluate and save a checkpoint: at the start, every eval_interval steps, at the end.
            is_last = iter_num == s.max_iters
            if (iter_num % s.eval_interval == 0 or is_last) and iter_num != saved:
                pause_start = time.perf_counter()
                row = {'val_loss': evaluate(compiled, val_data, s, machine)}
                check_finite(iter_num, row['val_loss'], model, optimizers)
                machine.print0(f'step {iter_num}: validation loss {row["val_loss"]:.4f}')
                if model.config.n_sense:
                    on_current, by_position = stuck_senses(model, val_data, machine)
                    row['senses_on_current_token'] = on_current
                    row['senses_by_position'] = by_position
                    machine.print0(f'stuck senses: {on_current} give over 0.97 of their weight to '
                                   f'the current token, {by_position} follow position alone')
                seconds = time.perf_counter() - run_start
                out.log(iter_num, seconds, row)
                is_best = row['val_loss'] < best_val_loss
                best_val_loss = min(best_val_loss, row['val_loss'])
                if machine.rank == 0:
                    ckpt.save_checkpoint(s.path, facts | {
                        'step': iter_num, 'model': model.state_dict(),
                        'optimizers': {type(o).__name__: o.state_dict() for o in optimizers},
                        'data': data_facts, 'seconds': seconds, 'log': out.log_text,
                        'val_loss': row['val_loss'], 'best_val_loss': best_val_loss}, is_best)
                saved = iter_num
                interval_start += time.perf_counter() - pause_start
            if is_last:
                break

            # The learning rate of this step.
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group['lr'] = learning_rate_at(iter_num, s, peak=optimizer.defaults['lr'])

            # Forward and backward through all micro-batches, then clip and update.
            loss = gradients(parallel, train_data, iter_num, s, machine)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            iter_num += 1
            if iter_num == 1:
                gigabytes = machine.peak_memory() / 1e9
                machine.print0(f'step 1 done on {machine.name}, peak memory {gigabytes:.2f} GB')

            # Permanent copies of the weights.
            if s.keep_every and iter_num % s.keep_every == 0:
                check_finite(iter_num, norm.item(), model, optimizers)
                if machine.rank == 0:
                    ckpt.save_checkpoint(s.path.with_stem(f'ckpt-{iter_num}'), facts | {
                        'step': iter_num, 'model': model.state_dict()})

            # A log line: the numbers of this step, and tokens a second since the line before.
            if iter_num % s.log_interval == 0 or iter_num == s.max_iters:
                loss = machine.over_all(loss) / machine.world  # waits for the device
                check_finite(iter_num, loss, model, optimizers)
                tokens = (iter_num - interval_step) * s.tokens_per_step
                speed = tokens / (time.perf_counter() - interval_start)
                rate = learning_rate_at(iter_num - 1, s, s.learning_rate)
                row = {'loss': loss, 'learning_rate': rate, 'grad_norm': norm.item(),
                       'tokens_per_second': round(speed), 'mfu': machine.mfu(speed * flops)}
                seconds = time.perf_counter() - run_start
                machine.print0(log_line(iter_num, seconds, row, s))
                out.log(iter_num, seconds, row)
                interval_start = time.perf_counter()
                interval_step = iter_num
        machine.print0(f'done: {s.path}')
        return 0
    except torch.OutOfMemoryError:
        raise UserError('out of memory; take a smaller --batch_size and more '
                        '--gradient_accumulation_steps')
    except (FloatingPointError, OSError) as error:
        machine.print0(f'train.py: stopped: {error}; {how_to_go_on(s, saved, error)}', sys.stderr)
        return 1
    finally:
        out.close()


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    settings, given = parse_args(argv)
    code = train(settings, given)
    if dist.is_initialized() and code != 1:  # after a failure the others may never arrive
        dist.barrier()  # no process leaves, and closes its connections, while another still writes
        gc.collect()  # DDP holds the process group: free it first, or destroying the group can hang
        dist.destroy_process_group()
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
