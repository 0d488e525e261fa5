"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Flags override config files, which override the defaults below. A run writes ckpt.pt (latest state),
best.pt (lowest validation loss) and log.csv to its folder in out/. --init_from=resume continues it
with its settings; it may change max_iters, eval_interval, log_interval, device, compile and
wandb_log. On a CPU with one or two processes, a run that was killed and resumed ends with the same
bits as one that was not. Elsewhere, sums may be rounded differently.

Start reading at "The loop" in train(), then read train() from its top.
To this script a Backpack is a module that returns a loss; rucksack.model, which is ./model.py, says
what it computes.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rucksack.checkpoint import from_checkpoint, make_model
from rucksack.cli import discard_output, noted_signals, run_cli
from rucksack.data import check_ids, data_folder, data_id, read_chunks, read_meta
from rucksack.device import all_reduce, can_compile, find_processes, set_up_device, to_device
from rucksack.errors import UserError
from rucksack.model import GPT, Backpack
from rucksack.optimizers import make_optimizers, set_learning_rates
from rucksack.run import RunFolder, config_for, start_run
from rucksack.training import DistinctIds, distinct_ids, stuck_senses


@dataclass(frozen=True)
class Settings:
    """The settings of a run, and their defaults."""

    out_dir: str = ''  # folder for the run (empty: out/NAME, after the config or dataset)
    init_from: str = 'scratch'  # scratch, resume, or a model: file, folder or Hub name
    overwrite: bool = False  # replace the run in out_dir
    dataset: str = 'openwebtext'  # folder in data/ written by prepare.py
    model: Literal['backpack', 'gpt'] = 'backpack'  # gpt is the baseline Transformer
    n_layer: int = 12  # layers (a loaded model keeps its own sizes)
    n_head: int = 12  # attention heads
    n_embd: int = 768  # embedding width
    n_sense: int = 16  # senses per token
    sense_hidden: int = 0  # hidden size of the sense MLPs (0: 4 * n_embd)
    block_size: int = 512  # context length, no longer than a loaded model's
    dropout: float = 0.0  # dropout in the contextualizer (the Transformer)
    batch_size: int = 32  # chunks of text per micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step, over all processes
    max_iters: int = 100_000  # optimizer steps
    optimizer: Literal['adamw', 'muon'] = 'muon'  # muon (hidden matrices; AdamW for the rest)
    learning_rate: float = 6e-4  # peak learning rate of AdamW
    muon_lr: float = 3e-3  # peak learning rate of Muon
    loaded_lr: float = 1.0  # factor for learning rates of embeddings and contextualizer
    warmup_iters: int = -1  # steps of linear warmup (-1: 5% of max_iters)
    min_lr: float = 0.0  # final learning rate of AdamW; Muon decays by the same factor
    weight_decay: float = 0.1  # weight decay for matrices
    decay_embeddings: bool = True  # apply weight decay to the embeddings too
    beta1: float = 0.9  # first beta of AdamW
    beta2: float = 0.95  # second beta of AdamW
    grad_clip: float = 1.0  # clip gradients to this norm (0: never)
    eval_interval: int = 1000  # steps between evaluations; each saves a checkpoint
    eval_iters: int = 100  # validation batches per evaluation, the same each time
    log_interval: int = 10  # steps between log lines
    wandb_log: bool = False  # also log to Weights & Biases, project $WANDB_PROJECT
    device: str = 'auto'  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 where it is fast
    compile: bool = True  # use torch.compile (CUDA, or a CPU with a C++ compiler)
    seed: int = 1337  # random seed for parameters, data order and dropout

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of a step, over all processes."""
        return self.batch_size * self.gradient_accumulation_steps * self.block_size


def train(s: Settings, checkpoint: dict, given: Backpack | GPT | None) -> int:
    """Resume checkpoint or, if it is {}, start from given or from scratch; return the exit code."""
    # ---- Processes. torchrun starts one per GPU. Only the first prints and writes files.
    rank, local_rank, world = find_processes()  # local_rank: the rank on this machine
    if rank > 0:
        discard_output()
    n_micro = s.gradient_accumulation_steps
    if n_micro % world:
        raise UserError(f'{world} processes cannot share gradient_accumulation_steps={n_micro}; '
                        f'choose a multiple of {world}')

    # ---- The device and its number format. The model multiplies matrices in dtype. Parameters and
    # the optimizers' averages stay in float32, because bfloat16 would round away small updates.
    # On a CPU, torch is also made deterministic, until run() (below) ends.
    device, dtype = set_up_device(s.device, s.dtype, local_rank)  # resolves auto
    s = replace(s, dtype=dtype)
    device_type = torch.device(device).type
    autocast = torch.autocast(device_type, torch.bfloat16, enabled=dtype == 'bfloat16')
    if world > 1:  # gloo too, because some sums below are of CPU tensors
        dist.init_process_group('cpu:gloo,cuda:nccl' if device_type == 'cuda' else 'gloo')

    # ---- The data: two memory-mapped files of token ids, cut into chunks of block_size. Row c of
    # data[name] is ids[c * block_size : (c + 1) * block_size + 1].
    folder = data_folder(s.dataset)
    meta = read_meta(folder)
    data = {name: read_chunks(folder / f'{name}.bin', meta, s.block_size)
            for name in ('train', 'val')}  # each (n_chunks, block_size + 1)

    def read(name: str, chunks: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read B chunks by their indices: idx and targets, both (B, block_size)."""
        ids = data[name][chunks].astype(np.int64)  # uint16 on disk
        check_ids(ids, meta, folder / f'{name}.bin')
        ids = torch.from_numpy(ids)
        return ids[:, :-1], ids[:, 1:]  # the target at each position is the next id

    # ---- The model.
    torch.manual_seed(s.seed)
    if checkpoint:  # resume: the parameters of the run so far
        model = from_checkpoint(checkpoint)
    elif given is not None:  # fine-tune; with --model=backpack, a GPT gets new senses
        from rucksack.start import fine_tune  # which other runs do not need
        model = fine_tune(given, config_for(s, meta))
    else:  # scratch: random parameters
        model = make_model(config_for(s, meta))
    model.to(device).train()

    # ---- Optimizers: AdamW and, for hidden matrices, Muon. Muon averages a matrix's gradients
    # (momentum). It steps along this average with all singular values moved near 1
    # (orthogonalized), so that every direction of a matrix learns at the same rate.
    optimizers = make_optimizers(model, s)
    if checkpoint:
        for optimizer in optimizers:
            optimizer.load_state_dict(checkpoint['optimizers'][type(optimizer).__name__])

    # ---- The model's training form. DistinctIds(model) returns the same loss as
    # model(idx, targets), but computes what depends on a token alone (the senses) once for each
    # distinct id in the batch.
    loss_model = DistinctIds(model)
    is_compiled = s.compile and can_compile(device)
    if is_compiled:
        loss_model = torch.compile(loss_model)
    if world > 1:  # DDP averages gradients over the processes
        loss_model = nn.parallel.DistributedDataParallel(loss_model)

    def loss_of(name: str, chunks: np.ndarray) -> Tensor:
        """Compute the mean loss of some chunks: a scalar, in nats per token."""
        idx, targets = read(name, chunks)
        ids, places = distinct_ids(idx)  # idx is ids[places]
        idx, targets, ids, places = to_device([idx, targets, ids, places], device)
        if is_compiled:
            torch._dynamo.mark_dynamic(ids, 0)  # one graph serves any number of ids
        with autocast:
            return loss_model(idx, targets, ids, places)

    # ---- Evaluation: the validation loss and, for a Backpack, how many senses are stuck (they no
    # longer learn), which the loss does not show. Some processes may read one batch more: without
    # gradients, and for models without buffers, DDP exchanges nothing.
    @torch.no_grad()
    def evaluate() -> dict:
        """Evaluate on validation data; returns a row for the log."""
        loss_model.eval()
        chunks = eval_chunks(s.eval_iters * s.batch_size, len(data['val']))
        batches = np.split(chunks, range(s.batch_size, len(chunks), s.batch_size))
        total = sum(
            loss_of('val', batch).item() * len(batch)
            for batch in batches[rank::world])
        row = {'val_loss': all_reduce(torch.tensor(total, dtype=torch.float64)) / len(chunks)}
        if model.config.n_sense:  # a Backpack
            idx, _ = read('val', eval_chunks(16, len(data['val'])))
            with autocast:
                row |= stuck_senses(model, idx.to(device))
        loss_model.train()
        return row

    # ---- The log and the checkpoints.
    out = RunFolder(s, checkpoint, rank)
    step = checkpoint.get('step', 0)
    saved_step = checkpoint.get('step')  # None: nothing is saved yet
    best_val_loss = checkpoint.get('best_val_loss', math.inf)
    checkpoint.clear()  # the model and the optimizers have copies: free the memory

    def save(name: str) -> None:
        """Write the state at this step to a file, which appears whole or not at all."""
        out.save(name, {
            'step': step,
            'model': model.state_dict(),
            'model_config': asdict(model.config),
            'optimizers': {type(o).__name__: o.state_dict() for o in optimizers},
            'best_val_loss': best_val_loss,
            'settings': asdict(s),
            'tokenizer': meta['tokenizer'],
            'data': data_id(meta),
            'wandb_id': out.wandb_id})

    # ---- The loop. A first Ctrl-C or SIGTERM finishes the step and saves; a second stops at once.
    n_params = sum(p.numel() for p in model.parameters())
    epochs = s.max_iters * s.tokens_per_step / meta['tokens']['train']
    print(f'{type(model).__name__}, {n_params / 1e6:.1f}M parameters, on {world} x {device} in '
          f'{s.dtype}\n{s.max_iters:,} steps of {s.tokens_per_step:,} tokens, {epochs:.3f} epochs '
          f'of {folder}; log and checkpoints in {s.out_dir}', flush=True)
    with noted_signals() as signals:
        while True:
            # Evaluate and save at step 0, every eval_interval steps and at the end, but not again
            # right after resuming. ckpt.pt comes last, so a run killed before that resumes from the
            # previous one.
            is_done = step >= s.max_iters
            if (step % s.eval_interval == 0 or is_done) and step != saved_step:
                row = evaluate()
                out.log(step, row)
                if row['val_loss'] < best_val_loss:
                    best_val_loss = row['val_loss']
                    save('best.pt')
                save('ckpt.pt')
                saved_step = step
            # A signal to any process stops them all. (0: no signal)
            stop = all_reduce(torch.tensor(max(signals)), dist.ReduceOp.MAX)
            if stop or is_done:
                break

            # Forward and backward. A batch too large for memory is split into micro-batches, whose
            # gradients add up in .grad. Each has the same number of tokens. Each process gets the
            # same number of micro-batches and averages over its own. So DDP's average over the
            # processes is the average over all tokens of the batch.
            chunks = chunks_of_step(step, s, len(data['train']))  # (n_micro, batch_size)
            own = range(rank, n_micro, world)
            loss = torch.zeros((), device=device)
            for i in own:
                # Dropout is seeded by step and micro-batch. So a resumed run draws the same masks
                # without a saved random state, whatever the number of processes.
                torch.manual_seed(s.seed * 1_000_003 + step * n_micro + i)
                if world > 1:  # .grad sums up all micro-batches: exchange it once, after the last
                    loss_model.require_backward_grad_sync = (i == own[-1])
                micro_loss = loss_of('train', chunks[i]) / len(own)
                micro_loss.backward()
                loss += micro_loss.detach()

            # Clip the gradients and update the parameters.
            scale = lr_scale(step, s)
            set_learning_rates(optimizers, scale)
            longest = s.grad_clip or math.inf  # infinity: only measure the norm
            norm = nn.utils.clip_grad_norm_(model.parameters(), longest)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1  # log and checkpoints count finished steps

            if step % s.log_interval == 0 or step == s.max_iters:
                row = {
                    'loss': all_reduce(loss) / world,  # waits for the device
                    'learning_rate': scale * s.learning_rate,
                    'grad_norm': norm.item()}
                if s.optimizer == 'muon':
                    row['muon_lr'] = scale * s.muon_lr
                out.log(step, row)
        if step != saved_step:  # stopped between evaluations
            save('ckpt.pt')
    if stop and not is_done:
        print(f'stopped at step {step}; continue with --init_from=resume --out_dir={s.out_dir}')
        return 128 + stop  # as a shell reports a signal
    print(f'done: {s.out_dir}/ckpt.pt')
    return 0


# -----------------------------------------------------------------------------
# What depends only on settings and step: which chunks are read, and the learning rate.


def chunks_of_step(step: int, s: Settings, n_chunks: int) -> np.ndarray:
    """Return the indices of the chunks that a step reads: (micro-batches, batch_size).

    Each epoch reads each chunk once, in its own order. Nothing depends on what was read
    before or on the number of processes, so a run can be resumed with exactly the same data.
    """
    per_step = s.gradient_accumulation_steps * s.batch_size
    positions = range(step * per_step, (step + 1) * per_step)  # in all epochs laid end to end
    chunks = [
        epoch_order(s.seed, i // n_chunks, n_chunks)[i % n_chunks]
        for i in positions]
    return np.array(chunks).reshape(-1, s.batch_size)


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, n_chunks: int) -> np.ndarray:
    """Shuffle the indices of all chunks for one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n_chunks)


def eval_chunks(n: int, n_chunks: int) -> np.ndarray:
    """Choose at most n chunks to evaluate on: evenly spaced, the same ones each time."""
    n = min(n, n_chunks)
    return np.arange(n) * n_chunks // n


def lr_scale(step: int, s: Settings) -> float:
    """Compute the learning rate of a step as a share of the peak: linear up, then linear down."""
    if step < s.warmup_iters:
        return (step + 1) / s.warmup_iters
    final = s.min_lr / s.learning_rate if s.learning_rate else 0.0  # the fraction at max_iters
    progress = (step - s.warmup_iters) / (s.max_iters - s.warmup_iters)  # 0 to almost 1
    return 1 + progress * (final - 1)


def run(argv: list[str]) -> int:
    """Read the settings, lock the run's folder, and train. Returns the exit code."""
    with start_run(Settings, argv) as (s, checkpoint, given):
        if s.warmup_iters < 0:  # -1: the default, 5% of the steps
            s = replace(s, warmup_iters=round(0.05 * s.max_iters))
        return train(s, checkpoint, given)


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main()
