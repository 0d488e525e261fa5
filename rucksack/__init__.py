"""The package behind the top-level scripts; from Python, start with `load`."""


def load(name: str):
    """Load a model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', the bundled model.
    """
    from rucksack.published import from_pretrained  # here, so that scripts without torch start fast
    from rucksack.tokenizer import load_tokenizer
    model = from_pretrained(name)
    return model, load_tokenizer(model.tokenizer)
