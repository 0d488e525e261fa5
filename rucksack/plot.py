"""Pictures: losses and Figure 3."""

import argparse
import csv
import html
import math
from dataclasses import dataclass
from pathlib import Path

import torch

import senses
from rucksack import grammar
from rucksack.checkpoint import load_file
from rucksack.common import UserError, one_line, printable, write_file
from rucksack.grammar import not_there, predict, read_prompt, shown
from rucksack.table import Subject, Table

# -----------------------------------------------------------------------------
# Pictures.

COLORS = ('#c2410c', '#2563eb', '#15803d', '#9333ea', '#0891b2', '#475569', '#db2777', '#a16207')
STYLE = """text { font: 13px system-ui, sans-serif; fill: #222 } .grid { stroke: #bbb; stroke-width: .5 }
path { fill: none; stroke-width: 2 } .paper { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #555 } .paper { fill: #1b1b1b } }"""


@dataclass
class Line:
    """A line of a picture: points (x, y) under a name; a thin one is not named."""

    name: str
    points: list[tuple[float, float]]
    color: str
    dashed: bool = False
    thin: bool = False


def round_steps(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    step = 10 ** math.floor(math.log10(high - low))
    step *= next(m for m in (0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / (step * m) <= 6)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(x: float) -> str:
    """A number for an axis: 2.5B, 300M, 40k."""
    size, letter = next(((size, letter) for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k'))
                         if abs(x) >= size), (1, ''))
    return f'{x / size:.6g}{letter}'


def picture(title: str, x_name: str, y_name: str, lines: list[Line], logarithmic: bool = False) -> str:
    """Lines in one coordinate system as an SVG file that needs nothing else; y may be logarithmic."""
    xs, ys = zip(*(point for line in lines for point in line.points))
    scale = math.log if logarithmic else float
    (left, right), (low, high) = ((min(v), max(v) if max(v) - min(v) > 1e-6 * max(v) else min(v) + 1)
                                  for v in (xs, ys))
    bottom, top = scale(low), scale(high)

    def at(x: float, y: float) -> tuple[float, float]:
        """Where a point is, in pixels."""
        return 70 + 500 * (x - left) / (right - left), 400 - 350 * (scale(y) - bottom) / (top - bottom)

    title, x_name, y_name = (html.escape(printable(text)) for text in (title, x_name, y_name))
    height = max(460, 80 + 22 * len(lines))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" role="img">'
             f'<title>{title}</title><style>{STYLE}</style>'
             f'<rect class="paper" width="820" height="{height}"/>'
             f'<text x="70" y="28">{title}</text><text x="320" y="445" text-anchor="middle">{x_name}</text>'
             f'<text transform="translate(18 225) rotate(-90)" text-anchor="middle">{y_name}</text>']
    for x in round_steps(left, right):
        px, _ = at(x, low)
        parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="50" y2="400"/>'
                     f'<text x="{px:.1f}" y="420" text-anchor="middle">{short(x)}</text>')
    decades = [10.0 ** e for e in range(-9, 10) if low <= 10.0 ** e <= high]
    for y in decades if logarithmic and high > 50 * low else round_steps(low, high):
        _, py = at(left, y)
        parts.append(f'<line class="grid" x1="70" x2="570" y1="{py:.1f}" y2="{py:.1f}"/>'
                     f'<text x="62" y="{py + 4:.1f}" text-anchor="end">{short(y)}</text>')
    key = 60  # where the next name stands
    for line in lines:
        dots, look = [at(*point) for point in line.points], f'stroke="{line.color}"'
        look += ' stroke-dasharray="7 4"' * line.dashed + ' opacity=".35"' * line.thin
        parts.append(f'<path d="M{"L".join(f"{px:.1f} {py:.1f}" for px, py in dots)}" {look}/>')
        if not line.thin:
            name = html.escape(printable(line.name if len(line.name) < 27 else '…' + line.name[-25:]))
            parts.append(f'<path d="M585 {key}h30" {look}/><text x="622" y="{key + 4}">{name}</text>')
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{line.color}"/>' for px, py in dots]
            key += 22
    return '\n'.join(parts) + '\n</svg>\n'


SIZE = {'batch_size': 32, 'gradient_accumulation_steps': 1, 'block_size': 512}  # their product: tokens a step


def read_log(name: str) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """What a run is, and the losses in its log: (tokens, nats) of training batches and of held-out text."""
    folder = Path(name).parent if Path(name).suffix in ('.pt', '.csv') else Path(name)
    try:
        settings = load_file(folder / 'ckpt.pt')['settings']
        per_step = math.prod(settings.get(name, usual) for name, usual in SIZE.items())
        if type(per_step) is not int or settings.get('model', 'backpack') not in ('backpack', 'gpt'):
            raise UserError('its settings are of other types')
        with open(folder / 'log.csv', newline='', encoding='utf-8') as file:
            rows = [{key: float(x) for key, x in row.items() if x} for row in csv.DictReader(file)]
        losses = {column: [(row['step'] * per_step, row[column]) for row in rows
                           if 0 <= row['step'] * per_step < 1e18
                           and 1e-6 < row.get(column, 0) < 1e6]
                  for column in ('loss', 'val_loss')}
        if not losses['val_loss']:
            raise UserError('no loss is logged')
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, csv.Error) as error:
        raise UserError(f'{name} is no run with ckpt.pt and log.csv ({one_line(error)}); name folders that '
                        'train.py made')
    kind = 'Transformer' if settings.get('model') == 'gpt' else 'Backpack'
    return f'{kind} {name}', losses


def plot_losses(args: argparse.Namespace) -> Table:
    """Loss against tokens: on held-out text, and thin on training batches; a Transformer's are dashed."""
    lines, rows = [], []
    for run, color in zip(args.runs, COLORS * len(args.runs)):
        name, losses = read_log(run)
        lines += [Line(name, points, color, dashed=name.startswith('Transformer'), thin=column == 'loss')
                  for column, points in losses.items() if points]
        x, y = losses['val_loss'][-1]
        rows.append([name, x, y, min(y for _, y in losses['val_loss'])])
    write_file(args.out, picture('Loss on held-out text (thin: on training batches)', 'tokens',
                                 'nats per token, logarithmic', lines, logarithmic=True))
    return Table('Losses', {'': '', 'tokens': ',.0f', 'on held-out text': '.3f', 'lowest': '.3f'}, rows)


def plot_sweep(s: Subject, args: argparse.Namespace) -> Table:
    """Figure 3: the probabilities of the next words as senses go from off to what they were."""
    words, chosen, line = grammar.parse_word_senses(args.sweep, s.model, s.encoding)
    ids, cropped = read_prompt(args.start, s.encoding, s.model.config.block_size)
    idx, factors = torch.tensor([ids], device=s.device), [i / 20 for i in range(21)]  # (1, T)
    probs = torch.stack([predict(s.model, idx, senses.scale_senses(words, chosen, f)) for f in factors])
    best = probs.amax(0).topk(len(COLORS)).indices.tolist()  # of V
    best = [w for w in best if probs[:, w].max() >= 0.01] or best
    lines = [Line(shown(s.encoding, w), list(zip(factors, probs[:, w].tolist())), color)
             for w, color in zip(best, COLORS)]
    text = s.encoding.decode(ids)
    title = f'The next word after “{text if len(text) < 80 else "…" + text[-80:]}”'
    write_file(args.out, picture(title, f'weight of {line.split(", which")[0]}', 'probability', lines))
    rows = [[shown(s.encoding, w), *probs[::5, w].tolist()] for w in best]
    return Table(f'The next word at the weight of {line}{not_there(words, ids)}',
                 {'': ''} | {f'{f:g}': '.3f' for f in factors[::5]}, rows, [cropped] if cropped else [])


def plot(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """A picture in the file of --out, and its numbers."""
    table = plot_sweep(subjects[0], args) if args.sweep is not None else plot_losses(args)
    table.notes.append(f'{args.out}: written')
    return table
