"""Print tables, and write them to CSV files."""

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rucksack.cli import printable
from rucksack.files import write_file

FIRST_COLUMN = 'rucksack_table'  # first column of our CSV files, which identifies them
CSV_BEGINS = f'"{FIRST_COLUMN}"'


@dataclass
class Table:
    """A table of rows and columns.

    columns maps names to formats: a format specification, or a function from a value to its text.
    Text prints unchanged under a specification; None, infinity and NaN print as -. The first column
    and those with a function are left-aligned. A CSV file has all rows and columns.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    fold: int | None = None      # later columns wrap at the width of the terminal
    most: int | None = None      # rows to print; None: all
    bars: tuple[int, ...] = ()   # columns of probabilities to draw as bars too, by index

    def __str__(self) -> str:
        rows = self.rows[:self.most]
        names = list(self.columns)
        columns = []
        for i, name in enumerate(names):
            how = self.columns[name]
            cells = [cell(row[i], how) for row in rows]
            to_the_left = i == 0 or callable(how)
            columns.append(justified([name, *cells], to_the_left))
        for i in self.bars:
            bars = [bar(row[i]) for row in rows]
            columns.append(justified([f'{names[i]}:', *bars], to_the_left=True))
        lines = ['', self.title]
        for cells in zip(*columns):
            if self.fold is None:
                lines.append('  '.join(cells).rstrip())
            else:
                lines += folded(cells, self.fold)
        return printable('\n'.join(lines + self.notes))


def justified(cells: list[str], to_the_left: bool) -> list[str]:
    """Pad the cells of a column with spaces to the same width."""
    width = max(map(len, cells))
    if to_the_left:
        return [text.ljust(width) for text in cells]
    return [text.rjust(width) for text in cells]


def bar(p: float) -> str:
    """Draw a probability as a bar, or nothing for NaN."""
    return '█' * round(20 * p) if math.isfinite(p) else ''


def cell(value, how: str | Callable) -> str:
    """Format a value."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return '-'
    if callable(how):
        return how(value)
    if isinstance(value, str):
        return value
    return format(value, how)


def folded(cells: tuple[str, ...], first: int) -> list[str]:
    """Break a row into lines that fit the terminal; the first cells are on the first line only."""
    width = shutil.get_terminal_size((110, 24)).columns
    line = '  '.join(cells[:first])
    indent = len(line)
    lines = []
    for cell in cells[first:]:
        if len(line) > indent and len(line) + 2 + len(cell) > width:
            lines.append(line.rstrip())
            line = ' ' * indent
        line += f'  {cell}'
    return [*lines, line.rstrip()]


def write_csv(path: Path, tables: dict[str, Table]) -> None:
    """Write the rows of all tables under one header; the file appears only when complete.

    The first column has the name of the table; a column that a table lacks is empty.
    """
    import pandas  # slow to import
    names = []
    rows = []
    for name, table in tables.items():
        for row in table.rows:
            names.append(name)
            rows.append(csv_row(table, row))
    frame = pandas.DataFrame(rows, names, dtype=object)
    text = frame.to_csv(index_label=FIRST_COLUMN, quoting=csv.QUOTE_NONNUMERIC)
    write_file(path, text)


def csv_row(table: Table, row: list) -> dict:
    """Name the values of a row; a word and its score are two values, COLUMN and COLUMN score."""
    values = {}
    for name, value in zip(table.columns, row):
        if isinstance(value, tuple):
            word, score = value
            values |= {name: word, f'{name} score': score}
        else:
            values[name] = value
    return values
