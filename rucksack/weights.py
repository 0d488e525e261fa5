"""Load a model by its name: our checkpoint, published weights, or a bundled model."""

import math
from pathlib import Path

from rucksack.checkpoint import from_checkpoint, load_file
from rucksack.errors import UserError, user_errors
from rucksack.hub.find import find, tokenizer_of
from rucksack.model import GPT, Backpack
from rucksack.tokenizer import vocab_size


def from_pretrained(source: str | Path) -> tuple[Backpack | GPT, dict | None]:
    """Load a model for evaluation, on the CPU, and the description of its tokenizer.

    source is a checkpoint of train.py or its folder; a folder with config.json and weights in the
    format of stanfordnlp/backpack-gpt2 or gpt2; the name of such a repository on the Hugging Face
    Hub; or a bundled model, such as 'english'. Raises UserError if the files do not match.
    """
    from rucksack.hub.published import from_nanogpt, from_published
    path = find(source)
    tokenizer = tokenizer_of(path)
    checkpoint = load_file(path) if path.is_file() else None
    with user_errors(path):
        n_ids = vocab_size(tokenizer) if tokenizer else math.inf
        if checkpoint is None:
            model = from_published(path, n_ids)
        elif 'model_args' in checkpoint:
            model = from_nanogpt(checkpoint, n_ids)
        else:
            model = from_checkpoint(checkpoint)
        n_vocab = model.config.n_vocab
        if tokenizer and n_ids != n_vocab:
            raise UserError(f'its tokenizer has {n_ids:,} ids, but its model has {n_vocab:,}; use '
                            'the tokenizer of the model')
    return model, tokenizer
