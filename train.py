"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (key = value lines), then from
--key=value. A run writes out/<run>/ckpt.pt (the latest state), best.pt (the lowest validation
loss) and log.csv. On a CPU, with one or two processes, a run that was killed and resumed ends with
the same weights as an uninterrupted one, bit for bit.
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

from rucksack.cli import UserError, reading, run_cli
from rucksack.data import TokenDataset, data_folder, read_meta, texts_of_step
from rucksack.fast import DistinctIds, distinct_ids
from rucksack.training import checkpoint as ckpt
from rucksack.training import report, start
from rucksack.training.gauge import stuck_senses
from rucksack.training.machine import Machine, find_machine, leave_processes
from rucksack.training.optimizers import make_optimizers
from rucksack.training.run import RunFolder, refuse_to_replace
from rucksack.training.settings import parse_settings, setting

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
    n_layer: int = setting(12, 'layers of the contextualizer (a loaded model keeps its own)')
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
    loaded_lr: float = setting(1.0, 'factor on the rates of weights taken from a Transformer')
    warmup_iters: int = setting(-1, 'steps of linear warmup (-1: 5%% of max_iters)', low=-1)
    min_lr: float = setting(0.0, 'learning rate at the end of the decay')
    weight_decay: float = setting(0.1, 'weight decay of matrices')
    decay_embeddings: bool = setting(True, 'apply weight decay to the embeddings too')
    beta1: float = setting(0.9, 'first beta of AdamW')
    beta2: float = setting(0.95, 'second beta of AdamW')
    grad_clip: float = setting(1.0, 'clip gradients to this norm (0: never)')
    eval_interval: int = setting(1000, 'steps between evaluations; each saves a checkpoint', low=1)
    eval_iters: int = setting(100, 'validation batches per evaluation (always the same)', low=1)
    keep_every: int = setting(0, 'keep the weights every N steps, as ckpt-STEP.pt (0: never)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too (pip install wandb), in the '
                                     'project WANDB_PROJECT')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto (bfloat16 where it is fast), float32 or bfloat16',
                         choices=('auto', 'float32', 'bfloat16'))
    compile: bool = setting(True, 'use torch.compile, on CUDA and on CPUs with a C++ compiler')
    seed: int = setting(1337, 'random seed for weights, data order and dropout')

    @property
    def path(self) -> Path:
        """Return the path of the run's latest checkpoint."""
        return Path(self.out_dir) / 'ckpt.pt'

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of all micro-batches of all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


def parse_args(argv: list[str]) -> tuple[Settings, set[str]]:
    """Read all settings; also returns the names of those that were typed."""
    settings, flags, configs = parse_settings(Settings, argv)
    s = Settings(**settings)
    if not s.out_dir:
        s = replace(s, out_dir=start.out_dir_of(s.dataset, s.model, configs))
    return s, flags


# -----------------------------------------------------------------------------
# Learning rate.


def share_of_peak(step: int, s: Settings) -> float:
    """Compute a step's learning rate, as a share of its peak: linear warmup, then linear decay.

    min_lr is AdamW's last rate; Muon's is the same share of its own peak. Steps count from 0.
    """
    if step < s.warmup_iters:
        return (step + 1) / s.warmup_iters
    progress = (step - s.warmup_iters) / (s.max_iters - s.warmup_iters)
    floor = s.min_lr / s.learning_rate if s.learning_rate else 0.0
    return 1 + progress * (floor - 1)


# -----------------------------------------------------------------------------
# A step.


def loss_of(model: nn.Module, data: TokenDataset, texts: np.ndarray, machine: Machine) -> Tensor:
    """Compute the mean loss () of chosen texts; model is DistinctIds(model), or it in DDP."""
    idx, targets = data(texts)  # (B, T) each
    ids, places = distinct_ids(idx)  # (n,) and (B, T); the senses of an id are computed once
    idx, targets, ids, places = machine.to_device(idx, targets, ids, places)
    with machine.autocast():
        return model(idx, targets, ids, places)


def forward_backward(model: nn.Module, data: TokenDataset, step: int, s: Settings, machine: Machine
                     ) -> Tensor:
    """Add the gradients of a step's mean loss to the parameters.

    Returns the mean loss of this process's micro-batches. Processes take the micro-batches
    round-robin, and synchronise once, after their last one.
    """
    n = s.gradient_accumulation_steps
    texts = texts_of_step(s.seed, step, n * s.batch_size, data.n)
    micro_batches = texts.reshape(n, s.batch_size)
    own = range(machine.rank, n, machine.world)
    losses = []
    for i in own:
        torch.manual_seed(s.seed * 1_000_003 + step * n + i)  # dropout depends only on this seed
        if machine.world > 1:
            model.require_backward_grad_sync = i == own[-1]  # as with DDP's no_sync
        loss = loss_of(model, data, micro_batches[i], machine) / len(own)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


# -----------------------------------------------------------------------------
# Evaluation.


@torch.no_grad()
def evaluate(model: nn.Module, data: TokenDataset, s: Settings, machine: Machine) -> dict:
    """Make a row of the log: the mean loss in nats per token and, for a Backpack, its stuck senses.

    The texts are always the same, spread over the data.
    """
    texts = data.spread(s.eval_iters * s.batch_size)
    batches = np.split(texts, range(s.batch_size, len(texts), s.batch_size))
    total = 0.0
    model.eval()
    for batch in batches[machine.rank::machine.world]:
        loss = loss_of(model, data, batch, machine)
        total += loss.item() * len(batch)
    total = machine.sum_over_processes(torch.tensor(total, dtype=torch.float64))
    row = {'val_loss': total / len(texts)}
    if s.model == 'backpack':
        idx, _ = data(data.spread(16))  # (16, block_size)
        with machine.autocast():
            row |= stuck_senses(model.model, idx.to(machine.device))
    model.train()
    return row


# -----------------------------------------------------------------------------
# The loop.


def train(s: Settings, flags: set[str]) -> int:
    """Train, with the result of parse_args; returns the exit code."""
    # The checkpoint to resume, or the weights to start from, and the data.
    state = {}
    if s.init_from == 'resume':
        state = ckpt.read_state(s.path)
        with reading(s.path, f'fine-tune its weights with --init_from={s.path}'):
            s = start.with_decided(s, flags, start.settings_of_run(state['settings'], flags))
    elif not s.overwrite:
        refuse_to_replace(s.path)
    folder = data_folder(s.dataset)
    meta = read_meta(folder)
    if s.init_from not in ('scratch', 'resume'):
        weights = start.load_weights(s.init_from, meta, s.dataset)
        decided = start.settings_of_weights(weights.config, s.block_size, flags)
        s = start.with_decided(s, flags, decided)
    train_data = TokenDataset(folder, 'train', meta, s.block_size)
    val_data = TokenDataset(folder, 'val', meta, s.block_size)
    data_facts = str([meta['tokens'], meta.get('sha256')])
    if state and state['data'] != data_facts:
        raise UserError(f'{folder} is not the data that {s.path} was trained on; restore it')

    # The device, its number format and, under torchrun, the other processes (with equal shares).
    machine = find_machine(s.device, s.dtype, s.gradient_accumulation_steps)
    machine.check_agreement(f'{state.get("log")} {data_facts}', f'{s.out_dir} and {folder}')
    warmup_iters = start.warmup_of(s.warmup_iters, s.max_iters, machine)
    s = replace(s, dtype=machine.dtype, warmup_iters=warmup_iters)

    # The model: from scratch, from the checkpoint to resume, or from given weights.
    torch.manual_seed(s.seed)
    config = start.config_of(asdict(s), meta['vocab_size'])
    if s.init_from == 'scratch':
        model = ckpt.make_model(config)
    elif s.init_from == 'resume':
        model = ckpt.from_checkpoint(state, s.path)
    else:
        model = start.start_from(weights, config)
    model.to(machine.device).train()

    # The optimizers. A resumed run restores their moments.
    optimizers = make_optimizers(
        model, s.optimizer, s.learning_rate, s.weight_decay, (s.beta1, s.beta2),
        decay_embeddings=s.decay_embeddings, muon_lr=s.muon_lr, loaded_lr=s.loaded_lr)
    if state:
        ckpt.load_optimizers(optimizers, state['optimizers'], s.path)

    # Compiled, the loss is one graph; DDP around it averages the gradients of all processes.
    loss_model = DistinctIds(model)
    if s.compile:
        loss_model = machine.compile(loss_model)
    ddp_model = machine.distribute(loss_model)

    # Lock the folder of the run, and restore its log. Print a summary of the run.
    facts = {'model_config': asdict(model.config), 'tokenizer': meta['tokenizer'],
             'settings': asdict(s), 'data': data_facts}  # stored in every checkpoint
    out = RunFolder(s.path, s.tokens_per_step, facts, state, machine.rank)
    machine.print0(report.describe(model, machine, state))
    epochs = s.max_iters * s.tokens_per_step / len(train_data.tokens)
    machine.print0(f'{s.max_iters:,} steps of {s.tokens_per_step:,} tokens: {epochs:.3f} epochs of '
                   f'data/{s.dataset}; log and checkpoints in {s.out_dir}')

    iter_num = state.get('step', 0)
    is_evaluated = math.isfinite(state.get('val_loss', math.inf))  # step iter_num has been
    advised = False
    machine.note_signals()  # Ctrl-C does not break off a step
    try:
        if s.wandb_log:
            out.start_wandb()
        interval_start = time.perf_counter()  # when the current logging interval began
        interval_step = iter_num
        while True:
            # After Ctrl-C or SIGTERM to any process: save without an evaluation, and leave.
            if machine.noted_signal():
                out.save(iter_num, model, optimizers)
                machine.print0(f'train.py: interrupted: {s.path} is saved at step {iter_num}; '
                               'continue with python train.py --init_from=resume '
                               f'--out_dir={s.out_dir}', sys.stderr)
                return 128 + machine.noted_signal()

            # Evaluate and save a checkpoint: at the start, every eval_interval steps, at the end.
            is_last = iter_num >= s.max_iters
            if (iter_num % s.eval_interval == 0 or is_last) and not is_evaluated:
                pause_start = time.perf_counter()
                row = evaluate(loss_model, val_data, s, machine)
                lines, advised = report.evaluation_lines(iter_num, row, s.warmup_iters, advised)
                machine.print0(lines)
                out.log(iter_num, row)
                out.save(iter_num, model, optimizers, row['val_loss'])
                interval_start += time.perf_counter() - pause_start
            if is_last:
                break

            # Set this step's learning rates: share * peak * the group's factor.
            share = share_of_peak(iter_num, s)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group['lr'] = share * optimizer.defaults['lr'] * group['factor']

            # Forward and backward through all micro-batches, then clip and update.
            loss = forward_backward(ddp_model, train_data, iter_num, s, machine)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            iter_num += 1
            is_evaluated = False

            # Permanent copies of the weights.
            if s.keep_every and iter_num % s.keep_every == 0:
                out.keep(iter_num, model)

            # A log line: the numbers of this step, and tokens per second since the last line,
            # evaluations excluded.
            if iter_num % s.log_interval == 0 or iter_num == s.max_iters:
                loss = machine.sum_over_processes(loss) / machine.world  # waits for the device
                tokens = (iter_num - interval_step) * s.tokens_per_step
                seconds = time.perf_counter() - interval_start
                row = {
                    'loss': loss,
                    'learning_rate': share * s.learning_rate,
                    'grad_norm': norm.item(),
                    'tokens_per_second': round(tokens / seconds)}
                if s.optimizer == 'muon':
                    row['muon_lr'] = share * s.muon_lr
                tokens_left = (s.max_iters - iter_num) * s.tokens_per_step
                machine.print0(report.log_line(iter_num, row, tokens_left))
                out.log(iter_num, row)
                interval_start = time.perf_counter()
                interval_step = iter_num
        machine.print0(f'done: {s.path}')
        return 0
    except (RuntimeError, FloatingPointError, OSError) as error:
        machine.print0(report.stopped(error, s.path, out.saved_step, machine.rank), sys.stderr)
        return 1
    finally:
        machine.forget_signals()
        out.close()


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    code = train(*parse_args(argv))
    leave_processes(code)
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
