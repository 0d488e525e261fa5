"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files, then from --key=value. A run writes
ckpt.pt (the latest state), best.pt (the lowest validation loss) and log.csv to its folder in out/.
On a CPU with one or two processes, a run killed and resumed ends as if uninterrupted, bit for bit.
"""

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from rucksack.cli import run_cli
from rucksack.data import TokenDataset, data_folder, facts_of, read_meta, texts_of_step
from rucksack.errors import user_errors
from rucksack.fast import DistinctIds, distinct_ids
from rucksack.model import GPT, Backpack, Config
from rucksack.training import report
from rucksack.training.machine import Machine, configure_machine, leave_processes
from rucksack.training.optimizers import make_optimizers, set_rates
from rucksack.training.run_folder import RunFolder, check_loss, locked, refuse_to_replace
from rucksack.training.settings import parse_settings, setting, with_decided
from rucksack.training.start import find_start, out_dir_of, warmup_of
from rucksack.training.stuck import stuck_senses

# -----------------------------------------------------------------------------
# Settings.


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    out_dir: str = setting('', 'folder for the run (empty: out/NAME, or out/NAME_gpt for a gpt)')
    init_from: str = setting('scratch', 'scratch, resume, or a checkpoint, folder or Hub name')
    overwrite: bool = setting(False, 'replace the run in out_dir once this one has saved')
    dataset: str = setting('openwebtext', 'folder in data/ written by prepare.py')
    model: str = setting('backpack', 'backpack, or gpt, its baseline', choices=('backpack', 'gpt'))
    n_layer: int = setting(12, 'layers (a loaded model keeps its own sizes)', high=10_000)
    n_head: int = setting(12, 'attention heads')
    n_embd: int = setting(768, 'width d')
    n_sense: int = setting(16, 'senses per token, k', low=1)
    sense_hidden: int = setting(0, 'hidden size of the sense MLPs (0: 4 * n_embd)')
    block_size: int = setting(512, "context length in tokens (at most a loaded model's)", low=2)
    dropout: float = setting(0.0, 'dropout in the contextualizer')
    batch_size: int = setting(32, 'sequences per micro-batch', low=1)
    gradient_accumulation_steps: int = setting(1, 'micro-batches per step, of all processes', low=1)
    max_iters: int = setting(100_000, 'optimizer steps')
    optimizer: str = setting('muon', 'muon for matrices, or adamw', choices=('adamw', 'muon'))
    learning_rate: float = setting(6e-4, 'peak learning rate of AdamW')
    muon_lr: float = setting(3e-3, 'peak learning rate of Muon')
    loaded_lr: float = setting(1.0, 'factor on the rates of the contextualizer and embeddings')
    warmup_iters: int = setting(-1, 'steps of linear warmup (-1: 5%% of max_iters)', low=-1)
    min_lr: float = setting(0.0, 'learning rate that the decay reaches one step after the last')
    weight_decay: float = setting(0.1, 'weight decay of matrices')
    decay_embeddings: bool = setting(True, 'apply weight decay to the embeddings too')
    beta1: float = setting(0.9, 'first beta of AdamW', high=0.9999999)
    beta2: float = setting(0.95, 'second beta of AdamW', high=0.9999999)
    grad_clip: float = setting(1.0, 'clip gradients to this norm (0: never)')
    eval_interval: int = setting(1000, 'steps between checkpoints, which are evaluated', low=1)
    eval_iters: int = setting(100, 'validation batches per evaluation (always the same)', low=1)
    keep_every: int = setting(0, 'keep the weights every N steps, as ckpt-STEP.pt (0: never)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too, in the project WANDB_PROJECT')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto (bfloat16 where it is fast), float32 or bfloat16',
                         choices=('auto', 'float32', 'bfloat16'))
    compile: bool = setting(True, 'use torch.compile, on CUDA and on CPUs with a C++ compiler')
    seed: int = setting(1337, 'random seed for weights, data order and dropout')

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of all micro-batches of all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size

    def config(self, n_vocab: int) -> Config:
        """Make the config of a model for data with n_vocab ids; ValueError if sizes do not fit."""
        rows = math.ceil(n_vocab / 64) * 64  # GPUs like multiples of 64
        n_sense = 0 if self.model == 'gpt' else self.n_sense
        return Config(self.block_size, rows, n_vocab, self.n_layer, self.n_head, self.n_embd,
                      n_sense, self.sense_hidden, self.dropout)


def parse_args(argv: list[str]) -> tuple[Settings, set[str]]:
    """Read all settings; also returns the names of those that were typed."""
    s, typed, configs = parse_settings(Settings, argv)
    out_dir = s.out_dir or out_dir_of(s.dataset, s.model, configs)
    return replace(s, out_dir=out_dir), typed


# -----------------------------------------------------------------------------
# Learning rate.


def share_of_peak(step: int, s: Settings) -> float:
    """Compute a step's learning rate, as a share of its peak: linear warmup, then linear decay.

    Steps count from 0, so the decay would reach min_lr at step max_iters, one after the last.
    min_lr is a rate of AdamW; Muon's is the same share of its own peak.
    """
    if step < s.warmup_iters:
        return (step + 1) / s.warmup_iters
    progress = (step - s.warmup_iters) / (s.max_iters - s.warmup_iters)
    floor = s.min_lr / s.learning_rate if s.learning_rate else 0.0
    return 1 + progress * (floor - 1)


# -----------------------------------------------------------------------------
# A step, and an evaluation.


def loss_of(loss_model: nn.Module, data: TokenDataset, texts: np.ndarray, machine: Machine
            ) -> Tensor:
    """Compute the mean loss of texts, given by their numbers: a scalar, in nats per token."""
    idx, targets = data(texts)  # (B, T) each
    ids, places = distinct_ids(idx)  # (n,) and (B, T); the senses of an id are computed once
    idx, targets, ids, places = machine.to_device(idx, targets, ids, places)
    with machine.autocast():
        return loss_model(idx, targets, ids, places)


def forward_backward(loss_model: nn.Module, data: TokenDataset, step: int, s: Settings,
                     machine: Machine) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters.

    Returns the mean loss of this process's micro-batches. Processes take the micro-batches
    round-robin, and synchronise once, after their last one.
    """
    n = s.gradient_accumulation_steps
    micro_batches = texts_of_step(s.seed, step, n * s.batch_size, data.n).reshape(n, -1)
    own = range(machine.rank, n, machine.world)
    losses = []
    for i in own:
        torch.manual_seed(s.seed * 1_000_003 + step * n + i)  # dropout depends only on this seed
        if machine.world > 1:
            loss_model.require_backward_grad_sync = i == own[-1]  # as with DDP's no_sync
        loss = loss_of(loss_model, data, micro_batches[i], machine) / len(own)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(loss_model: nn.Module, data: TokenDataset, s: Settings, machine: Machine
             ) -> float | None:
    """Compute the mean loss in nats per token on texts spread over the data, always the same.

    None if a signal breaks it off. The model is in evaluation mode afterwards.
    """
    texts = data.spread(s.eval_iters * s.batch_size)
    batches = np.split(texts, range(s.batch_size, len(texts), s.batch_size))
    total = 0.0
    loss_model.eval()
    for i, batch in enumerate(batches):
        rank = i % machine.world  # of the process that takes this batch
        if rank == 0 and machine.noted_signal():  # to any process; all get the same answer
            return None
        if rank == machine.rank:
            total += loss_of(loss_model, data, batch, machine).item() * len(batch)
    return machine.sum_over_processes(torch.tensor(total, dtype=torch.float64)) / len(texts)


# -----------------------------------------------------------------------------
# A run.


@dataclass
class Trainer:
    """What the loop works with."""

    settings: Settings
    machine: Machine
    folder: RunFolder
    model: Backpack | GPT
    loss_model: nn.Module  # the model as it is trained: compiled, in DDP; returns the loss
    optimizers: list[Optimizer]
    train_data: TokenDataset
    val_data: TokenDataset
    last: tuple[int, float]  # step and time of the last log line or evaluation, for the speed

    def save_and_evaluate(self, step: int) -> None:
        """Save, then evaluate: a run that is broken off meanwhile resumes here.

        Step 0 is evaluated first: until a new run has saved, an older one in its folder stays.
        """
        if step > 0:
            self.folder.save(step)
        if step == self.folder.evaluated_step:  # before the run was resumed
            return
        loss = evaluate(self.loss_model, self.val_data, self.settings, self.machine)
        if loss is None:
            return
        row = {'tokens': step * self.settings.tokens_per_step, 'val_loss': loss}
        if isinstance(self.model, Backpack):
            row |= stuck_senses(self.model, self.val_data, self.machine)
        self.loss_model.train()
        self.machine.print0(report.evaluation_lines(step, row))
        self.folder.log_evaluation(step, row)
        self.last = step, time.perf_counter()

    def log_step(self, step: int, loss: Tensor, norm: Tensor, share: float) -> None:
        """Print and log the numbers of a step, and its tokens per second, evaluations excluded."""
        s = self.settings
        loss = self.machine.sum_over_processes(loss) / self.machine.world  # waits for the device
        check_loss(step, loss)
        last_step, last_time = self.last
        self.last = step, time.perf_counter()
        speed = (step - last_step) * s.tokens_per_step / (self.last[1] - last_time)
        row = {
            'tokens': step * s.tokens_per_step,
            'loss': loss,
            'learning_rate': share * s.learning_rate,
            'grad_norm': norm.item(),
            'tokens_per_second': round(speed)}
        if s.optimizer == 'muon':
            row['muon_lr'] = share * s.muon_lr
        self.machine.print0(report.log_line(step, row, (s.max_iters - step) * s.tokens_per_step))
        self.folder.log(step, row)


def set_up(s: Settings, typed: set[str]) -> Trainer:
    """Make what the loop works with. The folder of the run must be locked."""
    # What the run starts from decides some settings.
    begin = find_start(s.init_from, Path(s.out_dir), s.dataset, s.block_size, typed)
    s = with_decided(s, typed, begin.settings, begin.name)
    if s.init_from != 'resume' and not s.overwrite:
        refuse_to_replace(Path(s.out_dir))
    data = data_folder(s.dataset)
    meta = read_meta(data)
    train_data = TokenDataset(data, 'train', meta, s.block_size)
    val_data = TokenDataset(data, 'val', meta, s.block_size)

    # The device, its number format and, under torchrun, the other processes.
    machine = configure_machine(s.device, s.dtype, s.gradient_accumulation_steps)
    machine.check_agreement(f'{begin.state.get("log")} {facts_of(meta)}', f'{s.out_dir}, {data}')
    warmup_iters = warmup_of(s.warmup_iters, s.max_iters, machine)
    s = replace(s, dtype=machine.dtype, warmup_iters=warmup_iters)

    # The model and its optimizers. Compiled, the loss is one graph; DDP averages gradients.
    torch.manual_seed(s.seed)
    with user_errors('this model', problem='cannot be made'):
        model = begin.make(s.config(meta['vocab_size'])).to(machine.device).train()
    optimizers = make_optimizers(model, s)
    loss_model = machine.wrap(DistinctIds(model), s.compile)

    facts = {'model_config': asdict(model.config), 'tokenizer': meta['tokenizer'],
             'settings': asdict(s), 'data': facts_of(meta)}  # stored in every checkpoint
    folder = RunFolder(Path(s.out_dir), model, optimizers, facts, begin.state, machine.rank == 0)
    machine.print0(report.summary(model, machine, begin.state))
    machine.print0(report.plan(s.max_iters, s.tokens_per_step, train_data, s.out_dir))
    last = begin.state.get('step', 0), time.perf_counter()
    return Trainer(s, machine, folder, model, loss_model, optimizers, train_data, val_data, last)


def train(trainer: Trainer) -> int:
    """Train a model that is set up; returns the exit code."""
    s = trainer.settings
    machine = trainer.machine
    folder = trainer.folder
    step = folder.saved_step or 0
    machine.note_signals()  # Ctrl-C and SIGTERM do not break off a step
    try:
        while True:
            # Save and evaluate: at step 0, every eval_interval steps, and at the end.
            is_done = step >= s.max_iters
            if step % s.eval_interval == 0 or is_done:
                trainer.save_and_evaluate(step)
            signal = machine.noted_signal()
            if is_done or signal:
                break

            share = share_of_peak(step, s)
            set_rates(trainer.optimizers, share)

            # Forward and backward through all micro-batches; then clip and update.
            loss = forward_backward(trainer.loss_model, trainer.train_data, step, s, machine)
            norm = clip_grad_norm_(trainer.model.parameters(), s.grad_clip or math.inf)
            for optimizer in trainer.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1

            # Log the step, and keep a permanent copy of the parameters, if these are due.
            if step % s.log_interval == 0 or step == s.max_iters:
                trainer.log_step(step, loss, norm, share)
            if s.keep_every and step % s.keep_every == 0:
                folder.keep(step)

        if signal:
            if step > 0:
                folder.save(step)
            machine.print0(f'train.py: {folder.interrupted()}', sys.stderr)
            return 128 + signal
        machine.print0(f'done: {s.out_dir}/ckpt.pt')
        return 0
    except (RuntimeError, MemoryError) as error:
        raise report.explained(error, folder.what_is_saved())
    except (FloatingPointError, OSError) as error:
        machine.print0(f'train.py: stopped: {error}; {folder.what_is_saved()}', sys.stderr)
        return 1
    finally:
        machine.forget_signals()


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    s, typed = parse_args(argv)
    with locked(Path(s.out_dir)):  # before anyone looks into it
        code = train(set_up(s, typed))
    leave_processes(code)
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main()
