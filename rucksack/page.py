"""The page of sample.py --html: one file, without a server, in which the whole model runs."""

import base64
import copy
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from model import Backpack
from rucksack.common import UserError, write_file
from rucksack.grammar import predict
from rucksack.paper import NOUNS, PROMPTS
from rucksack.table import Subject

HERE, LARGEST, LARGEST_IN_FLOAT32 = Path(__file__).parent, 40_000_000, 2_000_000  # parameters


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix (m, n) as a scale for each row (m,) and whole numbers (m, n) from -127 to 127."""
    scale = x.abs().amax(1).clamp(min=1e-30) / 127  # (m,)
    return scale, (x / scale[:, None]).round().to(torch.int8)


def rounded(model: Backpack) -> Backpack:
    """The model with each matrix as 8 bits a weight give it."""
    model = copy.deepcopy(model)
    for p in (p for p in model.parameters() if p.dim() == 2):
        scale, whole = in_8_bits(p.data)
        p.data = scale[:, None] * whole
    return model


def agreement(s: Subject) -> str:
    """How well the model in 8 bits agrees with itself on 200 of the paper's prompts (Table 14)."""
    other, same, moves = rounded(s.model), 0, []
    prompts = [prompt.format(noun) for noun in NOUNS for prompt in PROMPTS]
    for prompt in prompts[::len(prompts) // 200][:200]:
        idx = torch.tensor([s.encode(prompt)[-s.model.config.block_size:]], device=s.device)
        p, q = predict(s.model, idx, None), predict(other, idx, None)  # (V,) each
        same += (p.argmax() == q.argmax()).item()
        moves.append((p - q).abs().max())
    return (f"Weights in 8 bits: against float32, on {len(moves)} of the paper's prompts (Table 14), the "
            f'likeliest word is the same in {100 * same / len(moves):.1f}%, and the largest difference of a '
            f'probability is {torch.stack(moves).median():.4f} in the median.')


def write_page(s: Subject, prompt: str, file: Path) -> str:
    """Write the page of a model, which begins with a prompt; returns its size and precision. UserError for a
    model that is too large.
    """
    c, arrays, blob = s.model.config, [], bytearray()
    if (n := s.model.n_params()['total']) > LARGEST:
        raise UserError(f'--html: {s.name} has {n / 1e6:.0f}M parameters; a page takes up to '
                        f'{LARGEST / 1e6:.0f}M')
    small = n > LARGEST_IN_FLOAT32
    for name, x in s.model.state_dict().items():
        x = (x[:c.n_vocab] if name == 'wte.weight' else x).float().cpu()
        parts = in_8_bits(x) if (in_small := small and x.dim() == 2) else (x,)
        arrays.append([name, len(x), x[0].numel(), in_small])
        for part in parts:
            blob += part.numpy().astype(part.numpy().dtype.newbyteorder('<')).tobytes()
    ranks = s.encoding._mergeable_ranks
    precision = agreement(s) if small else 'Weights in float32.'
    data = {'config': vars(c), 'arrays': arrays, 'prompt': prompt, 'about': f'{s.about()}. {precision}',
            'tokenizer': {'tokens': [token.decode('latin-1') for token in sorted(ranks, key=ranks.get)],
                          'toy': s.is_toy}}
    parts = {name: (HERE / name).read_text(encoding='utf-8') for name in ('page.js', 'ui.js')} | {
        'DATA': json.dumps(data, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c'),
        'WEIGHTS': base64.b64encode(blob).decode()}
    page = (HERE / 'page.html').read_text(encoding='utf-8')
    write_file(file, re.sub(r'{{([\w.]+)}}', lambda name: parts[name[1]], page))
    return f'{file.stat().st_size / 1e6:.1f} MB, {n / 1e6:.1f}M parameters. {precision}'
