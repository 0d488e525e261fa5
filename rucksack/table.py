"""Print tables, and write them to CSV files."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import east_asian_width

from rucksack.cli import printable
from rucksack.files import write_file

FIRST_COLUMN = 'rucksack_table'  # first column of our CSV files, which identifies them
CSV_BEGINS = f'"{FIRST_COLUMN}"'


@dataclass
class Table:
    """A table of rows and columns: print(table) shows it, and write_csv writes all its rows.

    columns maps names to formats: a format specification, or a function from a value to its text.
    Text prints unchanged under a specification; None, infinity and NaN print as -. The first column
    and those with a function are left-aligned.
    """

    title: str
    columns: dict[str, str | Callable]
    rows: list[list]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = ['', self.title, *self.lines(), *self.notes]
        return printable('\n'.join(lines))

    def lines(self) -> list[str]:
        """Format the names of the columns, and then each row."""
        columns = []
        for i, (name, how) in enumerate(self.columns.items()):
            texts = [cell(row[i], how) for row in self.rows]
            is_left = i == 0 or callable(how)
            columns.append(justified([name, *texts], is_left))
        return ['  '.join(cells).rstrip() for cells in zip(*columns)]


def cell(value, how: str | Callable) -> str:
    """Format a value."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return '-'
    if callable(how):
        return how(value)
    return value if isinstance(value, str) else format(value, how)


def justified(cells: list[str], is_left: bool) -> list[str]:
    """Pad the cells of a column to the same width."""
    width = max(map(columns_of, cells))
    justify = str.ljust if is_left else str.rjust
    return [
        justify(text, width + len(text) - columns_of(text))
        for text in cells]


def columns_of(text: str) -> int:
    """Count the columns of a terminal that a text takes; a Chinese character takes two."""
    n_wide = sum(east_asian_width(character) in 'FW' for character in text)
    return len(text) + n_wide


def shortened(text: str) -> str:
    """Shorten a prompt to its last 60 characters, on one line."""
    return text.replace('\n', ' ')[-60:]


def write_csv(path: Path, tables: dict[str, Table]) -> None:
    """Write the rows of all tables under one header; the file appears only when complete.

    The first column has the name of the table; a column that a table lacks is empty.
    """
    import pandas  # slow to import
    frames = {
        name: pandas.DataFrame(table.rows, columns=list(table.columns), dtype=object)
        for name, table in tables.items()}
    frame = pandas.concat(frames, names=[FIRST_COLUMN]).droplevel(1)
    write_file(path, frame.to_csv(quoting=csv.QUOTE_NONNUMERIC, lineterminator='\n'))
