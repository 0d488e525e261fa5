"""A training run: its settings, its folder, its checkpoints and its log."""

import ast
import csv
import difflib
import inspect
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from rucksack.checkpoint import save
from rucksack.cli import HOME, number
from rucksack.device import clean_exit, find_processes
from rucksack.errors import UserError, user_errors
from rucksack.files import locked_folder, write_file
from rucksack.model import Config

LOWEST = {  # of any other number: 0
    'warmup_iters': -1, 'n_sense': 1, 'batch_size': 1, 'gradient_accumulation_steps': 1,
    'eval_interval': 1, 'eval_iters': 1, 'log_interval': 1}
COLUMNS = ['step', 'tokens', 'loss', 'val_loss', 'senses_on_current_token', 'senses_by_position',
           'learning_rate', 'muon_lr', 'grad_norm', 'tokens_per_second']  # columns of log.csv


def parse_settings(kind: type, argv: list[str]) -> tuple[object, set[str], list[str]]:
    """Read the settings of a dataclass from config files, then from flags; --help prints its code.

    Returns the settings, the names set by flags, and the paths of the config files.
    """
    if '--help' in argv:
        print(f'usage: train.py [config.py ...] [--key=value ...]\n\n{inspect.getsource(kind)}')
        sys.exit()
    types = inspect.get_annotations(kind)
    flags = read_flags([word for word in argv if word.startswith('-')], types)
    configs = [word for word in argv if not word.startswith('-')]
    settings = {}
    for path in configs:
        with user_errors(path):
            settings |= read_flags(config_flags(path), types)
    return kind(**settings | flags), set(flags), configs


def config_flags(path: str) -> list[str]:
    """Turn the lines of a config file, here or of the package, into flags; none is executed."""
    file = Path(path)
    if not file.exists():
        file = HOME / path
    flags = []
    for statement in ast.parse(file.read_text(encoding='utf-8-sig')).body:
        line = ast.unparse(statement)
        name, _, value = line.partition(' = ')
        with user_errors(line, 'write key = value, without an expression'):
            flags.append(f'--{name}={ast.literal_eval(value)}')
    return flags


def read_flags(flags: list[str], types: dict[str, type]) -> dict:
    """Read flags --key=value, where - is as good as _ in a key; --switch alone is True."""
    settings = {}
    for flag in flags:
        name, _, text = flag.lstrip('-').partition('=')
        name = name.replace('-', '_')
        if name not in types:
            nearest, = difflib.get_close_matches(name, types, 1, cutoff=0)
            raise UserError(f'there is no setting {flag}; did you mean --{nearest}? See --help')
        with user_errors(flag, f'write --{name}=VALUE; see --help', 'is not a setting'):
            settings[name] = value_of(text, types[name], LOWEST.get(name, 0))
    return settings


def value_of(text: str, kind: type, low: int) -> bool | int | float | str:
    """Parse the value of a setting: a number is at least low, and a switch needs no value."""
    if kind is bool:
        return {'True': True, 'False': False, '': True}[text]
    if kind in (int, float):
        return number(kind, low)(text)
    words = get_args(kind)  # of a Literal
    if words and text not in words:
        raise UserError(f'choose one of {words}')
    return text


def config_for(s, meta: dict) -> Config:
    """Make the config of a model for the ids of some data. Raises UserError for bad sizes."""
    n_vocab = meta['vocab_size']
    n_rows = math.ceil(n_vocab / 64) * 64  # GPUs are faster with multiples of 64
    n_sense = 0 if s.model == 'gpt' else s.n_sense
    with user_errors('this model', problem='cannot be made'):
        return Config(s.block_size, n_rows, n_vocab, s.n_layer, s.n_head, s.n_embd, n_sense,
                      s.sense_hidden, s.dropout)


@contextmanager
def start_run(kind: type, argv: list[str]) -> Iterator[tuple]:
    """Read the settings of a run, and lock its folder; yield settings, checkpoint and given model.

    The checkpoint is {} unless --init_from=resume; the model is None unless --init_from names one.
    Raises UserError if a run would be replaced without --overwrite.
    """
    s, flags, configs = parse_settings(kind, argv)
    checkpoint = {}
    given = None
    if s.init_from not in ('scratch', 'resume'):
        from rucksack.start import load_given  # for this flag alone, as below
        given, s = load_given(s, flags)  # that model's sizes replace those in s
    folder = Path(s.out_dir or out_dir_of(s, flags, configs)).expanduser()
    s = replace(s, out_dir=str(folder))
    rank, _, _ = find_processes()
    with clean_exit(), locked_folder(folder) if rank == 0 else nullcontext():
        if s.init_from == 'resume':
            from rucksack.start import load_run
            checkpoint, s = load_run(s, flags)  # the run's settings, except for some flags
        elif not s.overwrite:
            refuse_to_replace(folder)
        yield s, checkpoint, given


def out_dir_of(s, flags: set[str], configs: list[str]) -> str:
    """Name the folder of a run after its last config or its dataset, with _gpt for a Transformer.

    Raises UserError if it does not say which of the two to resume.
    """
    name = Path(s.dataset).name
    if configs:
        name = Path(configs[-1]).stem.removeprefix('train_')
    folder = f'out/{name}'
    transformers = f'out/{name}_gpt'
    if s.init_from == 'resume' and 'model' not in flags and Path(transformers).exists():
        raise UserError(f'{transformers} exists: resume it with --model=gpt, or {folder} with '
                        '--model=backpack')
    return transformers if s.model == 'gpt' else folder


def refuse_to_replace(folder: Path) -> None:
    """Raise UserError if a folder has log.csv, ckpt.pt or best.pt."""
    for file in (folder / 'log.csv', folder / 'ckpt.pt', folder / 'best.pt'):
        if file.exists():
            raise UserError(f'{file} exists; continue the run with --init_from=resume, '
                            'replace it with --overwrite, or choose another --out_dir')


class RunFolder:
    """The log and checkpoints of a run; the first process writes. Older files stay until then."""

    def __init__(self, s, checkpoint: dict, rank: int):
        self.s = s
        self.path = Path(s.out_dir)
        self.is_first = rank == 0
        header = ','.join(COLUMNS) + '\n'
        self.rows = [header, *self.rows_until(checkpoint.get('step'))]
        self.wandb = None
        self.wandb_id = checkpoint.get('wandb_id')
        if s.wandb_log and self.is_first:
            import wandb  # WANDB_PROJECT and WANDB_NAME name the run
            self.wandb = wandb.init(config=asdict(s), id=self.wandb_id, resume='allow')
            self.wandb_id = self.wandb.id
        self.start_clock(checkpoint.get('step', 0))

    def rows_until(self, step: int | None) -> list[str]:
        """Read the rows of log.csv up to a step; a new run has none."""
        path = self.path / 'log.csv'
        if step is None or not path.exists():
            return []
        rows = path.read_text().splitlines(keepends=True)[1:]
        whole = [row for row in rows if row.endswith('\n')]  # a kill can cut the last row short
        return [row for row in whole if int(row.split(',')[0]) <= step]

    def start_clock(self, step: int) -> None:
        """Measure the speed from now on."""
        self.clock = step, time.perf_counter()

    def log(self, step: int, row: dict) -> None:
        """Print and log a row; a training step's row also gets the speed and the time left.

        Raises FloatingPointError if its loss is not finite.
        """
        loss = row.get('loss', row.get('val_loss'))
        if not math.isfinite(loss):
            raise FloatingPointError(f'the loss is {loss} at step {step}')
        size = self.s.tokens_per_step
        row = {'step': step, 'tokens': step * size, **row}
        if 'loss' in row:
            start, seconds = self.clock
            pace = (time.perf_counter() - seconds) / (step - start)  # seconds a step
            row['tokens_per_second'] = round(size / pace)
            minutes = pace * (self.s.max_iters - step) / 60
            print(f'{minutes:.1f} minutes left', end=', ')
        self.start_clock(step)
        rounded = row | {
            name: f'{x:.6g}'
            for name, x in row.items()
            if isinstance(x, float)}
        cells = [f'{name} {x}' for name, x in rounded.items()]
        print(', '.join(cells), flush=True)
        if self.is_first:
            if self.rows:
                write_file(self.path / 'log.csv', ''.join(self.rows))
                self.rows.clear()
            with open(self.path / 'log.csv', 'a', newline='') as file:
                csv.DictWriter(file, COLUMNS, lineterminator='\n').writerow(rounded)
        if self.wandb:
            self.wandb.log(row, step=step)

    def save(self, name: str, state: dict) -> None:
        """Save a checkpoint; the time this takes does not count as training time."""
        if self.is_first:
            save(self.path / name, state)
        self.start_clock(state['step'])
