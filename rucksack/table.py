"""Print tables, and write them to JSON and CSV files."""

import csv
import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rucksack.cli import printable, write_file


@dataclass
class Table:
    """Rows under columns.

    columns are name -> format: a format specification, or a function from a value to its text.
    Text prints unchanged; None, infinity and NaN print as -. The first column is left-aligned, and
    so are those with the format '<' or a function. With clip, columns beyond the terminal's width
    are not printed.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)
    clip: bool = False

    def __post_init__(self) -> None:
        self.rows = [[finite(value) for value in row] for row in self.rows]

    def __str__(self) -> str:
        formats = list(self.columns.values())
        lines = [list(self.columns)]
        for row in self.rows:
            lines.append([cell(value, how) for value, how in zip(row, formats)])
        widths = [max(map(len, column)) for column in zip(*lines)]
        if self.clip:
            widths = widths[:columns_that_fit(widths)]
        text = ['', self.title]
        for line in lines:
            cells = []
            for i, width in enumerate(widths):
                to_the_left = i == 0 or formats[i] == '<' or callable(formats[i])
                cells.append(line[i].ljust(width) if to_the_left else line[i].rjust(width))
            text.append('  '.join(cells).rstrip())
        return printable('\n'.join(text + self.notes))


def finite(value):
    """Return the value; None for infinity and NaN, which JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def cell(value, how: str | Callable) -> str:
    """Format a value."""
    if value is None:
        return '-'
    if callable(how):
        return how(value)
    if isinstance(value, str):
        return value
    return format(value, how.strip('<'))


def columns_that_fit(widths: list[int]) -> int:
    """Count the columns of these widths that fit a terminal, with two spaces between them."""
    room = shutil.get_terminal_size((110, 24)).columns
    n = len(widths)
    while n and sum(widths[:n]) + 2 * (n - 1) > room:
        n -= 1
    return n


def write_json(path: Path, models: list[str], tables: dict[str, Table]) -> None:
    """Write the numbers of the tables; the file appears only when complete."""
    contents = {}
    for name, table in tables.items():
        contents[name] = {
            'title': table.title,
            'columns': list(table.columns),
            'rows': table.rows,
            'notes': table.notes}
    text = json.dumps({'models': models, 'tables': contents}, indent=1)
    write_file(path, text + '\n')


def write_csv(path: Path, tables: dict[str, Table]) -> None:
    """Write the rows of all tables under one header; the file appears only when complete.

    The first column, "table", has the name of the table, and a column without a name is "row". A
    column that a table lacks is empty.
    """
    columns = dict.fromkeys(name or 'row' for table in tables.values() for name in table.columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, ['table', *columns], restval='', lineterminator='\n')
    writer.writeheader()
    for name, table in tables.items():
        names = [column or 'row' for column in table.columns]
        for row in table.rows:
            values = [csv_value(value) for value in row]
            writer.writerow({'table': name, **dict(zip(names, values))})
    write_file(path, text.getvalue())


def csv_value(value):
    """Write a value as CSV has it: a word and its score in one cell, nothing for None."""
    if isinstance(value, tuple):
        return ' '.join(map(str, value))
    return value
