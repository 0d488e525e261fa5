"""The model that a command works on: its weights on a device, its tokenizer and its name."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rucksack.checkpoint import from_checkpoint, load_file
from rucksack.cli import printable
from rucksack.device import find_device
from rucksack.errors import UserError, user_errors
from rucksack.hub.find import find, tokenizer_of
from rucksack.model import GPT, Backpack
from rucksack.senses import Edit
from rucksack.tokenizer import load_tokenizer, vocab_size
from rucksack.words import inside_text


@dataclass
class LoadedModel:
    """A model on its device, with its tokenizer and its name."""

    name: str
    model: Backpack | GPT
    tokenizer: dict  # description of the tokenizer
    dtype: str = 'float32'  # for scores and texts
    why: str = ''  # why we chose this model, if the user named none
    edit: Edit | None = None  # applied when the model scores or explains texts
    dataset: str | None = None  # the data folder it was trained on, if its checkpoint says so
    data_id: str | None = None  # identifies that data (see rucksack.data)
    kind: str = ''  # Backpack or Transformer
    lender: Backpack | None = None  # the model whose senses this one follows, if it borrows some

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.device = next(self.model.parameters()).device
        self.encoding = load_tokenizer(self.tokenizer)
        self.kind = self.kind or ('Backpack' if self.config.n_sense else 'Transformer')
        self.is_toy = self.encoding.name == 'words'  # its texts come from rucksack/toy.py
        self.eot = self.encoding.eot_token

    def __str__(self) -> str:
        return f'{self.kind} {self.name}'

    def encode(self, text: str) -> list[int]:
        """Encode a text; special tokens count as text."""
        return self.encoding.encode_ordinary(text)

    def read_prompt(self, text: str) -> Tensor:
        """Encode a prompt, or its end if it is too long: ids (1, T), an end-of-text for ''."""
        ids = self.encode(text) or [self.eot]
        n = self.config.block_size
        if len(ids) > n:
            print(f'The prompt has {len(ids)} tokens; the model reads the last {n}.')
        if text.endswith(' '):
            print('The prompt ends in a space; drop it: the next word begins with one.')
        return torch.tensor([ids[-n:]], device=self.device)

    def single_tokens(self, words: list[str]) -> list[str]:
        """Keep the words that are one token inside a text."""
        return [
            word for word in words
            if len(self.encode(inside_text(word))) == 1]

    def autocast(self) -> torch.autocast:
        """Return the autocast context in which the model scores and writes texts."""
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.dtype == 'bfloat16')

    def about(self) -> str:
        """Describe the model in one line."""
        c = self.config
        shape = f'{c.n_layer} layers of width {c.n_embd}, {c.n_sense} senses'
        return printable(f'{self}: {shape}, a vocabulary of {c.n_vocab:,} tokens{self.why}')

    @property
    def backpack(self) -> Backpack:
        """Return the model whose senses can be shown and edited; raises UserError without one."""
        self.needs_senses('this command')
        return self.lender or self.model

    def needs_senses(self, what: str) -> None:
        """Raise UserError if this is a Transformer; the message says what needs a Backpack."""
        if not self.config.n_sense:
            raise UserError(f'{self.name} is a Transformer and has no senses; '
                            f'{what} needs a Backpack')

    def needs_length(self, n: int, what: str) -> None:
        """Raise UserError if the model cannot read n tokens; what is, e.g., 'a prompt has'."""
        block_size = self.config.block_size
        if n > block_size:
            raise UserError(f'{self.name} reads at most {block_size} tokens, but {what} {n}; '
                            'choose a model with a larger block_size')


def from_pretrained(source: str | Path) -> tuple[Backpack | GPT, dict]:
    """Load a model for evaluation, on the CPU, and the description of its tokenizer.

    source is a checkpoint of train.py or its folder; a folder with config.json and weights in the
    format of stanfordnlp/backpack-gpt2 or gpt2; the name of such a repository on the Hugging Face
    Hub; or a bundled model, such as 'english'. Raises UserError if the files do not match.
    """
    from rucksack.hub.published import from_published
    path = find(source)
    tokenizer = tokenizer_of(path)
    with user_errors(path):
        n_ids = vocab_size(tokenizer)
        if path.is_dir():
            model = from_published(path, n_ids)
        else:
            model = from_checkpoint(load_file(path))
        if n_ids != model.config.n_vocab:
            raise UserError(f'its tokenizer has {n_ids:,} ids, its model another number; use the '
                            'tokenizer of the model')
    return model, tokenizer


def load_model(name: str | None, device: str, dtype: str | None = None) -> LoadedModel:
    """Load a model from a file, folder or Hub name onto a device; see find_device for names.

    The default model is the newest Backpack in out/ or, if there is none, the bundled model.
    The default dtype is bfloat16 on CUDA, else float32.
    """
    device = find_device(device)
    if dtype is None:
        dtype = 'bfloat16' if device.startswith('cuda') else 'float32'
    why = ''
    if name is None:
        name = newest_backpack()
        why = '; the newest in out/ (for real English: --from english)'
        if name == 'english':
            why = '; the bundled model'
        why += '. Sense numbers differ between models.'
    path = find(name)
    model, tokenizer = from_pretrained(path)
    checkpoint = load_file(path, mmap=True) if path.is_file() else {}
    dataset = checkpoint.get('settings', {}).get('dataset')
    return LoadedModel(
        name,
        model.to(device),
        tokenizer,
        dtype,
        why,
        dataset=dataset,
        data_id=checkpoint.get('data'))


def newest_backpack() -> str:
    """Name the folder in out/ whose Backpack was saved last, or else english."""
    files = sorted(
        Path('out').glob('*/ckpt.pt'),
        key=lambda path: path.stat().st_mtime)
    for path in reversed(files):
        config = load_file(path, mmap=True).get('model_config', {})
        if config.get('n_sense'):
            return str(path.parent)
    return 'english'
