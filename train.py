"""Train a Backpack or its baseline Transformer: on a CPU, a Mac, one GPU, or many with torchrun.

    python train.py config/train_toy.py
    python train.py config/train_toy.py --model=gpt --max_iters=500
    torchrun --nproc_per_node=4 train.py config/train_small.py

Settings come from the class Settings, then from config files (key = value lines), then from
--key=value. A run writes out/<run>/ckpt.pt (the latest state), best.pt (the lowest validation
loss), log.csv, and with --keep_every=N the weights of every N-th step as ckpt-STEP.pt. On a CPU,
with one or two processes, a run that was killed and resumed ends with the same weights as an
uninterrupted one, bit for bit.
"""

import gc
import math
import re
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
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
from rucksack.machine import Machine, check_memory, check_processes, find_machine, flops_per_token
from rucksack.optimizers import make_optimizers
from rucksack.published import from_pretrained
from rucksack.report import (
    describe,
    distinct_share,
    error_of_device,
    how_to_go_on,
    how_to_restart,
    log_line,
)
from rucksack.settings import parse_settings, setting
from senses import sense_gauge

# -----------------------------------------------------------------------------
# Settings.


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    out_dir: str = setting('', 'folder for the run (empty: out/ and the name of the '
                                'config or dataset)')
    init_from: str = setting('scratch', 'scratch, resume, or a checkpoint, folder or Hub name')
    overwrite: bool = setting(False, 'replace the checkpoints and the log in out_dir, once the '
                                  'new run has saved its first')
    dataset: str = setting('openwebtext', 'folder in data/ written by prepare.py')
    model: str = setting('backpack', 'backpack, or gpt: the baseline Transformer',
                         choices=('backpack', 'gpt'))
    n_layer: int = setting(12, 'layers of the contextualizer (a loaded model keeps its own)', low=1)
    n_head: int = setting(12, 'attention heads', low=1)
    n_embd: int = setting(768, 'width d', low=1, high=65_536)
    n_sense: int = setting(16, 'senses per token, k', low=1)
    sense_hidden: int = setting(0, 'hidden size of the sense MLPs (0: 4 * n_embd)', high=1_000_000)
    block_size: int = setting(512, "context length in tokens (at most a loaded model's)", low=2)
    dropout: float = setting(0.0, 'dropout in the contextualizer', high=1 - 1e-9)
    batch_size: int = setting(32, 'sequences per micro-batch', low=1)
    gradient_accumulation_steps: int = setting(1, 'micro-batches per step, in all processes', low=1)
    max_iters: int = setting(100_000, 'optimizer steps')
    optimizer: str = setting('adamw', 'adamw, or muon: Muon for matrices, AdamW for the rest',
                             choices=('adamw', 'muon'))
    learning_rate: float = setting(6e-4, 'peak learning rate of AdamW')
    muon_lr: float = setting(6e-3, 'peak learning rate of Muon')
    loaded_lr: float = setting(1.0, 'learning-rate multiplier for embeddings and contextualizer '
                                    '(0 freezes them), for a Backpack from a Transformer')
    warmup_iters: int = setting(5000, 'steps of linear warmup')
    lr_decay_iters: int = setting(0, 'step at which the linear decay ends (0: max_iters)')
    min_lr: float = setting(0.0, 'learning rate at the end of the decay')
    weight_decay: float = setting(0.1, 'weight decay of matrices')
    decay_embeddings: bool = setting(True, 'apply weight decay to the embeddings too')
    beta1: float = setting(0.9, 'first beta of AdamW', high=1 - 1e-9)
    beta2: float = setting(0.95, 'second beta of AdamW', high=1 - 1e-9)
    grad_clip: float = setting(1.0, 'clip gradients to this norm (0: never)')
    eval_interval: int = setting(1000, 'steps between evaluations; each saves a checkpoint', low=1)
    eval_iters: int = setting(100, 'validation batches per evaluation (always the same)', low=1)
    keep_every: int = setting(0, 'keep the weights every N steps, as ckpt-STEP.pt (0: never)')
    log_interval: int = setting(10, 'steps between log lines', low=1)
    wandb_log: bool = setting(False, 'log to Weights & Biases too (pip install wandb)')
    wandb_project: str = setting('rucksack', 'project in Weights & Biases')
    wandb_run_name: str = setting('', 'run name in Weights & Biases (empty: a generated one)')
    device: str = setting('auto', 'auto, cpu, cuda, cuda:N or mps')
    dtype: str = setting('auto', 'auto (bfloat16 where it is fast), float32, bfloat16 or float64',
                         choices=('auto', 'float32', 'bfloat16', 'float64'))
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


# Flags may change these in a resumed run. max_iters can change the schedule; device and compile can
# change rounding and the draws of dropout.
FREE = ('max_iters', 'out_dir', 'init_from', 'overwrite', 'eval_interval', 'keep_every',
        'log_interval', 'device', 'compile', 'wandb_log', 'wandb_project', 'wandb_run_name')


def parse_args(argv: list[str]) -> tuple[Settings, set[str]]:
    """Read settings from config files, then from --key=value; also returns the names given."""
    given, flags, configs = parse_settings(Settings, 'train.py', __doc__.splitlines()[0], argv)
    s = Settings(**given)
    if not re.fullmatch(DATA_NAME, s.dataset):
        raise UserError(f'dataset is {s.dataset!r}; it must be the name of a folder in data/')
    if not s.out_dir:
        name = s.dataset
        if configs:
            name = Path(configs[-1]).stem.removeprefix('train_')
        if s.model == 'gpt':
            name += '_gpt'
        s = replace(s, out_dir=f'out/{name}')
    names = set(given)
    if s.init_from == 'resume':  # a config file changes nothing
        names -= set(FREE) - flags
    return s, names


def resumed_settings(s: Settings, given: set[str], state: dict) -> Settings:
    """Return the settings of a resumed run: the saved ones, except given ones that are in FREE.

    UserError if any other given setting differs from the saved one.
    """
    try:
        # Pass saved values as flags, so that they are checked like typed ones.
        saved, _ = parse_args([f'--{name}={value}' for name, value in state['settings'].items()])
    except UserError as error:
        raise UserError(f'{s.path} has settings that this version refuses ({error}); '
                        f'{how_to_restart(s)}')
    if s.dtype == 'auto':
        given = given - {'dtype'}  # keep the format the run began with
    for name in sorted(given.difference(FREE)):
        value = getattr(saved, name)
        if getattr(s, name) != value:
            raise UserError(f'{s.path} was trained with {name}={value}, not {getattr(s, name)}; '
                            f'use the same settings, or {how_to_restart(s)}')
    free = given.intersection(FREE) | {'out_dir', 'init_from', 'overwrite'}
    resumed = replace(saved, **{name: getattr(s, name) for name in free})
    if resumed.max_iters < state['step']:
        raise UserError(f'{s.path} is already at step {state["step"]}; '
                        f'set --max_iters to at least {state["step"]}')
    return resumed


# -----------------------------------------------------------------------------
# The model, and the parts of a step.


def config_of(s: Settings, meta: dict) -> Config:
    """Make the shape of an untrained model; UserError if its numbers do not fit together."""
    try:
        return Config(
            block_size=s.block_size,
            vocab_size=math.ceil(meta['vocab_size'] / 64) * 64,  # GPUs like multiples of 64
            n_vocab=meta['vocab_size'],
            n_layer=s.n_layer,
            n_head=s.n_head,
            n_embd=s.n_embd,
            n_sense=s.n_sense if s.model == 'backpack' else 0,
            sense_hidden=s.sense_hidden,
            dropout=s.dropout)
    except ValueError as error:
        raise UserError(str(error))


def settings_of_weights(weights: Backpack, s: Settings, given: set[str], meta: dict) -> Settings:
    """Return the settings, with the model's shape taken from the weights to start from.

    Transformer weights start a Transformer, unless --model=backpack asks for a Backpack; n_sense
    and sense_hidden then apply. UserError if the weights do not fit the data or a given setting.
    """
    config = weights.config
    if weights.tokenizer not in (None, meta['tokenizer']) or config.n_vocab < meta['vocab_size']:
        raise UserError(f'{s.init_from} ({config.n_vocab:,} ids) and data/{s.dataset} '
                        f'({meta["vocab_size"]:,} ids) have different tokenizers; run python '
                        f'prepare.py {s.dataset} --text FILE --like {s.init_from} --overwrite')
    shape = {name: getattr(config, name) for name in ('n_layer', 'n_head', 'n_embd')}
    if config.n_sense:
        shape['model'] = 'backpack'
        shape['n_sense'] = config.n_sense
        shape['sense_hidden'] = config.sense_hidden
    elif 'model' not in given:
        shape['model'] = 'gpt'
    for name, value in shape.items():
        if name in given and getattr(s, name) != value:
            raise UserError(f'{s.init_from} has {name}={value}; drop {name}={getattr(s, name)}')
    if 'block_size' not in given:
        shape['block_size'] = config.block_size
    elif config.block_size < s.block_size:
        raise UserError(f'{s.init_from} has block_size={config.block_size}, and --block_size is '
                        f'{s.block_size}; set it to {config.block_size} or less')
    return replace(s, **shape)


def start_from(weights: Backpack, s: Settings, n_vocab: int) -> Backpack:
    """Make a model that starts from weights; a Backpack from a Transformer gets new senses.

    The Transformer supplies the embeddings, the blocks and ln_f. n_vocab is the number of ids in
    the data. UserError if n_sense does not divide n_embd.
    """
    torch.manual_seed(s.seed)  # for newly initialized weights
    n_sense = s.n_sense if s.model == 'backpack' else 0
    try:
        config = replace(weights.config, n_vocab=n_vocab, n_sense=n_sense,
                         sense_hidden=s.sense_hidden, dropout=s.dropout)
    except ValueError as error:
        raise UserError(f'{s.init_from}: {error}')
    is_new_backpack = n_sense > 0 and weights.config.n_sense == 0
    state = weights.state_dict()
    if is_new_backpack:  # it will be trained only on texts of s.block_size tokens
        config = replace(config, block_size=s.block_size)
        state['contextualizer.wpe.weight'] = weights.contextualizer.wpe.weight[:s.block_size]
    model = Backpack(config)
    model.load_state_dict(state, strict=False)
    if is_new_backpack:
        # Trained embeddings are larger than new ones, whose standard deviation is 0.02. Smaller
        # senses keep the first logits as small as from scratch.
        model.sense_network.final_mlp.c_proj.weight.data *= 0.02 / weights.wte.weight.std()
    return model


def learning_rate_at(step: int, s: Settings, peak: float) -> float:
    """Warm up linearly to the peak, then decay linearly to min_lr; steps count from 0."""
    last = s.lr_decay_iters or s.max_iters
    if step < s.warmup_iters:
        return peak * (step + 1) / s.warmup_iters
    share = min(1.0, (step - s.warmup_iters) / max(1, last - s.warmup_iters))
    return peak + share * (s.min_lr - peak)


def forward_backward(model, data: TokenDataset, step: int, s: Settings, machine: Machine) -> Tensor:
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
        idx, targets = data(micro_batches[i])  # (batch_size, block_size) each
        inputs = inputs_of(idx, targets, machine.device)
        torch.manual_seed(s.seed * 1_000_003 + step * n + i)  # dropout depends only on this seed
        synchronise = i == own[-1] or machine.world == 1
        with nullcontext() if synchronise else model.no_sync():
            with machine.autocast():
                loss = model(*inputs) / len(own)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(model, data: TokenDataset, s: Settings, machine: Machine) -> float:
    """Measure the mean loss in nats per token, always on the same texts, spread over the data."""
    texts = data.spread(s.eval_iters * s.batch_size)
    n = len(texts)
    batches = np.split(texts, range(s.batch_size, n, s.batch_size))
    dtype = next(model.parameters()).dtype
    total = torch.zeros((), device=machine.device, dtype=dtype)
    model.eval()
    for batch in batches[machine.rank::machine.world]:
        idx, targets = data(batch)
        with machine.autocast():
            total += model(*inputs_of(idx, targets, machine.device)) * len(batch)
    model.train()
    return machine.sum_over_processes(total) / n


def stuck_senses(model: Backpack, data: TokenDataset, machine: Machine) -> tuple[int, int]:
    """Count the senses that do not read the text, on 16 texts spread evenly over the data.

    Returns two counts: senses that give over 0.97 of their weight to the current token, and senses
    whose weights depend only on position; a sense can be both. The loss shows neither, and a sense
    with a saturated softmax hardly recovers: its gradient is tiny. In the first steps from scratch,
    senses are often of the second kind.
    """
    idx, _ = data(data.spread(16))
    model.eval()
    with machine.autocast():
        on_current, moved = sense_gauge(model, idx.to(machine.device))  # (k,) each
    model.train()
    n_on_current = (on_current > 0.97).sum()
    n_by_position = (moved < 0.05).sum()
    return n_on_current.item(), n_by_position.item()


def check_finite(step: int, what: str, value: float, model: Backpack, optimizers: list) -> None:
    """Raise FloatingPointError if a value, weight or moment is not finite: it must not be saved."""
    if not math.isfinite(value):
        raise FloatingPointError(f'step {step}: the {what} is {value}')
    tensors = list(model.parameters())
    for optimizer in optimizers:
        for moments in optimizer.state.values():
            tensors.extend(moments.values())
    is_finite = [tensor.isfinite().all() for tensor in tensors]
    if not torch.stack(is_finite).all():
        raise FloatingPointError(f'step {step}: a weight or an optimizer moment is not finite')


# -----------------------------------------------------------------------------
# Training.


def train(s: Settings, given: set[str]) -> int:
    """Train, and return the exit code: 1 if the run stopped itself.

    given holds the names of the settings that were set explicitly.
    """
    # The checkpoint to resume, and the data.
    state = {}
    if s.init_from == 'resume':
        state = ckpt.read_state(s.path)
        s = resumed_settings(s, given, state)
    elif not s.overwrite:
        refuse_to_replace(s.path)
    folder = Path('data') / s.dataset
    meta = read_meta(folder)
    if s.init_from not in ('scratch', 'resume'):
        weights = from_pretrained(s.init_from)
        s = settings_of_weights(weights, s, given, meta)  # sets block_size
    train_data = TokenDataset(folder, 'train', meta, s.block_size)
    val_data = TokenDataset(folder, 'val', meta, s.block_size)
    data_facts = str([meta['tokens'], meta.get('sha256')])
    if state and state['data'] != data_facts:
        raise UserError(f'data/{s.dataset} differs from the data that '
                        f'{s.path} was trained on; restore it, or {how_to_restart(s)}')

    # The device, its number format and, under torchrun, the other processes.
    check_processes(s.gradient_accumulation_steps)
    machine = find_machine(s.device, s.dtype)
    if state:
        machine.why = 'as when the run began'
    s = replace(s, dtype=machine.dtype)

    # The model: from scratch, from the checkpoint to resume, or from given weights.
    if s.init_from == 'scratch':
        check_memory(config_of(s, meta), machine)
        torch.manual_seed(s.seed)
        model = Backpack(config_of(s, meta))
    elif s.init_from == 'resume':
        model = ckpt.from_checkpoint(state, s.path)
    else:
        model = start_from(weights, s, meta['vocab_size'])
        if model.config.n_sense and not weights.config.n_sense:
            machine.print0(f'embeddings, blocks and ln_f come from {s.init_from}; '
                           'sense_network and sense_weights are new')
    model.tokenizer = meta['tokenizer']
    model.to(machine.device, machine.weight_dtype).train()

    # The optimizers. A resumed run restores the exact weights and the moments.
    optimizers = make_optimizers(
        model, s.optimizer, s.learning_rate, s.weight_decay, (s.beta1, s.beta2),
        decay_embeddings=s.decay_embeddings, muon_lr=s.muon_lr, loaded_lr=s.loaded_lr)
    if state:
        model.load_state_dict(state['model'])  # from_checkpoint rounds a run in float64 to float32
        ckpt.load_optimizers(optimizers, state['optimizers'], s.path)

    # DistinctIds computes senses once for each distinct id of a batch, and returns the mean loss.
    # Compiled, it is one graph; DDP around it averages the gradients of all processes.
    loss_model = DistinctIds(model)
    if s.compile:
        loss_model = machine.compile(loss_model)
    ddp_model = loss_model
    if machine.world > 1:
        mark = zlib.crc32(f'{state.get("log")} {data_facts}'.encode())  # must be equal in all
        if machine.sum_over_processes(torch.tensor(mark)) != machine.world * mark:
            raise UserError(f'the processes see different files in {s.out_dir} or {folder}: '
                            'share them')
        device_ids = [machine.device] if machine.on_gpu else None
        ddp_model = DistributedDataParallel(loss_model, device_ids)

    # Lock the folder of the run, and restore its log. Print a summary of the run.
    facts = {'model_config': asdict(model.config), 'tokenizer': model.tokenizer,
             'settings': asdict(s), 'data': data_facts}  # stored in every checkpoint
    out = RunFolder(s, facts, state, machine.rank)
    machine.print0(describe(model, train_data, s, machine))
    if state:
        machine.print0(f'resumed from {s.path} after step {state["step"]}')
    flops = flops_per_token(model, distinct_share(train_data, s))

    iter_num = state.get('step', 0)
    try:
        # Compile before the clock starts: one forward and backward pass, its gradients dropped.
        if s.compile:
            forward_backward(ddp_model, train_data, iter_num, s, machine)
            model.zero_grad(set_to_none=True)
        interval_start = time.perf_counter()  # when the current logging interval began
        interval_step = iter_num
        while True:
            # Evaluate and save a checkpoint: at the start, every eval_interval steps, at the end.
            # A resumed run begins with a step that is saved already.
            is_last = iter_num == s.max_iters
            if (iter_num % s.eval_interval == 0 or is_last) and iter_num != out.saved_step:
                pause_start = time.perf_counter()
                row = {'val_loss': evaluate(loss_model, val_data, s, machine)}
                check_finite(iter_num, 'loss', row['val_loss'], model, optimizers)
                machine.print0(f'step {iter_num}: validation loss {row["val_loss"]:.4f}')
                if model.config.n_sense:
                    on_current, by_position = stuck_senses(model, val_data, machine)
                    row['senses_on_current_token'] = on_current
                    row['senses_by_position'] = by_position
                    machine.print0(f'stuck senses: {on_current} attend only to the current token, '
                                   f'{by_position} depend only on position (normal at first)')
                out.log(iter_num, row)
                out.save(iter_num, row['val_loss'], model, optimizers)
                interval_start += time.perf_counter() - pause_start
            if is_last:
                break

            # Set this step's learning rate, times the group's factor (loaded_lr) if it has one.
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    rate = learning_rate_at(iter_num, s, peak=optimizer.defaults['lr'])
                    group['lr'] = rate * group.get('factor', 1.0)

            # Forward and backward through all micro-batches, then clip and update.
            loss = forward_backward(ddp_model, train_data, iter_num, s, machine)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            iter_num += 1

            # Permanent copies of the weights.
            if s.keep_every and iter_num % s.keep_every == 0:
                check_finite(iter_num, 'gradient norm', norm.item(), model, optimizers)
                out.keep(iter_num, model)

            # A log line: the numbers of this step, and tokens a second since the last line,
            # evaluations excluded.
            if iter_num % s.log_interval == 0 or iter_num == s.max_iters:
                loss = machine.sum_over_processes(loss) / machine.world  # waits for the device
                check_finite(iter_num, 'loss', loss, model, optimizers)
                tokens = (iter_num - interval_step) * s.tokens_per_step
                speed = tokens / (time.perf_counter() - interval_start)
                rate = learning_rate_at(iter_num - 1, s, s.learning_rate)
                row = {'loss': loss, 'learning_rate': rate, 'grad_norm': norm.item(),
                       'tokens_per_second': round(speed), 'mfu': machine.mfu(speed * flops)}
                machine.print0(log_line(iter_num, row, s))
                out.log(iter_num, row)
                interval_start = time.perf_counter()
                interval_step = iter_num
        machine.print0(f'done: {s.path}')
        return 0
    except (torch.OutOfMemoryError, torch._dynamo.exc.BackendCompilerFailed) as error:
        raise error_of_device(error, s, out.saved_step, machine.rank)
    except (FloatingPointError, OSError) as error:
        how = how_to_go_on(s, out.saved_step, error)
        machine.print0(f'train.py: stopped: {error}; {how}', sys.stderr)
        return 1
    finally:
        out.close()


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    settings, given = parse_args(argv)
    code = train(settings, given)
    if dist.is_initialized() and code != 1:  # after a failure, others may never get here
        dist.barrier()  # wait until all have finished writing before any closes its connections
        gc.collect()  # DDP holds the process group: free it first, or destroying the group can hang
        dist.destroy_process_group()
    return code


main = partial(run_cli, 'train.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
