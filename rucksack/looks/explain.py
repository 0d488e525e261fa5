"""All terms of the logit of WORD, or of the logit of A minus that of B, the largest first.

    python -m rucksack explain she/he
"""

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack import senses
from rucksack.loaded import LoadedModel
from rucksack.looks.next_words import next_logits
from rucksack.model import Backpack
from rucksack.table import Table
from rucksack.verbs import look_at_prompts
from rucksack.words import parse_pair, token_texts, word_ids

COLUMNS = {  # name -> format
    'adds': '+.3f',
    'alpha': '.3f',
    'C.E': '+.2f',
    'token': repr,
    'position': 'd',
    'sense': 'd'}


def terms(model: Backpack, encoding: Encoding, idx: Tensor, direction: Tensor,
          C: Tensor | None = None) -> list[dict]:
    """List the T * k terms of senses.explain for a text idx (1, T), with their labels.

    Each is a row for pandas.DataFrame: adds = alpha * C.E, then alpha, C.E (the score
    C . direction), and the token, its position and the sense's number.
    """
    alpha, scores = senses.explain(model, idx, direction, C)  # (1, T, k) each
    numbers, = torch.stack([alpha * scores, alpha, scores], dim=-1).tolist()  # (T, k, 3)
    tokens = token_texts(encoding, idx[0].tolist())
    rows = []
    for i, token in enumerate(tokens):
        for l, of_sense in enumerate(numbers[i]):
            cells = [*of_sense, token, i, l]
            rows.append(dict(zip(COLUMNS, cells)))
    return rows


def explain(loaded: LoadedModel, text: str, idx: Tensor, most: int | None = None) -> Table:
    """List the terms alpha * C . E of the logit of A, or of A minus B, after the model's edit.

    text is A, A/B, or '' for the likeliest word. Rows are the largest most, by default all.
    """
    model = loaded.backpack
    probs = next_logits(model, idx, loaded.edit).softmax(-1)  # (V,)
    ids = [probs.argmax().item()]
    if text:
        words = parse_pair(text) if '/' in text else [text]
        ids = word_ids(loaded.encoding, words)
    E = model.wte.weight[ids]  # (1 or 2, d)
    direction = E[0] - E[1:].sum(0)  # (d,)
    C = senses.senses_after(model, idx, loaded.edit)  # (1, T, k, d)
    found = terms(model, loaded.encoding, idx, direction, C)
    found.sort(key=lambda term: -abs(term['adds']))
    rows = [list(term.values()) for term in found[:most]]
    total = sum(term['adds'] for term in found)
    tokens = token_texts(loaded.encoding, ids)
    logits = ' minus the logit of '.join(map(repr, tokens))
    chances = ', '.join(f'{p:.3f}' for p in probs[ids].tolist())
    title = f'The logit of {logits}, term by term: alpha * C.E (probability {chances})'
    return Table(title, COLUMNS, rows, [f'{total:+.3f}  in all'])


main = look_at_prompts('explain', __doc__, 'WORD|A/B',
                       lambda loaded, word, idx, _: explain(loaded, word, idx))
