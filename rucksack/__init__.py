"""What the six scripts on top stand on; `load` is the way in from Python."""


def load(name: str):
    """A model for evaluation, on the CPU, and its tiktoken.Encoding.

    name is a checkpoint, the folder of a run or an export, a model on the Hugging Face Hub, or
    'english', which comes with the code.
    """
    from rucksack.published import from_pretrained  # here, so that scripts without torch start fast
    from rucksack.tokenizer import load_tokenizer
    model = from_pretrained(name)
    return model, load_tokenizer(model.tokenizer)
