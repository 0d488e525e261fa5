"""One HTML file that runs a model in the browser, with a slider for each sense.

    python -m rucksack page nurse.html --start "The nurse said that"
"""

import base64
import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rucksack.cli import run_cli
from rucksack.edits.lines import LINE
from rucksack.errors import UserError
from rucksack.files import output_path, write_file
from rucksack.loaded import LoadedModel, load_model
from rucksack.model import Backpack
from rucksack.verbs import make_parser
from rucksack.words import PROMPT

HERE = Path(__file__).parent
PAGE_BEGINS = """<!DOCTYPE html>
<!-- The template for rucksack page FILE, which fills in weights and scripts. -->
"""  # identifies pages that we may replace
LARGEST = 40_000_000  # parameters
LARGEST_IN_FLOAT32 = 2_000_000
# Texts after which the bundled model predicts a wrong word, a. The edit makes it predict b.
WRONG_PREDICTIONS = [
    {'text': 'The male nurse smiled when', 'edit': 'nurse:10', 'a': 'she', 'b': 'he'},
    {'text': 'All birds lay', 'edit': 'lay:0', 'a': 'in', 'b': 'eggs'},
    {'text': 'They live in Florida. Their house is in Melbourne,', 'edit': 'Melbourne:14',
     'a': 'Victoria', 'b': 'Florida'}]


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (m, n) to a scale for each row (m,) times whole numbers (m, n) up to 127."""
    scale = x.abs().amax(1).clamp(min=1e-30) / 127  # (m,)
    whole = (x / scale[:, None]).round()
    return scale, whole.to(torch.int8)


def packed(model: Backpack, in_bytes: bool) -> tuple[list[list], bytes]:
    """Pack the weights for the page: a description of each, and the bytes of all.

    A description is [name, rows, columns, whether it is in 8 bits].
    """
    arrays = []
    blob = bytearray()
    for name, x in model.state_dict().items():
        if name == 'wte.weight':
            x = x[:model.config.n_vocab]  # without padding
        is_small = in_bytes and x.dim() == 2
        arrays.append([name, len(x), x[0].numel(), is_small])
        parts = in_8_bits(x) if is_small else [x]
        for part in parts:
            blob += part.cpu().numpy().tobytes()  # little-endian on all common machines
    return arrays, bytes(blob)


def write_page(loaded: LoadedModel, prompt: str, file: str | Path) -> str:
    """Write the page of a model with its first prompt; returns a sentence about the page's size.

    Raises UserError for a model that is too large, or whose ids a page cannot number.
    """
    path = output_path('page', file, PAGE_BEGINS)
    n = sum(p.numel() for p in loaded.backpack.parameters())
    if n > LARGEST or 'special' in loaded.tokenizer:
        raise UserError(f'{loaded.name} has {n:,} parameters; a page takes up to {LARGEST:,}, and '
                        "ids in GPT-2's order")
    in_bytes = n > LARGEST_IN_FLOAT32
    precision = 'Weights are stored in float32.'
    if in_bytes:
        precision = ('Weights are stored in 8 bits, so probabilities differ a little from those of '
                     'sample.py.')
    arrays, blob = packed(loaded.model, in_bytes)
    encoding = loaded.encoding
    tokens = [
        encoding.decode_single_token_bytes(i).decode('latin-1')
        for i in range(encoding.n_vocab - 1)]  # without end-of-text
    data = {
        'config': asdict(loaded.config),
        'arrays': arrays,
        'prompt': prompt,
        'line': LINE.replace('?P<', '?<'),  # as JavaScript names groups
        'wrong': WRONG_PREDICTIONS if loaded.name == 'english' else [],
        'about': f'{loaded.about()}. {precision}',
        'tokenizer': {'tokens': tokens, 'words': loaded.is_toy}}
    parts = {
        name: (HERE / name).read_text(encoding='utf-8')
        for name in ('page.html', 'model.js', 'ui.js')}
    parts['DATA'] = json.dumps(data).replace('<', '\\u003c')
    parts['WEIGHTS'] = base64.b64encode(blob).decode()
    page = re.sub(r'{{([\w.]+)}}', lambda name: parts[name[1]], parts['page.html'])
    write_file(path, page)
    return f'{path.stat().st_size / 1e6:.1f} MB, {n / 1e6:.1f}M parameters. {precision}'


def run(argv: list[str]) -> None:
    """Write the page, and print its size."""
    parser = make_parser('page', __doc__, '--from')
    parser.add_argument('file', metavar='FILE')
    parser.add_argument('--start', metavar='TEXT', default=PROMPT,
                        help=f'the text in its box [{PROMPT}]')
    flags = parser.parse_args(argv)
    loaded = load_model(flags.source, 'cpu')
    size = write_page(loaded, flags.start, flags.file)
    print(f'{loaded.about()}\n{flags.file}: {size}')


main = partial(run_cli, 'rucksack page', run)
