"""The package behind the top-level scripts; from Python, start with `load`.

In a clone, the lessons stand in the folder above: rucksack.model is ./model.py, and rucksack.senses
is ./senses.py.
"""

from pathlib import Path

ABOVE = Path(__file__).parents[1]
if not Path(__file__).with_name('model.py').exists():
    __path__.append(str(ABOVE))


def load(name: str):
    """Load a model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', the bundled model.
    """
    from rucksack.published import from_pretrained  # here, so that scripts without torch start fast
    from rucksack.tokenizer import load_tokenizer
    model, tokenizer = from_pretrained(name)
    return model, load_tokenizer(tokenizer)
