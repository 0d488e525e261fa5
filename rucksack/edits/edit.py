"""Learn an edit of senses from examples, one per line, and print what it changes and costs.

    python -m rucksack edit capitals.txt --from english --out capitals.safetensors
    python sample.py --from english --edit "@capitals.safetensors"

Each line has a prompt and what should, or should not, follow it:

    PROMPT -> A           A should be likelier after PROMPT
    PROMPT -/> A          A should be less likely
    PROMPT -> A > B       A should be likelier than B
    PROMPT -> A | B       A and B should be equally likely

The edit moves senses of what the prompt is about (arXiv 2402.06155), and no parameter of the model.
Mark this subject with braces: The capital of {Finland} is -> Helsinki. Empty braces mean that there
is none. Without braces, it is the words in which lines of one form differ, or the rarest name or
word. To limit side effects, learning also tries to preserve predictions on a background text, on
texts that the model writes from the examples, and after prompts in which another word stands.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import safe_open

import rucksack
from rucksack import verbs
from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits.examples import read_examples
from rucksack.edits.learning import learn
from rucksack.edits.neighbours import (
    BACKGROUND,
    cut,
    matched,
    neighbours_of,
    read_background,
    write_about,
    write_texts,
)
from rucksack.edits.shifts import save_shift
from rucksack.errors import UserError, user_errors
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import measures
from rucksack.paper.likelihood import Pair, measure_edit, score
from rucksack.table import Table


def edit_path(path: str) -> Path:
    """Check that a learned edit may be written to path: a new file, or another learned edit."""
    file = output_path('the edit', path, begins='')
    if file.suffix != '.safetensors':
        raise UserError(f'{path}: give a name that ends in .safetensors')
    if file.exists():
        with user_errors(path, 'give the name of a new file, or of a learned edit'), \
                safe_open(file, 'pt') as opened:
            opened.metadata()['about']
    return file


def make_parser() -> Parser:
    """Declare the flags."""
    parser = verbs.make_parser('edit', __doc__, '--from', '--device')
    add = parser.add_argument
    add('examples', metavar='FILE',
        help='text file with one example per line, or a .jsonl with prefix, suffix (or suffix1 and '
             'suffix2) and perhaps subject and wish (more, less, order or equal)')
    add('--out', metavar='FILE', type=edit_path, required=True,
        help='.safetensors file to write the edit to, for sample.py --edit @FILE')
    add('--also', metavar='FILE',
        help='the same wishes in other phrasings, which are not learned but measured')
    add('--background', metavar='PATH',
        help='text on which no prediction should change, in any form that eval loss --data takes; '
             'half is for training, half for measuring the price of the edit '
             '[docs/tour.txt; toy stories for a toy model]')
    add('--budget', metavar='SHARE', type=number(float, 0), default=1e-3,
        help='largest increase in loss that the edit may cause, as a share of the loss [0.001]')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for the texts that the model writes [0]')
    return parser


def prices(edited: LoadedModel, texts: dict[str, list[Pair]], notes: list[str]) -> Table:
    """Show what an edit costs on texts, and the positions whose likeliest next word changed."""
    rows = []
    for name, pairs in texts.items():
        if pairs:
            before = score(replace(edited, edit=None), pairs, name)
            after = score(edited, pairs, name)
            rows.append([name, *measure_edit(before, after).values()])
    columns = {
        'on': '',
        'tokens': ',',
        'moved': ',',
        'loss': '.3f',
        'price': '+.5f',
        '%': '+.3f',
        'changed': ',',
        'repaired': ',',
        'broken': ','}
    title = ('What the edit costs in nats per token, how many tokens have a moved sense, and how '
             'often the likeliest next word changed')
    return Table(title, columns, rows, notes)


def run(argv: list[str]) -> None:
    """Read the examples, learn an edit, write it, and print its tables."""
    args = make_parser().parse_args(argv)
    loaded = load_model(args.source, args.device)
    loaded.needs_senses('rucksack edit')
    model = loaded.model.requires_grad_(False)
    examples = read_examples(args.examples, loaded)
    background = read_background(args.background, loaded)
    examples, near = neighbours_of(loaded, examples, background)
    shown = examples + near[1::2] + write_about(loaded, examples, args.seed)
    if args.also:
        shown += matched(read_examples(args.also, loaded), examples)
    written = write_texts(model, examples, loaded.eot, args.seed)
    shift, factor = learn(model, examples, background, written=written, near=near,
                          budget=args.budget)
    edited = replace(loaded, edit=shift.edit())
    where = args.background or ('toy stories' if loaded.is_toy else BACKGROUND)
    before, after = cut(background[1::2], examples)
    before_written, after_written = cut(written[1::2], examples)
    after += after_written
    texts = {
        where: before,
        'texts that the model wrote': before_written,
        'both, after a subject': after,
        'the first 8 tokens of these': [(context, rest[:8]) for context, rest in after]}
    notes = [f'The learned vectors are scaled by {factor:.2f}, the most that --budget allows.',
             'The budget leaves out what follows a subject, which has rows of its own.']
    if not all(one.subject for one in examples):
        notes.append('A line without a subject moves senses of any of its words.')
    tables = [measures(edited, shown), prices(edited, texts, notes)]
    about = {
        'examples': [one.line for one in examples],
        'factor': factor,
        'background': where,
        'version': rucksack.__version__}
    save_shift(args.out, shift, model, loaded.encoding, about)
    print(loaded.about())
    for table in tables:
        print(table)
    print(printable(f'{args.out}: written'))


main = partial(run_cli, 'rucksack edit', run)
