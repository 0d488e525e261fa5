"""Claims about rucksack/plot.py: lines go where the numbers are."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from subjects import flags, save, toy_subject

from rucksack.plot import plot


def lines_of(path: str) -> dict[str, np.ndarray]:
    """The named lines of a picture: name -> points (n, 2) in pixels."""
    root, svg = ElementTree.parse(path).getroot(), '{http://www.w3.org/2000/svg}'
    paths = [p.get('d') for p in root.iter(f'{svg}path') if p.get('stroke') and p.get('opacity') is None]
    points = [[point.split() for point in d[1:-2].split('L')] for d in paths if d.endswith('h0')]
    names = [t.text for t in root.iter(f'{svg}text') if t.get('x') == '622.0']
    return {name: np.array(line, float) for name, line in zip(names, points, strict=True)}


def slope(values: list[float], pixels: np.ndarray) -> float:
    """The slope of pixels over values, which lie on a line to a tenth of a pixel."""
    fit = np.polynomial.Polynomial.fit(values, pixels, 1)
    assert np.abs(fit(np.array(values)) - pixels).max() < 0.1
    return fit.convert().coef[1]


def test_losses_are_drawn_where_the_log_has_them(tmp_path, monkeypatch):
    """Lines go through (tokens, log of the validation loss), a Transformer's dashed, under any name."""
    monkeypatch.chdir(tmp_path)
    for name, k, rows in (('<b>&"', 4, '0,,6.7\n64,4.5,\n128,3.5,4.1\n'), ('gpt', 0, '64,4,5.5\n500,,3\n')):
        save(name, toy_subject(k).model)
        Path(name, 'log.csv').write_text(f'tokens,loss,val_loss\n{rows}')
    rows = plot([], flags(runs=['<b>&"', 'gpt'], out='loss.svg')).rows
    lines, text = lines_of('loss.svg'), Path('loss.svg').read_text()
    assert rows == [['Backpack <b>&"', 128 / 1e6, 4.1, 4.1], ['Transformer gpt', 500 / 1e6, 3.0, 3.0]]
    assert [*lines] == [row[0] for row in rows]
    assert re.findall(r'dasharray.*\n<text.*>(.*)<', text) == ['Transformer gpt']
    x, y = np.concatenate([*lines.values()]).T
    assert slope([0, 128, 64, 500], x) > 0 > slope([math.log(loss) for loss in (6.7, 4.1, 5.5, 3)], y)
    assert (min(x), max(x), min(y), max(y)) == (70, 570, 50, 400) and not re.search('href|src|url', text)
