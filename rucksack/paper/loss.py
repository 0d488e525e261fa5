"""Tables 2 and 8: the loss on a held-out text."""

import math
from pathlib import Path

from rucksack.checkpoint import count_parameters
from rucksack.data import data_folder, data_id, read_bin, read_meta
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
    path = data_folder(data or loaded.dataset)
    if data and Path(data).exists():
        path = Path(data)
    if path.is_dir() or data is None:
        path = path / 'val.bin'
    if path.suffix != '.bin':
        return read_ids(path, loaded), path
    meta = read_meta(path.parent)
    ids = read_bin(path, meta)
    if meta['tokenizer'] != loaded.tokenizer:
        raise UserError(f'{path} and {loaded.name} have different tokenizers; prepare the data '
                        f'with --like {loaded.name}')
    is_changed = loaded.data_id not in (None, data_id(meta))
    if is_changed and path.parent.resolve() == data_folder(loaded.dataset).resolve():
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
