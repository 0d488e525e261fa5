"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (lines key = value), then from --key=value.
The run writes out/<run>/ckpt.pt (the latest state), previous.pt (the one before), best.pt (the lowest
validation loss), log.csv, and ckpt-STEP.pt by --keep_every. Killed and resumed, it ends in the same bits.
"""

import gc
import math
import os
import re
import sys
import time
import zlib
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
from rucksack.common import UserError, lock_folder, run_cli
from rucksack.data import DATA_NAME, DistinctIds, TokenDataset, inputs_of, read_meta, texts_of_step
from rucksack.machine import Machine, find_machine, flops_per_token
from rucksack.published import from_pretrained
from rucksack.settings import parse_settings, setting
from senses import sense_gauge


@dataclass
class Settings:
    """Everything a run depends on."""

    out_dir: str = setting('', 'folder of the run (empty: out/<config>, with _gpt, or _<n_sense> if given)')
    init_from: str = setting('scratch', 'scratch, resume, or weights to fine-tune: file, folder or Hub name')
    overwrite: bool = setting(False, 'let scratch replace the checkpoint in out_dir')
    allow_changes: bool = setting(False, 'let resume go on with other settings or data than it began with')
    dataset: str = setting('openwebtext', 'folder in data/ that prepare.py made')
    model: str = setting('backpack', 'backpack or gpt, the baseline Transformer', of=('backpack', 'gpt'))
    n_layer: int = setting(12, 'layers of the contextualizer', low=1)
    n_head: int = setting(12, 'attention heads', low=1)
    n_embd: int = setting(768, 'width d', low=1)
    n_sense: int = setting(16, 'senses of a token, k', low=1)
    sense_hidden: int = setting(0, 'hidden size of the sense MLPs (0: 4 * n_embd)')
    block_size: int = setting(512, 'length of a training text, tokens', low=1)
    dropout: float = setting(0.0, 'in the contextualizer', below=1)
    batch_size: int = setting(32, 'texts in a micro-batch', low=1)
    gradient_accumulation_steps: int = setting(1, 'micro-batches in a step, over all processes', low=1)
    max_iters: int = setting(100_000, 'optimizer steps')
    optimizer: str = setting('adamw', 'adamw, or muon: Muon for matrices, AdamW for embeddings and the rest',
                             of=('adamw', 'muon'))
    learning_rate: float = setting(6e-4, 'peak learning rate of AdamW')
    muon_lr: float = setting(6e-3, 'peak learning rate of Muon')
    warmup_iters: int = setting(5000, 'steps of linear warmup')
    lr_decay_iters: int = setting(0, 'step at which the linear decay ends (0: max_iters)')
    min_lr: float = setting(0.0, 'where the decay ends')
    weight_decay: float = setting(0.1, 'on matrices')
    decay_embeddings: bool = setting(True, 'weight decay on word and position embeddings too')
    beta1: float = setting(0.9, 'AdamW', below=1)
    beta2: float = setting(0.95, 'AdamW', below=1)
    grad_clip: float = setting(1.0, 'largest gradient norm (0: no clipping)')
    eval_interval: int = setting(1000, 'steps between evaluations, each with a checkpoint', low=1)
    eval_iters: int = setting(100, 'batches of validation texts, the same every time', low=1)
    keep_every: int = setting(0, 'steps between weights that stay, as ckpt-STEP.pt (0: none)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too (pip install wandb)')
    wandb_project: str = setting('rucksack', 'project there')
    wandb_run_name: str = setting('', 'run there (empty: out_dir)')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto (bfloat16 where it is fast), float32, bfloat16 or float64',
                         of=('auto', 'float32', 'bfloat16', 'float64'))
    compile: bool = setting(True, 'torch.compile, on CUDA and on CPUs with a C++ compiler')
    seed: int = setting(1337, 'of the weights, the order of the data and the dropout')


def parse_args(argv: list[str]) -> Settings:
    """Settings from the command line: config files in order, then --key=value."""
    values, configs, flags = parse_settings(Settings, 'train.py', __doc__.splitlines()[0], argv)
    s = Settings(**values)
    if not s.out_dir:
        name = Path(configs[-1]).stem.removeprefix('train_') if configs else s.dataset
        k = f'_{s.n_sense}' * any(flag.startswith('--n_sense=') for flag in flags)
        s.out_dir = f'out/{name}_gpt' if s.model == 'gpt' else f'out/{name}{k}'
    if not re.fullmatch(DATA_NAME, s.dataset):
        raise UserError(f'dataset is {s.dataset!r}; it must be the name of a folder in data/')
    if s.gradient_accumulation_steps % (world := int(os.environ.get('WORLD_SIZE', 1))):
        raise UserError(f'gradient_accumulation_steps is {s.gradient_accumulation_steps}; it must be a '
                        f'multiple of {world}, the number of processes')
    s.given, s.path = frozenset(values), Path(s.out_dir) / 'ckpt.pt'
    s.tokens_per_step = s.batch_size * s.gradient_accumulation_steps * s.block_size
    return s


COLUMNS = ['step', 'tokens', 'seconds', 'loss', 'val_loss', 'senses_on_current_token', 'senses_by_position',
           'learning_rate', 'grad_norm', 'tokens_per_second', 'mfu']  # of log.csv
# What a resumed run may set anew: it changes results by rounding error at most. max_iters may grow, too.
FREE = ('out_dir', 'init_from', 'overwrite', 'allow_changes', 'eval_interval', 'keep_every', 'log_interval',
        'device', 'compile', 'wandb_log', 'wandb_project', 'wandb_run_name')
SHAPE = ('model', 'n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'dropout')  # what weights decide


def starting_model(s: Settings, meta: dict, state: dict) -> Backpack:
    """The model as a run starts with it; meta is that of its data, state the checkpoint it resumes, or {}."""
    if (there := ckpt.beside(s.path)) and not state and not s.overwrite:
        raise UserError(f'{there[0]} exists; go on with --init_from=resume, replace it with --overwrite, or '
                        'choose another --out_dir')
    if not state and s.init_from == 'scratch':
        return random_model(s, meta)
    source = s.path if state else s.init_from
    model = ckpt.from_checkpoint(state, source) if state else from_pretrained(source)
    dropout = s.dropout if 'dropout' in s.given and not state else model.config.dropout
    c = replace(model.config, dropout=dropout)
    for name in SHAPE:  # the settings then say what the weights are
        has, given = getattr(c, name, 'backpack' if c.n_sense else 'gpt'), getattr(s, name)
        given = given or 4 * c.n_embd if name == 'sense_hidden' else given
        if name in s.given and given != has and (c.n_sense or 'sense' not in name):
            raise UserError(f'{source} has {name} {has}, not {given}; leave it out, or train from scratch')
        setattr(s, name, has)
    if model.tokenizer not in (None, meta['tokenizer']) or c.n_vocab < meta['vocab_size']:
        raise UserError(f'{source} has another tokenizer than data/{s.dataset}; take other data')
    if c.block_size < s.block_size:
        raise UserError(f'{source} has block_size {c.block_size}; take that, or a smaller one')
    again = Backpack(c)  # with its dropout
    again.load_state_dict(model.state_dict())
    again.tokenizer = meta['tokenizer']
    return again


def random_model(s: Settings, meta: dict) -> Backpack:
    """A model of the settings' shape, before training; UserError where its numbers do not fit together."""
    torch.manual_seed(s.seed)
    try:
        model = Backpack(Config(  # with the vocabulary padded to a multiple of 64, which GPUs like
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64, n_vocab=meta['vocab_size'],
            block_size=s.block_size, n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, dropout=s.dropout,
            n_sense=s.n_sense if s.model == 'backpack' else 0, sense_hidden=s.sense_hidden))
    except ValueError as error:
        raise UserError(str(error))
    model.tokenizer = meta['tokenizer']
    return model


def changes(s: Settings, state: dict) -> str:
    """What the settings change in a resumed run; UserError unless max_iters alone, or allow_changes."""
    was = {f.name: state['settings'].get(f.name) for f in fields(s) if f.name not in FREE + SHAPE}
    changed = [name for name in was if was[name] != getattr(s, name)]
    text = ', '.join(f'{name} {was[name]}, now {getattr(s, name)}' for name in changed)
    if s.max_iters < state['step']:
        raise UserError(f'{s.path} is at step {state["step"]}; max_iters is {s.max_iters}, take as many')
    if changed and changed != ['max_iters'] and not s.allow_changes:
        raise UserError(f'{s.path} has {text}; resume with the same, or add --allow_changes')
    return text


def learning_rate_at(step: int, s: Settings, peak: float) -> float:
    """Linear warmup to the peak, then linear decay to min_lr; steps count from 0."""
    last = s.lr_decay_iters or s.max_iters
    if step < s.warmup_iters:
        return peak * (step + 1) / s.warmup_iters
    share = min(1.0, (step - s.warmup_iters) / max(1, last - s.warmup_iters))
    return peak + share * (s.min_lr - peak)


def gradients(model, data: TokenDataset, step: int, s: Settings, machine: Machine) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters; returns this process's share of the loss.
    Processes synchronise once, after their last micro-batch.
    """
    n = s.gradient_accumulation_steps
    micro = texts_of_step(s.seed, step, s.batch_size * n, data.n).reshape(n, s.batch_size)
    own, losses = range(machine.rank, n, machine.world), []
    for i in own:
        inputs = inputs_of(*data(micro[i]), machine.device)
        torch.manual_seed((s.seed << 32) + step * n + i)  # dropout depends on step and micro-batch alone
        with nullcontext() if i == own[-1] or machine.world == 1 else model.no_sync():
            with machine.autocast():
                loss = model(*inputs) / len(own)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, data: TokenDataset, s: Settings, machine: Machine) -> float:
    """Mean loss, nats per token, on the same texts every time, spread evenly over the bin; dropout off."""
    n = min(data.n, s.eval_iters * s.batch_size)
    total = torch.zeros((), device=machine.device, dtype=next(model.parameters()).dtype)
    batches = np.split(np.arange(n) * data.n // n, range(s.batch_size, n, s.batch_size))
    model.eval()
    for rows in batches[machine.rank::machine.world]:
        with machine.autocast():
            total += model(*inputs_of(*data(rows), machine.device)) * len(rows)
    model.train()
    return machine.over_all(total) / n


def stuck_senses(model: Backpack, data: TokenDataset, machine: Machine) -> tuple[int, int]:
    """How many senses have stopped reading the text, on 16 texts spread evenly over the bin: those that give
    over 0.97 of their weight to the current token, and those that follow position alone. The loss shows
    neither, and a stuck sense does not come back: its softmax is saturated and has no gradient.
    """
    n = min(data.n, 16)
    idx, _ = data(np.arange(n) * data.n // n)
    model.eval()
    with machine.autocast():
        on_current, moved = sense_gauge(model, idx.to(machine.device))  # (k,) each
    model.train()
    return (on_current > 0.97).sum().item(), (moved < 0.05).sum().item()


class Run:
    """One training run: the model, the optimizer and the files of out_dir."""

    def __init__(self, s: Settings):
        folder = Path('data') / s.dataset
        state, meta = ckpt.read_state(s.path) if s.init_from == 'resume' else {}, read_meta(folder)
        before = state['settings'].get('dtype', 'auto') if state else 'auto'
        machine = find_machine(s.device, before if s.dtype == 'auto' else s.dtype)
        self.settings, self.machine = s, machine
        self.model = starting_model(s, meta, state)
        s.dtype = machine.dtype  # as found, for a resumed run to compare
        self.changed = changes(s, state) if state else None
        self.data_facts = str([meta['tokens'], meta.get('sha256')])
        if state and state['data'] != self.data_facts and not s.allow_changes:
            raise UserError(f'{folder} is not what {s.path} was trained on; make it as it was, or add '
                            '--allow_changes')
        self.train_data, self.val_data = (TokenDataset(folder, name, meta, s.block_size)
                                          for name in ('train', 'val'))
        first = self.train_data(texts_of_step(s.seed, 0, s.batch_size, self.train_data.n))[0]
        self.flops_per_token = flops_per_token(self.model, len(first.unique()) / first.numel())
        self.model.to(machine.device, torch.float64 if machine.dtype == 'float64' else torch.float32).train()
        self.optimizers = self.model.optimizers(
            s.optimizer, s.learning_rate, s.weight_decay, (s.beta1, s.beta2),
            decay_embeddings=s.decay_embeddings, muon_lr=s.muon_lr)
        self.step, self.saved_step = state.get('step', 0), state.get('step')
        self.val_loss, self.best = state.get('val_loss'), state.get('best_val_loss', math.inf)
        self.began = time.perf_counter() - state.get('seconds', 0.0)
        if state:
            self.model.load_state_dict(state['model'])  # again, for float64, which it was not yet
            ckpt.load_optimizers(self.optimizers, state['optimizers'], s.path)
        self.compiled = machine.compile(DistinctIds(self.model)) if s.compile else DistinctIds(self.model)
        self.parallel = self.compiled
        if machine.world > 1:
            mark = zlib.crc32(f'{self.step} {state.get("log")} {self.data_facts}'.encode())
            if machine.over_all(torch.tensor(mark)) != machine.world * mark:
                raise UserError(f'the processes see different files in {s.out_dir} or {folder}: share them')
            self.parallel = DistributedDataParallel(self.compiled, [machine.device] * machine.on_gpu or None)
        if machine.rank == 0:
            self.open_files(state)

    def open_files(self, state: dict) -> None:
        """Lock out_dir, and open the logs."""
        s, out = self.settings, Path(self.settings.out_dir)
        out.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(out, f'another process trains in {out}; choose another --out_dir')
        old = [p for p in out.glob('*.pt') if re.fullmatch(r'(ckpt(-\d+)?|previous|best)\.pt', p.name)]
        for path in old if s.overwrite and not state else ():
            path.unlink()  # of a run that this one replaces
        if state and not (out / 'best.pt').exists():  # killed right before it had its name
            ckpt.add_name(s.path, 'best.pt')
        self.log_text = state.get('log') or ','.join(COLUMNS) + '\n'  # all, so that a resumed one has no gap
        self.log, self.wandb = open(out / 'log.csv', 'w', buffering=1), None  # 1: each line is there at once
        self.log.write(self.log_text)
        if s.wandb_log:
            import wandb
            self.wandb = wandb.init(project=s.wandb_project, name=s.wandb_run_name or None, config=asdict(s))

    def describe(self) -> None:
        """Print what is about to happen."""
        s, m, k = self.settings, self.machine, self.model.config.n_sense
        n = self.model.n_params()['total'] / 1e6
        m.print0((f'Backpack of {k} senses, ' if k else 'Transformer, ')
                 + f'{n:.1f}M parameters, on {m.world} x {m.name} in {m.dtype} ({m.why})')
        epochs = s.max_iters * s.tokens_per_step / (self.train_data.n * s.block_size)
        m.print0(f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.3f} epochs of '
                 f'data/{s.dataset}; log and checkpoints in {s.out_dir}')
        if self.changed is not None:
            m.print0(f'resumed from {s.path} after step {self.step}; changed: {self.changed or "nothing"}')

    def update(self) -> tuple[Tensor, Tensor]:
        """One optimizer step: this process's loss, and the gradient norm before clipping."""
        s = self.settings
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group['lr'] = learning_rate_at(self.step, s, peak=optimizer.defaults['lr'])
        loss = gradients(self.parallel, self.train_data, self.step, s, self.machine)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip or math.inf)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm

    def check(self, loss: float) -> None:
        """FloatingPointError if a loss, a weight or a moment is not finite: it must not be saved."""
        state = list(self.model.parameters())
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                state.extend(moments.values())
        if not math.isfinite(loss) or not torch.stack([t.isfinite().all() for t in state]).all():
            raise FloatingPointError(f'step {self.step}: the loss is {loss} and not all weights are finite')

    def record(self, **row) -> None:
        """A row for log.csv and, where it is wanted, for Weights & Biases."""
        if self.machine.rank == 0:
            row = {'step': self.step, 'tokens': self.step * self.settings.tokens_per_step,
                   'seconds': round(time.perf_counter() - self.began, 1)} | row
            cells = (row.get(name) for name in COLUMNS)
            line = ','.join('' if x is None else f'{x:.6g}' if type(x) is float else str(x) for x in cells)
            self.log_text += f'{line}\n'
            self.log.write(f'{line}\n')
            if self.wandb:
                self.wandb.log(row, step=self.step)

    def report(self, loss: float, norm: float, speed: float) -> None:
        """One log line: the numbers of the last step, and tokens a second since the line before."""
        s, m = self.settings, self.machine
        rate = learning_rate_at(self.step - 1, s, s.learning_rate)
        mfu = speed * self.flops_per_token / m.peak_flops if m.peak_flops else None
        spent, left = (timedelta(seconds=int(x)) for x in (
            time.perf_counter() - self.began, (s.max_iters - self.step) * s.tokens_per_step / speed))
        m.print0(f'step {self.step}: loss {loss:.4f}, lr {rate:.2e}, grad norm {norm:.2f}, '
                 f'{self.step * s.tokens_per_step:,} tokens in {spent}, {speed:,.0f} tokens/s'
                 + (f', MFU {mfu:.1%}' if mfu else '') + f', {left} left')
        self.record(loss=loss, learning_rate=rate, grad_norm=norm, tokens_per_second=round(speed), mfu=mfu)

    def evaluate_and_save(self) -> None:
        """Take and log the validation loss; write a checkpoint, best.pt too if that is the lowest so far."""
        self.val_loss = evaluate(self.compiled, self.val_data, self.settings, self.machine)
        self.check(self.val_loss)
        self.machine.print0(f'step {self.step}: validation loss {self.val_loss:.4f}')
        stuck = {}
        if self.model.config.n_sense:
            on_current, by_position = stuck_senses(self.model, self.val_data, self.machine)
            self.machine.print0(f'stuck senses: {on_current} give over 0.97 of their weight to the current '
                                f'token, {by_position} follow position alone')
            stuck = {'senses_on_current_token': on_current, 'senses_by_position': by_position}
        self.record(val_loss=self.val_loss, **stuck)
        best, self.best = self.val_loss < self.best, min(self.val_loss, self.best)
        self.save(best)

    def save(self, best: bool | None = None) -> None:
        """Write the state as ckpt.pt, and as best.pt if it is the best; without best the weights, to stay."""
        path, state = self.settings.path, {
            'model': self.model.state_dict(), 'model_config': asdict(self.model.config), 'step': self.step,
            'tokenizer': self.model.tokenizer, 'settings': asdict(self.settings)}
        if self.machine.rank == 0 and best is None:
            ckpt.save_checkpoint(path.with_stem(f'ckpt-{self.step}'), state)
        elif self.machine.rank == 0:
            ckpt.save_checkpoint(path, state | {
                'optimizers': {type(o).__name__: o.state_dict() for o in self.optimizers},
                'val_loss': self.val_loss, 'log': self.log_text,
                'best_val_loss': self.best, 'data': self.data_facts,
                'seconds': time.perf_counter() - self.began}, best)
            self.saved_step = self.step

    def train(self) -> None:
        """Steps until max_iters, an evaluation and a checkpoint at every eval_interval and at the end."""
        s, m = self.settings, self.machine
        if self.saved_step is None:
            self.evaluate_and_save()
        began, first = time.perf_counter(), self.step
        while self.step < s.max_iters:
            loss, norm = self.update()
            if self.step == 1:
                m.print0(f'step 1 done on {m.name}, peak memory {m.peak_memory() / 1e9:.2f} GB')
            if s.keep_every and self.step % s.keep_every == 0:
                self.check(norm.item())
                self.save()
            last = self.step == s.max_iters
            if last or self.step % s.log_interval == 0:
                self.check(loss := m.over_all(loss) / m.world)  # waits for the device
                steps, seconds = self.step - first, time.perf_counter() - began
                self.report(loss, norm.item(), steps * s.tokens_per_step / seconds)
                began, first = time.perf_counter(), self.step
            if last or self.step % s.eval_interval == 0:
                paused = time.perf_counter()
                self.evaluate_and_save()
                began += time.perf_counter() - paused


def train(s: Settings) -> int:
    """Train with these settings; returns the exit code: 1 where the run had to stop itself."""
    run = Run(s)
    run.describe()
    try:
        run.train()
        run.machine.print0(f'done: {s.path}')
        return 0
    except torch.OutOfMemoryError:
        raise UserError('out of memory; take a smaller --batch_size and more --gradient_accumulation_steps')
    except (FloatingPointError, OSError) as error:
        lower = ' --allow_changes --learning_rate=LOWER' * isinstance(error, FloatingPointError)
        kept = 'nothing was saved' if run.saved_step is None else (
            f'the last good state is {s.path}, of step {run.saved_step}; go on by --init_from=resume{lower}')
        run.machine.print0(f'train.py: stopped: {error}; {kept}', sys.stderr)
        return 1
    finally:
        if run.machine.rank == 0:
            os.close(run.lock)


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    code = train(parse_args(argv))
    if dist.is_initialized() and code != 1:  # a process that had to stop alone waits for no other
        dist.barrier()  # no process leaves, and closes its connections, while another still writes
        gc.collect()  # DDP holds the process group: free it first, or destroying the group can hang
        dist.destroy_process_group()
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
