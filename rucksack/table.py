"""Print tables, and write them to CSV files."""

import csv
import io
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rucksack.cli import printable, write_file


class Token(str):
    """The text of a token: printed in quotes, bare in a CSV file."""


@dataclass
class Table:
    """Rows under columns.

    columns are name -> format: a format specification, or a function from a value to its text.
    Text prints unchanged; None, infinity and NaN print as -. The first column is left-aligned, and
    so are those with the format '<' or a function. A CSV file has all rows and columns.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    clip: bool = False           # whether to print only columns that fit the terminal
    most: int | None = None      # rows to print; None: all
    bars: tuple[str, ...] = ()   # columns of probabilities to draw as bars too

    def __str__(self) -> str:
        formats = list(self.columns.values())
        lines = [[*self.columns, *(f'{name}:' for name in self.bars)]]
        for row in self.rows[:self.most]:
            values = dict(zip(self.columns, row))
            cells = [cell(value, how) for value, how in zip(row, formats)]
            lines.append([*cells, *(bar(values[name]) for name in self.bars)])
        widths = [max(map(len, column)) for column in zip(*lines)]
        if self.clip:
            widths = widths[:columns_that_fit(widths)]
        formats += ['<'] * len(self.bars)
        text = ['', self.title]
        for line in lines:
            cells = []
            for i, width in enumerate(widths):
                to_the_left = i == 0 or formats[i] == '<' or callable(formats[i])
                cells.append(line[i].ljust(width) if to_the_left else line[i].rjust(width))
            text.append('  '.join(cells).rstrip())
        return printable('\n'.join(text + self.notes))


def cell(value, how: str | Callable) -> str:
    """Format a value."""
    if value is None or is_not_finite(value):
        return '-'
    if callable(how):
        return how(value)
    if isinstance(value, Token):
        return repr(value)
    if isinstance(value, str):
        return value
    return format(value, how.strip('<'))


def is_not_finite(value) -> bool:
    """Tell whether a value is infinity or NaN."""
    return isinstance(value, float) and not math.isfinite(value)


def bar(p: float) -> str:
    """Draw a probability as a bar."""
    return '█' * round(20 * p)


def columns_that_fit(widths: list[int]) -> int:
    """Count the columns of these widths that fit a terminal, with two spaces between them."""
    room = shutil.get_terminal_size((110, 24)).columns
    n = len(widths)
    while n and sum(widths[:n]) + 2 * (n - 1) > room:
        n -= 1
    return n


def write_csv(path: Path, tables: dict[str, Table]) -> None:
    """Write the rows of all tables under one header; the file appears only when complete.

    The first column, "table", has the name of the table; a column that a table lacks is empty.
    """
    rows = []
    for name, table in tables.items():
        for row in table.rows:
            rows.append({'table': name} | csv_row(table, row))
    columns = dict.fromkeys(['table', *(name for row in rows for name in row)])
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval='', lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


def csv_row(table: Table, row: list) -> dict:
    """Name the values of a row; a word and its score are two values, COLUMN and COLUMN score."""
    values = {}
    for name, value in zip(table.columns, row):
        if isinstance(value, tuple):
            word, score = value
            values |= {name: bare(word), f'{name} score': score}
        else:
            values[name] = bare(value)
    return values


def bare(value):
    """Return the word of a token, without its space; any other value as it is."""
    is_word = isinstance(value, Token) and len(value) > 1
    return value.removeprefix(' ') if is_word else value
