"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Flags override config files, which override the defaults below. A run writes ckpt.pt (latest state),
best.pt (lowest validation loss) and log.csv to its folder in out/. On a CPU, with one or two
processes, killing and resuming a run changes no bit of it. train() has the whole run in order.
"""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rucksack import run_log, start
from rucksack.cli import complain, discard_output, forget_signals, note_signals, run_cli
from rucksack.data import check_ids, data_folder, data_id, read_bin, read_meta
from rucksack.device import bfloat16_unit, can_compile, find_device, to_device, tune
from rucksack.errors import UserError, user_errors
from rucksack.fast import DistinctIds, distinct_ids
from rucksack.files import locked_folder, save_tensors
from rucksack.model import GPT, Backpack
from rucksack.optimizers import all_finite, make_optimizers, restore, set_rates
from rucksack.processes import find_processes, leave_processes
from rucksack.settings import parse_settings, setting
from rucksack.stuck import stuck_senses
from rucksack.weights import from_checkpoint, make_model

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
    gradient_accumulation_steps: int = setting(1, 'micro-batches per step, in all', low=1)
    max_iters: int = setting(100_000, 'optimizer steps')
    optimizer: str = setting('muon', 'muon for matrices, or adamw', choices=('adamw', 'muon'))
    learning_rate: float = setting(6e-4, 'peak learning rate of AdamW')
    muon_lr: float = setting(3e-3, 'peak learning rate of Muon')
    loaded_lr: float = setting(1.0, 'learning-rate multiplier for contextualizer and embeddings')
    warmup_iters: int = setting(-1, 'steps of linear warmup (-1: 5% of max_iters)', low=-1)
    min_lr: float = setting(0.0, 'final learning rate')
    weight_decay: float = setting(0.1, 'weight decay for matrices')
    decay_embeddings: bool = setting(True, 'apply weight decay to the embeddings too')
    beta1: float = setting(0.9, 'first beta of AdamW', high=0.9999999)
    beta2: float = setting(0.95, 'second beta of AdamW', high=0.9999999)
    grad_clip: float = setting(1.0, 'clip gradients to this norm (0: never)')
    eval_interval: int = setting(1000, 'steps between evaluations, each with a checkpoint', low=1)
    eval_iters: int = setting(100, 'validation batches per evaluation (always the same)', low=1)
    keep_every: int = setting(0, 'keep a checkpoint every N steps, as ckpt-STEP.pt (0: never)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too, in the project WANDB_PROJECT')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto: bfloat16 if fast', choices=('auto', 'float32', 'bfloat16'))
    compile: bool = setting(True, 'use torch.compile, on CUDA and on CPUs with a C++ compiler')
    seed: int = setting(1337, 'random seed for parameters, data order and dropout')

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of all micro-batches of all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


# -----------------------------------------------------------------------------
# What depends on the number of the step alone: its learning rate and its data.


def lr_scale(step: int, s: Settings) -> float:
    """Compute a step's learning rate as a fraction of the peak: linear warmup, then linear decay.

    Steps count from 0. min_lr is AdamW's; Muon ends at the same fraction of its own peak.
    """
    if step < s.warmup_iters:
        return (step + 1) / s.warmup_iters
    final = s.min_lr / s.learning_rate if s.learning_rate else 0.0
    progress = (step - s.warmup_iters) / (s.max_iters - s.warmup_iters)  # 0 to almost 1
    return 1 + progress * (final - 1)


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Shuffle the indices of n chunks for one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def chunks_of_step(step: int, s: Settings, n: int) -> np.ndarray:
    """Choose the chunks that a step reads from n: indices (micro-batches, batch_size).

    Each epoch reads each chunk once. Only the seed and the step decide, so resuming a run, or using
    more processes, changes nothing.
    """
    size = s.gradient_accumulation_steps * s.batch_size
    places = range(step * size, (step + 1) * size)  # counted over all epochs
    chunks = [epoch_order(s.seed, place // n, n)[place % n] for place in places]
    return np.array(chunks).reshape(-1, s.batch_size)


def spread(n: int, total: int) -> np.ndarray:
    """Choose n of total chunks to evaluate on: evenly spaced, always the same."""
    n = min(n, total)
    return np.arange(n) * total // n


# -----------------------------------------------------------------------------
# The run.


def train(s: Settings, checkpoint: dict, given: Backpack | GPT | None) -> int:
    """Train from a checkpoint (or {}), a given model (or None), or scratch; returns exit code."""
    # ---- The processes. torchrun starts one for each GPU; the first alone prints and writes files.
    rank, local_rank, world = find_processes()
    if rank > 0:
        discard_output()
    n_micro = s.gradient_accumulation_steps
    if n_micro % world:
        raise UserError(f'{world} processes cannot share gradient_accumulation_steps={n_micro}')

    # ---- The device and its number format. Matrix products are in dtype. Parameters, gradients and
    # moments stay in float32, because bfloat16 would round small updates away.
    device = find_device(s.device)
    if device == 'cuda':
        device = f'cuda:{local_rank}'
    if s.dtype == 'auto':
        s = replace(s, dtype='bfloat16' if bfloat16_unit(device) else 'float32')
    tune(device, s.dtype)
    kind = device.partition(':')[0]  # cpu, cuda or mps
    autocast = torch.autocast(kind, torch.bfloat16, enabled=s.dtype == 'bfloat16')
    if world > 1:
        dist.init_process_group('cpu:gloo,cuda:nccl' if kind == 'cuda' else 'gloo')

    def over_processes(x: Tensor, operation=dist.ReduceOp.SUM) -> float:
        """Add up a number over all processes, or apply another operation."""
        if world > 1:
            dist.all_reduce(x, operation)
        return x.item()

    # ---- The data: two files of token ids, mapped into memory, in chunks of block_size.
    out = Path(s.out_dir)
    folder = data_folder(s.dataset)
    meta = read_meta(folder)
    if checkpoint and checkpoint['data'] != data_id(meta):
        raise UserError(f'{folder} is not the data that {s.out_dir} was trained on; restore it')
    tokens = {name: read_bin(folder / f'{name}.bin', meta) for name in ('train', 'val')}  # (n,)
    n_chunks = {name: (len(ids) - 1) // s.block_size for name, ids in tokens.items()}
    if min(n_chunks.values()) == 0:
        raise UserError(f'{folder} has too few tokens for one text; choose a smaller --block_size')

    def read(name: str, chunks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read the chunks with these indices (B,): idx and targets, (B, T) each."""
        spans = chunks[:, None] * s.block_size + np.arange(s.block_size + 1)  # (B, T + 1)
        ids = tokens[name][spans].astype(np.int64)  # uint16 on the disk
        check_ids(ids, meta, folder / f'{name}.bin')
        ids = torch.from_numpy(ids)
        return ids[:, :-1], ids[:, 1:]  # the target at each position is the next id

    # ---- The model.
    torch.manual_seed(s.seed)
    if checkpoint:  # resume: the parameters of the run so far
        with user_errors(out / 'ckpt.pt'):
            model = from_checkpoint(checkpoint)
    elif given is not None:  # fine-tune: given parameters, with new senses for a GPT if asked
        model = start.start_from(given, start.config_for(s, meta))
    else:  # scratch: random parameters
        model = make_model(start.config_for(s, meta))
    model.to(device).train()

    # ---- Its optimizers, and the form that is trained. DistinctIds(model) returns the loss that
    # model(idx, targets) does, but computes the senses of each id only once a batch, which saves a
    # fifth of a step. DDP averages gradients over the processes.
    optimizers = make_optimizers(model, s)
    if checkpoint:
        with user_errors(out / 'ckpt.pt'):
            restore(optimizers, checkpoint['optimizers'])
    loss_model = DistinctIds(model)
    if s.compile and can_compile(device):
        loss_model = torch.compile(loss_model)
    if world > 1:
        loss_model = nn.parallel.DistributedDataParallel(loss_model)

    def loss_of(name: str, chunks: np.ndarray) -> Tensor:
        """Compute the mean loss of some chunks: a scalar, in nats per token."""
        idx, targets = read(name, chunks)
        batch = to_device([idx, targets, *distinct_ids(idx)], device)
        torch._dynamo.mark_dynamic(batch[2], 0)  # one compiled graph for any number of ids
        with autocast:
            return loss_model(*batch)

    # ---- Evaluation: the loss, and how many senses are stuck, which the loss does not show.
    @torch.no_grad()
    def evaluate() -> dict:
        """Evaluate the model on validation data: a row of the log."""
        loss_model.eval()
        chunks = spread(s.eval_iters * s.batch_size, n_chunks['val'])
        batches = np.split(chunks, range(s.batch_size, len(chunks), s.batch_size))
        sums = [loss_of('val', batch).item() * len(batch) for batch in batches[rank::world]]
        total = over_processes(torch.tensor(sum(sums), dtype=torch.float64))
        row = {'val_loss': total / len(chunks)}
        if model.config.n_sense:
            idx, _ = read('val', spread(16, n_chunks['val']))
            with autocast:
                row |= stuck_senses(model, idx.to(device))
        loss_model.train()
        return row

    # ---- The log and the checkpoints.
    step = checkpoint.get('step', 0)
    saved_step = checkpoint.get('step')
    best_val_loss = checkpoint.get('best_val_loss', math.inf)
    log = run_log.RunLog(s, checkpoint, rank)

    def save(name: str) -> None:
        """Write a checkpoint, which appears whole or not at all."""
        if not all_finite(model, optimizers):
            raise FloatingPointError(f'a parameter or a moment is not finite at step {step}')
        state = {
            'step': step,
            'model': model.state_dict(),
            'model_config': asdict(model.config),
            'optimizers': {type(o).__name__: o.state_dict() for o in optimizers},
            'best_val_loss': best_val_loss,
            'settings': asdict(s),
            'tokenizer': meta['tokenizer'],
            'data': data_id(meta),
            'wandb_id': log.wandb_id}
        if rank == 0:
            save_tensors(out / name, state)

    # ---- The loop. A first Ctrl-C or SIGTERM lets the step finish; a second one stops at once.
    print(run_log.summary(s, model, device, world, len(tokens['train'])), flush=True)
    signals = note_signals()
    try:
        while True:
            # Evaluate and save: at step 0, every eval_interval steps, and at the end. ckpt.pt comes
            # last, so a run killed before that resumes earlier and does all of this again.
            is_done = step >= s.max_iters
            if (step % s.eval_interval == 0 or is_done) and step != saved_step:
                row = evaluate()
                log.add(step, row)
                if row['val_loss'] <= best_val_loss:
                    best_val_loss = row['val_loss']
                    save('best.pt')
                save('ckpt.pt')
                if saved_step is None and rank == 0:
                    start.remove_kept(out)  # of an older run, with --overwrite
                saved_step = step
                log.start_clock(step)
            stop = over_processes(torch.tensor(max(signals)), dist.ReduceOp.MAX)  # the same in all
            if stop or is_done:
                break

            # Forward and backward. A batch too large for memory comes in micro-batches, whose
            # gradients add up. Processes take micro-batches in turn. Each process computes the mean
            # over its own, and DDP the mean over processes: together, the mean over the batch.
            chunks = chunks_of_step(step, s, n_chunks['train'])  # (n_micro, batch_size)
            own = range(rank, n_micro, world)
            loss = torch.zeros((), device=device)
            for i in own:
                # Dropout must not depend on which process takes a micro-batch.
                torch.manual_seed(s.seed * 1_000_003 + step * n_micro + i)
                # DDP exchanges gradients in backward(); once, after the last one, is enough.
                if world > 1:
                    loss_model.require_backward_grad_sync = i == own[-1]
                micro_loss = loss_of('train', chunks[i]) / len(own)
                micro_loss.backward()
                loss += micro_loss.detach()

            # Clip the gradients, and update the parameters.
            scale = lr_scale(step, s)
            set_rates(optimizers, scale)
            norm = nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1

            if step % s.log_interval == 0 or step == s.max_iters:
                row = {
                    'loss': over_processes(loss) / world,  # waits for the device
                    'learning_rate': scale * s.learning_rate,
                    'grad_norm': norm.item()}
                if s.optimizer == 'muon':
                    row['muon_lr'] = scale * s.muon_lr
                log.add(step, row)
            if s.keep_every and step % s.keep_every == 0:
                save(f'ckpt-{step}.pt')
        if step != saved_step:
            save('ckpt.pt')
    except (FloatingPointError, OSError) as error:  # a number is not finite, or the disk is full
        complain('train.py', f'{error}; {out}/ckpt.pt is from step {saved_step}')
        return 1
    finally:  # a notebook goes on
        forget_signals()
        torch.use_deterministic_algorithms(False)
    if stop:
        print(f'stopped at step {step}; continue with --init_from=resume --out_dir={out}')
        return 128 + stop
    print(f'done: {out}/ckpt.pt')
    return 0


def run(argv: list[str]) -> int:
    """Read the settings, lock the folder of the run, and train; returns the exit code."""
    s, typed, configs = parse_settings(Settings, argv)
    checkpoint = {}
    given = None
    if s.init_from not in ('scratch', 'resume'):
        given, s = start.load_given(s, typed)  # its sizes replace those of the settings
    if not s.out_dir:
        s = replace(s, out_dir=start.out_dir_of(s.dataset, s.model, configs))
    out = Path(s.out_dir)
    rank, _, _ = find_processes()
    with locked_folder(out) if rank == 0 else nullcontext():  # before anyone reads what is in it
        if s.init_from == 'resume':
            checkpoint, s = start.load_run(s, typed)  # its settings replace those of the configs
        elif not s.overwrite:
            start.refuse_to_replace(out)
        if s.warmup_iters < 0:
            s = replace(s, warmup_iters=round(0.05 * s.max_iters))
        code = train(s, checkpoint, given)
    leave_processes(code)
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main()
