"""What is printed and what it is about: a table of rows, and a model with its tokenizer on a device."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken

from model import SIZES, Backpack
from rucksack.checkpoint import newest_backpack
from rucksack.common import UserError, printable, write_file
from rucksack.data import GPT2_VOCAB, load_tokenizer
from rucksack.published import from_pretrained


class Missing(UserError):
    """Data or a run that a table needs is not there; eval.py all goes on with the next table."""


@dataclass
class Table:
    """Rows under columns, name -> format: a format specification, or a function from a value to its text.

    Text stands as it is; None, infinity and NaN print as -. The first column, and those of format '<' or of a
    function, are left-aligned. A clipped table prints as many columns as fit the terminal; its JSON has all.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    clip: bool = False

    def __post_init__(self) -> None:
        self.rows = [[None if type(x) is float and not math.isfinite(x) else x for x in row]
                     for row in self.rows]

    def __str__(self) -> str:
        specs = list(self.columns.values())
        lines = [list(self.columns), *(list(map(as_text, row, specs)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        room, text = shutil.get_terminal_size((110, 24)).columns + 2, ['', self.title]
        ends = itertools.accumulate(width + 2 for width in widths)
        shown = sum(end <= room for end in ends) if self.clip else len(widths)
        left = [i == 0 or spec == '<' or callable(spec) for i, spec in enumerate(specs)]
        for line in lines:
            text.append('  '.join(cell.ljust(width) if on_left else cell.rjust(width) for cell, width, on_left
                                  in zip(line[:shown], widths, left)).rstrip())
        return printable('\n'.join(text + self.notes))


def as_text(x, spec: str | Callable) -> str:
    """A value in the format of its column."""
    if x is None or isinstance(x, str):
        return '-' if x is None else x
    return spec(x) if callable(spec) else format(x, spec.replace('<', ''))


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

    def __post_init__(self) -> None:
        c = self.model.config
        self.kind = 'Backpack' if c.n_sense else 'Transformer'
        self.is_toy = self.model.tokenizer['name'] == 'toy'  # it speaks of the world whose truth is known
        self.device = self.model.wte.weight.device
        self.encode, self.eot = self.encoding.encode_ordinary, self.encoding.eot_token
        shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd)
        papers = (c.block_size, c.n_vocab, c.sense_hidden) == (512, GPT2_VOCAB, 4 * c.n_embd)
        self.size = next((size for size in SIZES  # in the paper
                          if papers and c.n_sense in (0, 16) and SIZES[size] == shape), None)

    def __str__(self) -> str:
        return f'{self.kind} {self.name}'

    def about(self) -> str:
        """A line that describes the model."""
        c = self.model.config
        return printable(f'{self}: {c.n_layer} layers of width {c.n_embd}, {c.n_sense} senses, '
                         f'{c.n_vocab:,} ids')


def load(name: str | None, device: str) -> Subject:
    """A model from a file, folder or Hub name on a device; without a name the newest Backpack in out/."""
    model, name = newest_backpack() if name is None else (from_pretrained(name), name)
    encoding = load_tokenizer(model.tokenizer)
    if encoding.n_vocab != model.config.n_vocab:
        raise UserError(f'{name} has {model.config.n_vocab} ids, its tokenizer {encoding.n_vocab}')
    return Subject(str(name), model.to(device).eval(), encoding)


def needs_senses(subject: Subject, what: str) -> None:
    """Raise Missing where something about senses is asked of a Transformer."""
    if not subject.model.config.n_sense:
        raise Missing(f'{subject.name} is a Transformer and has no senses; {what} takes a Backpack by --from')
