"""A picture in SVG: the losses of runs."""

import argparse
import csv
import html
import math
from pathlib import Path

from rucksack.checkpoint import load_file
from rucksack.common import UserError, output_path, printable, write_file
from rucksack.table import Subject, Table

COLORS = ('#c2410c', '#2563eb', '#15803d', '#9333ea', '#0891b2', '#64748b', '#db2777', '#a16207')
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 460"><style>
text { font: 13px system-ui, sans-serif; fill: #777 } .grid { stroke: #8886; stroke-width: .5 }
path { fill: none; stroke-width: 2; stroke-linecap: round }</style>"""  # this gray is seen on white and black


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers from low to high."""
    power = 10 ** math.floor(math.log10(high - low))
    step = next(power * m for m in (2, 1, 0.5, 0.2) if (high - low) / (power * m) >= 3)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def text_at(x: float, y: float, text: str, anchor: str = 'start') -> str:
    """A text in SVG, whatever characters it has."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(printable(text))}</text>'


def picture(lines: list[tuple]) -> str:
    """Losses in nats, on a logarithmic scale, against million tokens, as an SVG file that needs nothing else.
    A line is a name, its attributes in SVG, and points (tokens, nats).
    """
    xs, ys = zip(*(point for *_, points in lines for point in points))
    (left, right), (low, high) = ((min(v), max(v) + (min(v) == max(v))) for v in (xs, ys))

    def at(x: float, y: float) -> tuple[float, float]:
        """Where a point is, in pixels."""
        return 70 + 500 * (x - left) / (right - left), 400 - 350 * math.log(y / low) / math.log(high / low)

    title = 'Nats per token, logarithmic, on held-out text'
    parts = [HEAD, text_at(70, 30, title), text_at(320, 445, 'million tokens', 'middle')]
    for x in ticks(left, right):
        parts += [f'<path class="grid" d="M{at(x, low)[0]:.1f} 50V400"/>',
                  text_at(at(x, low)[0], 420, f'{x:g}', 'middle')]
    for y in ticks(low, high):
        parts += [f'<path class="grid" d="M70 {at(left, y)[1]:.1f}H570"/>',
                  text_at(62, at(left, y)[1] + 4, f'{y:g}', 'end')]
    for _, look, points in lines:
        dots = 'L'.join('{:.1f} {:.1f}'.format(*at(*point)) for point in points)
        parts.append(f'<path {look} d="M{dots}h0"/>')  # h0: of a single point there is a dot
    for i, (name, look, _) in enumerate(lines):
        parts += [f'<path {look} d="M585 {60 + 22 * i}h30"/>', text_at(622, 64 + 22 * i, name)]
    return '\n'.join(parts) + '\n</svg>\n'


def plot(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Loss on held-out text against tokens, in the file of --out; a Transformer's is dashed."""
    lines, rows, file = [], [], output_path('--out', args.out, '.svg')
    for run, color in zip(args.runs, COLORS * len(args.runs)):
        k = load_file(Path(run, 'ckpt.pt')).get('model_config', {}).get('n_sense')
        log = list(csv.DictReader(Path(run, 'log.csv').read_text().splitlines()))
        val = [(float(row['tokens']) / 1e6, float(row['val_loss'])) for row in log if row.get('val_loss')]
        if not val:
            raise UserError(f'{run} has no loss on held-out text in log.csv')
        name, look = f'{"Backpack" if k else "Transformer"} {run}', f'stroke="{color}"'
        look += '' if k else ' stroke-dasharray="7 4"'
        lines.append((name, look, val))
        rows.append([name, *val[-1], min(loss for _, loss in val)])
    write_file(file, picture(lines))
    return Table('Losses', {'': '', 'tokens, M': ',.1f', 'on held-out text': '.3f', 'lowest': '.3f'}, rows)
