"""Draw the losses of runs."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from rucksack.checkpoint import load_file
from rucksack.common import UserError, one_line, printable, write_file
from rucksack.table import Table


@dataclass(frozen=True)
class Run:
    """A run's loss on held-out text."""

    name: str
    is_backpack: bool
    tokens: list[float]  # in millions
    losses: list[float]  # in nats


def read_run(folder: str) -> Run:
    """Read the validation losses in a run's log.csv; UserError if there are none."""
    checkpoint = load_file(Path(folder, 'ckpt.pt'))
    is_backpack = bool(checkpoint.get('model_config', {}).get('n_sense'))
    kind = 'Backpack' if is_backpack else 'Transformer'
    log = Path(folder, 'log.csv')
    try:
        with log.open(newline='', encoding='utf-8') as file:
            rows = [row for row in csv.DictReader(file) if row.get('val_loss')]
        tokens = [float(row['tokens']) / 1e6 for row in rows]
        losses = [float(row['val_loss']) for row in rows]
    except (ValueError, LookupError, TypeError, csv.Error) as error:
        raise UserError(f'{log} is damaged ({one_line(error)}); leave it out')
    if not rows:
        raise UserError(f'{log} has no validation loss; leave it out')
    return Run(printable(f'{kind} {folder}'), is_backpack, tokens, losses)


def plot(folders: list[str], file: Path) -> Table:
    """Draw loss on held-out text against tokens into a file; a Transformer's line is dashed."""
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise UserError('plot needs matplotlib; run pip install matplotlib')
    runs = [read_run(folder) for folder in folders]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout='constrained')
    rows = []
    for run in runs:
        style = '-' if run.is_backpack else '--'
        axes.plot(run.tokens, run.losses, label=run.name, linestyle=style)
        rows.append([run.name, run.tokens[-1], run.losses[-1], min(run.losses)])
    axes.set(xlabel='million tokens', ylabel='nats per token on held-out text', yscale='log')
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_formatter('{x:g}')
    axes.grid(alpha=0.3, which='both')
    axes.legend(frameon=False)
    svg = io.StringIO()
    figure.savefig(svg, format='svg')
    plt.close(figure)
    write_file(file, svg.getvalue())
    columns = {
        '': '',
        'tokens, M': ',.1f',
        'on held-out text': '.3f',
        'lowest': '.3f'}
    return Table('Losses', columns, rows)
