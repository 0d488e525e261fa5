"""What is printed and what it is about: a table of rows, and a model with its tokenizer on a device."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import tiktoken
import torch

from model import Backpack, Edit
from rucksack.checkpoint import newest_backpack
from rucksack.common import UserError, printable, write_file
from rucksack.data import load_tokenizer
from rucksack.published import from_pretrained


@dataclass
class Table:
    """Rows under columns, name -> format: a format specification, or a function from a value to its text.
    Text stands as it is; None, infinity and NaN print as -. The first column and those of format '<' or of a
    function are left-aligned. With clip, columns beyond the terminal's width are not printed.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    clip: bool = False

    def __post_init__(self) -> None:
        self.rows = [[x if type(x) is not float or isfinite(x) else None for x in row] for row in self.rows]

    def __str__(self) -> str:
        specs, lines, text = list(self.columns.values()), [list(self.columns)], ['', self.title]
        put = [spec if callable(spec) else f'{{:{spec.strip("<")}}}'.format for spec in specs]
        for row in self.rows:
            lines.append(['-' if x is None else x if isinstance(x, str) else f(x) for x, f in zip(row, put)])
        widths = [max(map(len, column)) for column in zip(*lines)]
        while self.clip and sum(widths) + 2 * len(widths) - 2 > shutil.get_terminal_size((110, 24)).columns:
            widths.pop()
        sides = ['<' if i == 0 or spec == '<' or callable(spec) else '>' for i, spec in enumerate(specs)]
        for line in lines:
            cells = [f'{cell:{side}{width}}' for cell, side, width in zip(line, sides, widths)]
            text.append('  '.join(cells).rstrip())
        return printable('\n'.join(text + self.notes))


def write_json(path: Path, models: list[str], tables: dict[str, Table]) -> None:
    """The numbers of the tables; the file has its name only when complete."""
    write_file(path, json.dumps({'models': models, 'tables': {
        name: {'title': t.title, 'columns': list(t.columns), 'rows': t.rows, 'notes': t.notes}
        for name, t in tables.items()}}, indent=1) + '\n')


@dataclass
class Subject:
    """A model on its device, what its ids mean, and what it is called."""

    name: str
    model: Backpack
    encoding: tiktoken.Encoding
    dtype: str | None = None  # in which it scores and writes texts (None: bfloat16 on CUDA, else float32)
    chosen: str = ''  # why it, where nobody named one
    edit: Edit | None = None  # under which it scores texts

    def __post_init__(self) -> None:
        self.kind = 'Backpack' if self.model.config.n_sense else 'Transformer'
        self.is_toy = self.model.tokenizer['name'] == 'toy'  # it speaks of the world whose truth is known
        self.device = self.model.wte.weight.device
        self.encode, self.eot = self.encoding.encode_ordinary, self.encoding.eot_token

    def __str__(self) -> str:
        return f'{self.kind} {self.name}'

    def autocast(self) -> torch.autocast:
        """The context in which it scores and writes texts."""
        half = self.dtype == 'bfloat16' or self.dtype is None and self.device.type == 'cuda'
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    def about(self) -> str:
        """A line that describes the model."""
        c = self.model.config
        shape = f'{c.n_layer} layers of width {c.n_embd}, {c.n_sense} senses, {c.n_vocab:,} ids'
        return printable(f'{self}: {shape}')


def load(name: str | None, device: str, dtype: str | None = None) -> Subject:
    """A model from a file, folder or Hub name on a device; without a name the newest Backpack in out/, and
    without one there English.
    """
    if name is not None:
        model, chosen = from_pretrained(name), ''
    elif found := newest_backpack():
        (model, name), chosen = found, '; the newest in out/ (real English: --from english)'
    else:
        model, name, chosen = from_pretrained('english'), 'english', '; out/ has no Backpack yet'
    encoding = load_tokenizer(model.tokenizer)
    if encoding.n_vocab != model.config.n_vocab:
        raise UserError(f'{name} has {model.config.n_vocab} ids, its tokenizer {encoding.n_vocab}')
    return Subject(str(name), model.to(device).eval(), encoding, dtype, chosen)


def needs_senses(subject: Subject, what: str) -> None:
    """Raise UserError where something about senses is asked of a Transformer."""
    if not subject.model.config.n_sense:
        raise UserError(f'{subject.name} is a Transformer and has no senses; {what} takes a Backpack')
