"""The package behind the top-level scripts; from Python, start with `load`.

In a clone, the lessons, the scripts, config/ and pretrained/ stand in the folder above, and
rucksack.model is ../model.py. Installed, all of them are in this folder.
"""

from rucksack.cli import HOME

if str(HOME) not in __path__:
    __path__.append(str(HOME))


def load(name: str):
    """Load a model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', the bundled model.
    """
    from rucksack.tokenizer import load_tokenizer
    from rucksack.weights import from_pretrained  # here, so that scripts without torch start fast
    model, tokenizer = from_pretrained(name)
    return model, load_tokenizer(tokenizer)


def word_id(encoding, word: str) -> int:
    """Find the id of a word inside a text, with its leading space; ValueError if it has several."""
    from rucksack.words import word_id
    return word_id(encoding, word)
