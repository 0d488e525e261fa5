"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (lines key = value), then from --key=value.
The run writes out/<run>/ckpt.pt (the latest state), previous.pt (the one before), best.pt (the lowest
validation loss) and log.csv. Kill it at any moment: resumed, on a CPU it ends in the same bits.
"""

import gc
import math
import os
import re
import shlex
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import DistinctIds
from rucksack import checkpoint as ckpt
from rucksack.common import UserError, lock_folder, run_cli
from rucksack.data import DATA_NAME, TokenDataset, inputs_of, read_meta, texts_of_step
from rucksack.machine import Machine, find_machine
from rucksack.settings import parse_settings, setting
from rucksack.start import changes, starting_model


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
    learning_rate: float = setting(6e-4, 'at its highest')
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
    again = [flag for flag in flags if not re.match('--(init_from|overwrite|allow_changes)=', flag)]
    local = os.environ.get('LOCAL_WORLD_SIZE')
    start = f'torchrun --nproc_per_node={local}' if local else 'python'
    s.given, s.command = frozenset(values), f'{start} train.py {shlex.join(configs + again)}'
    s.tokens_per_step = s.batch_size * s.gradient_accumulation_steps * s.block_size
    s.path = Path(s.out_dir) / 'ckpt.pt'
    return s


def learning_rate_at(step: int, s: Settings) -> float:
    """Linear warmup, then linear decay to min_lr; steps count from 0."""
    last = s.lr_decay_iters or s.max_iters
    if step < s.warmup_iters:
        return s.learning_rate * (step + 1) / s.warmup_iters
    share = min(1.0, (step - s.warmup_iters) / max(1, last - s.warmup_iters))
    return s.learning_rate + share * (s.min_lr - s.learning_rate)


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


class Run:
    """One training run: the model, the optimizer and the files of out_dir."""

    def __init__(self, s: Settings):
        folder = Path('data') / s.dataset
        state, meta = ckpt.read_state(s.path, s.command) if s.init_from == 'resume' else {}, read_meta(folder)
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
        self.flops_per_token = self.model.flops_per_token(len(first.unique()) / first.numel())
        self.model.to(machine.device, torch.float64 if machine.dtype == 'float64' else torch.float32).train()
        self.optimizer = self.model.adamw(s.learning_rate, s.weight_decay, (s.beta1, s.beta2),
                                          s.decay_embeddings)
        self.step, self.saved_step = state.get('step', 0), state.get('step')
        self.val_loss, self.best = state.get('val_loss'), state.get('best_val_loss', math.inf)
        self.began = time.perf_counter() - state.get('seconds', 0.0)
        if state:
            self.model.load_state_dict(state['model'])  # again, for float64, which it was not yet
            ckpt.load_optimizer(self.optimizer, state['optimizer'], s.path)
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
        for name in () if state else ckpt.CHECKPOINTS:
            (out / name).unlink(missing_ok=True)  # of a run that this one replaces
        if state and not (out / 'best.pt').exists():  # killed right before it had its name
            ckpt.add_name(s.path, 'best.pt')
        self.log, self.wandb = ckpt.Log(out / 'log.csv', state.get('log', '')), None
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
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate_at(self.step, s)
        loss = gradients(self.parallel, self.train_data, self.step, s, self.machine)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, norm

    def check(self, loss: float) -> None:
        """FloatingPointError if a loss, a weight or a moment is not finite: it must not be saved."""
        state = [*self.model.parameters(), *(moments[name] for moments in self.optimizer.state.values()
                                             for name in ('exp_avg', 'exp_avg_sq'))]
        if not math.isfinite(loss) or not torch.stack([t.isfinite().all() for t in state]).all():
            raise FloatingPointError(f'step {self.step}: the loss is {loss} and not all weights are finite')

    def record(self, **row) -> None:
        """A row for log.csv and, where it is wanted, for Weights & Biases."""
        if self.machine.rank == 0:
            row = {'step': self.step, 'tokens': self.step * self.settings.tokens_per_step,
                   'seconds': round(time.perf_counter() - self.began, 1)} | row
            self.log.write(**row)
            if self.wandb:
                self.wandb.log(row, step=self.step)

    def report(self, loss: float, norm: float, speed: float) -> None:
        """One log line: the numbers of the last step, and tokens a second since the line before."""
        s, m, rate = self.settings, self.machine, learning_rate_at(self.step - 1, self.settings)
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
        self.record(val_loss=self.val_loss)
        best, self.best = self.val_loss < self.best, min(self.val_loss, self.best)
        self.save(best)

    def save(self, best: bool) -> None:
        """Write the state as ckpt.pt, and as best.pt if it is the best."""
        if self.machine.rank == 0:
            ckpt.save_checkpoint(self.settings.path, {
                'model': self.model.state_dict(), 'model_config': asdict(self.model.config),
                'tokenizer': self.model.tokenizer, 'optimizer': self.optimizer.state_dict(),
                'settings': asdict(self.settings), 'step': self.step, 'val_loss': self.val_loss,
                'seconds': time.perf_counter() - self.began, 'best_val_loss': self.best, 'log': self.log.text,
                'data': self.data_facts}, best)
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
    resume = f'{s.command} --init_from=resume'
    try:
        run.train()
        run.machine.print0(f'done: {s.path}')
        return 0
    except torch.OutOfMemoryError:
        raise UserError('out of memory; take a smaller --batch_size and more --gradient_accumulation_steps')
    except (FloatingPointError, OSError) as error:
        lower = ' --allow_changes --learning_rate=LOWER' * isinstance(error, FloatingPointError)
        run.machine.print0(f'train.py: stopped: {error}; the last good state is {s.path}, of step '
                           f'{run.saved_step}; go on: {resume}{lower}', sys.stderr)
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
