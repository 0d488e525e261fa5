"""What the tables share: models and rows."""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

import tiktoken

from model import SIZES, Backpack
from rucksack import data
from rucksack.checkpoint import newest_backpack
from rucksack.common import UserError, one_line, printable
from rucksack.data import how_to_make, read_bin, read_meta
from rucksack.published import from_pretrained


class Missing(UserError):
    """Data or a run that a table needs is not there; eval.py all goes on with the next table."""


@dataclass
class Subject:
    """A model under evaluation, on its device, and what its ids mean."""

    name: str
    model: Backpack
    encoding: tiktoken.Encoding

    def __post_init__(self) -> None:
        c = self.model.config
        self.kind = 'Backpack' if c.n_sense else 'Transformer'
        self.is_toy = self.model.tokenizer['name'] == 'toy'  # it speaks of the world whose truth is known
        self.device = self.model.wte.weight.device
        shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd)
        papers = c.block_size == 512 and c.n_vocab == 50257 and c.n_sense in (0, 16) \
            and c.sense_hidden == 4 * c.n_embd
        self.size = next((size for size in SIZES if papers and SIZES[size] == shape), None)  # in the paper

    def __str__(self) -> str:
        return f'{self.kind} {self.name}'


@dataclass
class Table:
    """Rows under columns, name -> format. Text stands as it is; None, infinity and NaN print as -."""

    title: str
    columns: dict[str, str]
    rows: list[list]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [[None if isinstance(x, float) and not math.isfinite(x) else x for x in row]
                     for row in self.rows]

    def __str__(self) -> str:
        lines = [list(self.columns)]
        for row in self.rows:
            lines.append(['-' if x is None else x if isinstance(x, str) else format(x, spec)
                          for x, spec in zip(row, self.columns.values())])
        first, *widths = [max(map(len, column)) for column in zip(*lines)]
        text = ['', self.title]
        for name, *cells in lines:
            text.append(f'{name:<{first}}' + ''.join(f'{c:>{w + 2}}' for c, w in zip(cells, widths)))
        return '\n'.join(text + self.notes)


def held_out(subject: Subject, args: argparse.Namespace) -> tuple[list[int], Path]:
    """The ids of val.bin in data/NAME or another folder, or of any .bin, and where it is; by default of what
    the model was trained on, in eval.py all too if --data has none.
    """
    names, trained_on = [args.data] if args.data else [], subject.model.trained_on
    if (not names or args.table == 'all') and isinstance(trained_on, str):
        names.append(trained_on)
    if not names:
        raise Missing(f'{subject.name} does not say what it was trained on; name a folder in data/ by --data')
    paths = [parent / name for name in names for parent in (Path('data'), Path())]
    paths = [path if path.suffix == '.bin' else path / 'val.bin' for path in paths]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise Missing(f'{names[-1]} is no .bin and no folder with val.bin, here or in data/; run '
                      + how_to_make(Path(names[-1])))
    if path.suffix != '.bin' or path.stem not in ('train', 'val'):
        raise UserError(f'{path} is no train.bin and no val.bin; name a folder that prepare.py made')
    meta = read_meta(path.parent)
    ids = read_bin(path.parent, path.stem, meta)
    if meta['tokenizer'] != subject.model.tokenizer or not len(ids):
        raise UserError(f'{path} is empty or of another vocabulary than {subject.name}; take other data')
    return ids.tolist(), path


def read_text(path: Path) -> str:
    """All of a text file, however its lines end."""
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path} cannot be read as text ({one_line(error)}); take another file')


def needs_senses(subject: Subject, table: str) -> None:
    """Raise Missing where a table about senses is asked of a model without."""
    if not subject.model.config.n_sense:
        raise Missing(f'{subject.name} is a Transformer and has no senses; {table} takes a Backpack by '
                      '--from (and the Transformer by --baseline)')


def load(name: str, device: str, model: Backpack | None = None) -> Subject:
    """A model, from a file, folder or the Hub if it is not there yet, on its device."""
    model = model or from_pretrained(name)
    encoding = data.load_tokenizer(model.tokenizer)
    if encoding.n_vocab != model.config.n_vocab:
        raise UserError(f'{name} has {model.config.n_vocab} words, its tokenizer {encoding.n_vocab}')
    return Subject(name, model.to(device).eval(), encoding)


def load_subjects(args: argparse.Namespace) -> list[Subject]:
    """The model of --from and, for a Backpack, its baseline if there is one."""
    name, model = args.source, None
    if name is None:
        model, path = newest_backpack()
        name = str(path.parent)
    subjects, path = [load(name, args.device, model)], Path(name)
    beside = Path(f'{path.parent}_gpt', path.name) if path.suffix == '.pt' else Path(f'{path}_gpt')
    wants = subjects[0].model.config.n_sense and args.table not in ('plot', 'ablation')
    if args.baseline or (wants and (beside.is_file() or (beside / 'ckpt.pt').exists())):
        subjects.append(load(args.baseline or str(beside), args.device))
        if subjects[1].model.config.n_sense:
            raise UserError(f'{subjects[1].name} is a Backpack; --baseline takes a Transformer')
        if subjects[1].model.tokenizer != subjects[0].model.tokenizer:
            raise UserError(f'{subjects[0].name} and {subjects[1].name} have different vocabularies')
    for s in subjects:
        c = s.model.config
        print(printable(f'{s}: {c.n_layer} layers of width {c.n_embd}, {c.n_sense} senses, '
                        f'{c.n_vocab:,} words'))
    if len(subjects) == 1 and wants:
        print(printable(f'no baseline: {beside} is not there; train it with --model=gpt, or name one by '
                        '--baseline'))
    return subjects
