"""Tables 2 and 8: the loss on a held-out text, and what each sense does for it."""

import math
from pathlib import Path

import torch
from torch.nn import functional as F

from rucksack.checkpoint import count_parameters
from rucksack.cli import progress
from rucksack.data import data_id, read_bin, read_meta
from rucksack.documents import read_documents
from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score_and_price, windows


def read_ids(path: Path, loaded: LoadedModel) -> list[int]:
    """Encode the documents of a file, as prepare.py reads them, separated by end-of-text."""
    ids = []
    with user_errors(path, 'choose a text file, a folder or a .bin'):
        for text in read_documents(path):
            ids += [loaded.eot, *loaded.encode(text)]
        if not ids:
            raise ValueError('it is empty')
    return ids[1:]


def held_out(loaded: LoadedModel, data: str | None) -> tuple[list[int], Path]:
    """Read the ids of a held-out text, and return them with its path.

    data is a text file, a folder (in data/ or elsewhere), or a .bin in one. None means the
    training data's val.bin. Raises UserError if that data has changed since training.
    """
    if data is None and loaded.dataset is None:
        raise UserError(f'{loaded.name} does not say what it was trained on; give a text or a '
                        'folder in data/ with --data, such as --data docs/tour.txt')
    path = Path('data', data or loaded.dataset)
    if data and Path(data).exists():
        path = Path(data)
    if path.is_dir():
        path = path / 'val.bin'
    if path.suffix != '.bin':
        return read_ids(path, loaded), path
    meta = read_meta(path.parent)
    ids = read_bin(path, meta)
    if meta['tokenizer'] != loaded.tokenizer:
        raise UserError(f'{path} and {loaded.name} have different tokenizers; prepare the data '
                        f'with --like {loaded.name}')
    is_own = path.parent.name == loaded.dataset
    if is_own and loaded.data_id not in (None, data_id(meta)):
        raise UserError(f'{path.parent} has changed since {loaded.name} was trained on it, so '
                        'val.bin may hold what the model has read; choose a text with --data')
    return ids.tolist(), path


def loss_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """Loss (Tables 2 and 8): perplexity on all of a held-out text.

    Contextual: parameters outside the sense network. Perplexity: exp of the mean loss in nats, in
    blocks of block_size tokens. Each block follows the token before it, and the first follows an
    end-of-text. Bits per byte: the whole loss in bits over the bytes of the text. Use it to compare
    models with different tokenizers.
    """
    ids, path = held_out(loaded, data)
    pairs = windows(ids, loaded.eot, loaded.config.block_size)
    scores = score_and_price(loaded, pairs, 'loss')
    text = loaded.encoding.decode_bytes([i for i in ids if i != loaded.eot])
    n = count_parameters(loaded.model)
    return [{
        'senses': loaded.config.n_sense,
        'parameters, M': n['total'] / 1e6,
        'contextual, M': n['contextualizer'] / 1e6,
        'perplexity': scores.perplexity(),
        'bits per byte': math.log2(scores.perplexity(len(text))),
        'on tokens': len(ids),
        'of': str(path)}]


@torch.no_grad()
def senses_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """What each sense is worth: the loss on a held-out text with this sense off for every word.

    Nats per token: how much the loss grows. Share of o: the sense's part of the weighted sum, by
    norm. (Its share of alpha is always 1/k: the weights of each sense sum to 1.) Alpha on itself:
    the weight that a position gives to this sense of its own token.
    """
    loaded.needs_senses('senses')
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
    return rows
