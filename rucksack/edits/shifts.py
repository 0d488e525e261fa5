"""A learned edit as data: vectors to add to senses, and the .safetensors file that holds them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiktoken import Encoding
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rucksack.errors import UserError, user_errors
from rucksack.files import atomic
from rucksack.model import Backpack
from rucksack.senses import Edit, add_to_senses


@dataclass(frozen=True)
class Shift:
    """A learned edit: vectors (P, d) to add to the senses numbers (P,) of ids (P,) or (P, L).

    Row p of (P, L) is a sequence of ids; see add_to_senses.
    """

    ids: Tensor
    numbers: Tensor
    vectors: Tensor

    def edit(self, factor: float = 1.0) -> Edit:
        """Make the edit that adds these vectors, times a factor; 0 changes nothing."""
        return add_to_senses(self.ids, self.numbers, factor * self.vectors)


def padded(sequences: list[tuple[int, ...]], device: str | torch.device = 'cpu') -> Tensor:
    """Put sequences of ids into one tensor (sequences, L), with -1 before shorter ones."""
    rows = [torch.tensor(ids, device=device) for ids in sequences]
    return pad_sequence(rows, batch_first=True, padding_value=-1, padding_side='left')


def make_shift(sequences: list[tuple[int, ...]], vectors: Tensor) -> Shift:
    """Make a shift from vectors (P, d) for the k senses of the first sequence, the next, and so on.

    Senses that do not move are left out.
    """
    k = len(vectors) // len(sequences)
    ids = padded(sequences, vectors.device).repeat_interleave(k, dim=0)  # (P, L)
    numbers = torch.arange(k, device=vectors.device).repeat(len(sequences))
    moves = vectors.any(1)
    return Shift(ids[moves], numbers[moves], vectors[moves])


def fingerprint(model: Backpack, encoding: Encoding) -> str:
    """Return a checksum of the vocabulary and all parameters."""
    V = model.config.n_vocab
    digest = hashlib.sha256(encoding.decode_bytes(range(V)))
    for name, parameter in sorted(model.state_dict().items()):
        if name == 'wte.weight':
            parameter = parameter[:V]  # without padding
        digest.update(parameter.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save_shift(path: Path, shift: Shift, model: Backpack, encoding: Encoding, about: dict
               ) -> None:
    """Write a learned edit to a .safetensors file, with what it was learned from (about)."""
    metadata = {'model': fingerprint(model, encoding), 'about': json.dumps(about)}
    with atomic(path) as temporary:
        save_file(vars(shift), temporary, metadata)


def load_shift(path: str | Path, model: Backpack, encoding: Encoding) -> Shift:
    """Read a learned edit; raises UserError if path has none, or has one for another model."""
    path = Path(path).expanduser()
    with user_errors(path, 'it must be a file that rucksack edit wrote'), \
            safe_open(path, 'pt') as file:  # older versions open no file on mps
        if file.metadata()['model'] != fingerprint(model, encoding):
            raise UserError('it was learned for a model with other parameters or another '
                            'vocabulary; learn it again with python -m rucksack edit')
        ids, numbers, vectors = map(file.get_tensor, ('ids', 'numbers', 'vectors'))
    P = len(ids)
    is_whole = numbers.shape == (P,) and vectors.shape == (P, model.config.n_embd)
    if not is_whole or numbers.min() < 0 or not vectors.isfinite().all():
        raise UserError(f'{path} is damaged; learn it again with python -m rucksack edit')
    return Shift(*[
        tensor.to(model.wte.weight.device)
        for tensor in (ids, numbers, vectors)])
