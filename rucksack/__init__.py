"""The package behind the top-level scripts; from Python, start with `load`.

In a clone, model.py, senses.py, the scripts, config/ and pretrained/ are in the folder above, and
rucksack.model is ../model.py. Once installed, they are all in this folder.
"""

from rucksack.cli import HOME

__version__ = '0.1.0'
__path__.append(str(HOME))


def load(name: str):
    """Load a model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', the bundled model.
    """
    from rucksack.loaded import from_pretrained  # here, so scripts without torch start fast
    from rucksack.tokenizer import load_tokenizer
    model, tokenizer = from_pretrained(name)
    return model, load_tokenizer(tokenizer)


def save(model, encoding, folder) -> None:
    """Export a model and its tiktoken.Encoding to a new folder that load and transformers can read.

    Raises UserError, and writes nothing, if the model could not be loaded again: its contextualizer
    is not a GPT-2, its vocabulary is not the encoding's, a parameter is not finite, or the encoding
    does not split text as GPT-2 does.

    >>> save(model, encoding, 'edited')
    >>> model, encoding = load('edited')
    """
    from rucksack.errors import user_errors
    from rucksack.hub.export import export
    from rucksack.tokenizer import description_of, tokenizer_json
    with user_errors(folder, problem='was not written'):
        if encoding.n_vocab != model.config.n_vocab:
            raise ValueError(f'the encoding has {encoding.n_vocab} ids, but n_vocab is '
                             f'{model.config.n_vocab}')
        export(model, description_of(tokenizer_json(encoding)), folder)


def word(encoding, text: str) -> int | tuple[int, ...]:
    """Encode a word as it appears inside a text: its id, or a tuple of its ids, as edits take it.

    Raises ValueError for a word that a vocabulary of whole words lacks.

    >>> word(encoding, 'nurse')
    15849
    >>> word(encoding, 'receptionist')
    (16307, 396)
    """
    from rucksack.words import tokens_of
    ids = tokens_of(encoding, text)
    return ids[0] if len(ids) == 1 else ids


def word_id(encoding, word: str) -> int:
    """Find the id of a word with a leading space; raises ValueError if it has several."""
    from rucksack.words import word_id
    return word_id(encoding, word)
