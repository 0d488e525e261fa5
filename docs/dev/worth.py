"""Measure what each sense is worth: the loss on a text with this sense off for every word.

    python -m docs.dev.worth english docs/tour.txt

Nats per token: how much the loss grows. Share of o: the sense's part of the weighted sum, by norm.
(Its share of alpha is always 1/k: the weights of each sense sum to 1.) Alpha on itself: the weight
that a position gives to this sense of its own token.
"""

import argparse
import math

import pandas
import torch
from torch.nn import functional as F

from rucksack.cli import progress, run_cli
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.likelihood import windows
from rucksack.paper.loss import held_out


@torch.no_grad()
def worth_of_senses(loaded: LoadedModel, data: str) -> pandas.DataFrame:
    """Measure each sense of a Backpack on a text that eval loss could read: (k + 1) rows."""
    loaded.needs_senses('worth.py')
    ids, _ = held_out(loaded, data)
    model = loaded.model
    k = model.config.n_sense
    sums = torch.zeros(3, k + 1).double()  # at l: losses without sense l, or, for l = k, with all
    pairs = windows(ids, loaded.eot, model.config.block_size)
    for context, block in progress(pairs, f'senses, {loaded.name}'):
        idx = torch.tensor([context + block[:-1]], device=loaded.device)  # (1, T)
        targets = torch.tensor(block, device=loaded.device)  # (T,)
        with loaded.autocast():
            alpha = model.alpha(idx)[0]  # (k, T, T)
            C = model.senses(idx)[0].transpose(0, 1)  # (k, T, d)
            parts = alpha @ C.to(alpha)  # (k, T, d), o_l, what sense l adds to o
            o = parts.sum(0)  # (T, d), Eq. 2
            for l, output in enumerate([*(o - parts), o]):
                logits = model.project(output)[:, :model.config.n_vocab]  # (T, V), Eq. 9
                loss = F.cross_entropy(logits.float(), targets, reduction='sum')
                sums[0, l] += loss.item()
        lengths = parts.norm(dim=-1)  # (k, T)
        on_itself = alpha.diagonal(dim1=-2, dim2=-1)  # (k, T)
        sums[1, :k] += (lengths / lengths.sum(0)).sum(1).cpu()
        sums[2, :k] += on_itself.sum(1).cpu()
    nats, share, on_itself = (sums / len(ids)).tolist()  # (k + 1,) each
    rows = []
    for l, name in enumerate([*range(k), 'none']):
        rows.append({
            'sense off': name,
            'perplexity': math.exp(nats[l]),
            'nats per token': nats[l] - nats[k],
            'share of o %': 100 * share[l],
            'alpha on itself %': 100 * on_itself[l]})
    return pandas.DataFrame(rows)


def run(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='a Backpack')
    parser.add_argument('data', metavar='TEXT', help='a text, or a folder in data/')
    args = parser.parse_args(argv)
    rows = worth_of_senses(load_model(args.name, 'cpu'), args.data)
    print(rows.to_string(index=False, float_format='{:.4f}'.format))


if __name__ == '__main__':
    run_cli('worth.py', run)
