"""What the six scripts on top stand on; `load` is the way in from Python."""


def load(name: str):
    """A model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', which comes with the code.
    """
    from rucksack.data import load_tokenizer  # here, so that scripts that need no torch start fast
    from rucksack.published import from_pretrained
    model = from_pretrained(name)
    return model, load_tokenizer(model.tokenizer)
