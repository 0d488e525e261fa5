"""Learn an edit of senses from examples, one a line, and print what it changes and costs.

    python edit.py capitals.txt --from english --out capitals.safetensors
    python sample.py --from english --edit @capitals.safetensors

Each line is a prompt and what should follow it. A few senses of its words are moved so that it
does (arXiv 2402.06155); the parameters of the model stay as they are.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rucksack.cli import HOME, Parser, number, printable, run_cli
from rucksack.errors import UserError, user_errors
from rucksack.examples import FORMS, WISHES, Example
from rucksack.files import output_path
from rucksack.learning import Learned, Shift, learn, lines_of_shift, save_shift
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import examples_for, log_odds, successes
from rucksack.paper.likelihood import windows
from rucksack.sample_tables import ranking, shortened
from rucksack.senses import Edit, extremes
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.toy import toy_stories
from rucksack.words import token_texts

BACKGROUND = HOME / 'docs' / 'tour.txt'  # no bundled model was trained on it
TEXT_LENGTH = 128  # tokens of a text of the background
MOST_TEXTS = 400
FEW_TOKENS = 20
MOST_SENSES = 12  # in the printed table
FORM_HELP = '\n'.join(f'  {form:<20} {wish}' for form, wish in FORMS.items())


# -----------------------------------------------------------------------------
# The command line.


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog='edit.py', description=f'{__doc__}\n\nThe lines:\n{FORM_HELP}',
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('examples', metavar='FILE',
        help='text file with one example per line, or a .jsonl with prefix and suffix (or '
             'suffix1 and suffix2)')
    add('--out', metavar='FILE', type=Path, required=True,
        help='the learned edit, a .safetensors file: sample.py --edit @FILE')
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--wish', choices=WISHES,
        help='what the rows of a .jsonl wish for [more; equal for suffix1 and suffix2]')
    add('--background', metavar='FILE', type=Path,
        help='text on which nothing should change: half of it holds the model, half gives the '
             'price [docs/tour.txt; toy stories for a toy model]')
    add('--budget', metavar='SHARE', type=number(float, 0), default=1e-3,
        help='highest price, as a share of the loss on the background [0.001]')
    add('--senses', metavar='N', type=number(int, 1), default=9,
        help='senses that each example chooses [9]')
    add('--steps', metavar='N', type=number(int, 1, 100_000),
        help='steps of 5 examples [10 passes, at least 30 steps]')
    add('--lr', metavar='RATE', type=number(float, 1e-9, 100),
        help='peak learning rate [5.12 over the width of the model: 0.02 for english]')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for the order of examples [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--csv', metavar='FILE', help='also write the tables to a .csv file')
    return parser


def check_out(path: Path) -> None:
    """Raise UserError if a path cannot have a learned edit, or has a person's file."""
    if path.suffix != '.safetensors' or not path.parent.is_dir():
        raise UserError(f'--out {path}: give a name in a folder that exists, that ends in '
                        '.safetensors')
    if path.exists():
        with user_errors(f'--out {path}', 'give the name of a new file, or of a learned edit'):
            lines_of_shift(path)


def read_background(path: Path | None, loaded: LoadedModel) -> list[list[int]]:
    """Read the background in texts of up to TEXT_LENGTH tokens, each with the token before it."""
    if path is None and loaded.is_toy:
        ids = loaded.encode('\n'.join(story for story, _ in toy_stories(seed=1, n=200)))
    else:
        path = path or BACKGROUND
        with user_errors(path, 'give a text file'):
            ids = loaded.read(path)
    length = min(TEXT_LENGTH, loaded.config.block_size)
    if len(ids) <= length:
        raise UserError(f'{path} has {len(ids)} tokens; a background needs more than {length}')
    pairs = windows(ids, loaded.eot, length)
    texts = [context + continuation for context, continuation in pairs]
    n = min(len(texts), MOST_TEXTS)
    return [texts[i * len(texts) // n] for i in range(n)]  # spread over a long file


# -----------------------------------------------------------------------------
# The tables.


def examples_table(loaded: LoadedModel, examples: list[Example], edit: Edit) -> Table:
    """Show the probability of A for each example, or the odds of A to B, before and after.

    The notes say which examples reach the thresholds of eval.py.
    """
    before = log_odds(loaded, examples)  # (examples,)
    after = log_odds(replace(loaded, edit=edit), examples)
    rows = []
    notes = []
    n_after = 0
    for example, old, new in zip(examples, before, after):
        wish = example.wish
        what = 'p(A)/p(B)' if wish in ('order', 'equal') else 'p(A)'
        rows.append([example.line, what, old.exp().item(), new.exp().item()])
        if successes(old, wish):
            notes.append(f'Fulfilled before the edit: {example.line}')
        if successes(new, wish):
            n_after += 1
    notes.append(f'Fulfilled after the edit: {n_after} of {len(examples)}')
    columns = {'example': shortened, 'what': str, 'before': '.4g', 'after': '.4g'}
    return Table('The examples, before and after the edit', columns, rows, notes)


def senses_table(loaded: LoadedModel, shift: Shift) -> Table:
    """Show how far each sense moved, and the words that it now raises most."""
    model = loaded.model
    lengths, order = shift.vectors.norm(dim=1).sort(descending=True)  # (P,) each
    ids = shift.ids[order]
    numbers = shift.numbers[order]
    C = model.senses(ids)  # (P, k, d)
    C = C[torch.arange(len(ids)), numbers]  # (P, d), the senses that move
    raised, added = extremes(model, C + shift.vectors[order], 4)  # (P, 8) each
    words = token_texts(loaded.encoding, ids.tolist())
    cells = zip(words, numbers.tolist(), lengths.tolist(), C.norm(dim=1).tolist())
    columns = {'word': repr, 'sense': 'd', 'moved by': '.2f', 'length': '.2f'}
    title = (f'The {len(ids)} senses that moved (at most {MOST_SENSES} printed), by how much, '
             'their length before, and the words that they now raise most')
    table = ranking(loaded, title, columns, cells, raised[:, :4], added[:, :4])
    return replace(table, most=MOST_SENSES)


def price_line(learned: Learned, background: Path | str) -> str:
    """Say what the edit costs on the background, in a paragraph."""
    if learned.n_touched == 0:
        return (f'The price is not known, nor held by --budget: of {learned.n_tokens:,} tokens of '
                f'{background}, none has a sense that moved. With --background, give ordinary text '
                'in which your words occur, but are rare: senses of its common words do not move.')
    price = round(learned.price, 5) + 0.0  # no -0.0
    lines = [f'The price: {price:+.5f} nats per token on {learned.n_tokens:,} tokens of '
             f'{background}, {price / learned.loss:.4%} of their {learned.loss:.3f}; '
             f'{learned.n_touched:,} of them have a sense that moved.']
    if learned.n_touched < FEW_TOKENS:
        lines.append('These are few, and text that uses your words costs more: give more text '
                     'with --background.')
    if learned.factor < 1:
        lines.append(f'The vectors were scaled back to {learned.factor:.2f} of what was learned, '
                     'to keep to --budget.')
    return ' '.join(lines)


# -----------------------------------------------------------------------------
# The program.


def run(argv: list[str]) -> None:
    """Read, learn, write the edit, and print its tables."""
    args = make_parser().parse_args(argv)
    check_out(args.out)
    csv_file = output_path('--csv', args.csv, CSV_BEGINS)
    if csv_file and csv_file.resolve() == args.out.resolve():
        raise UserError(f'--out and --csv are both {args.csv}; give two names')
    loaded = load_model(args.source, args.device)
    loaded.needs_senses('edit.py')
    model = loaded.model.requires_grad_(False)
    examples = examples_for(loaded, args.examples, args.wish)
    background = read_background(args.background, loaded)
    learned = learn(model, examples, background, n_senses=args.senses, steps=args.steps,
                    lr=args.lr, budget=args.budget, seed=args.seed)
    tables = {
        'examples': examples_table(loaded, examples, learned.shift.edit()),
        'senses': senses_table(loaded, learned.shift)}
    about = {'examples': [example.line for example in examples], 'senses': args.senses,
             'steps': learned.steps, 'lr': learned.lr, 'factor': learned.factor,
             'budget': args.budget, 'seed': args.seed}
    save_shift(args.out, learned.shift, model, loaded.encoding, about)
    if csv_file:
        write_csv(csv_file, tables)
    print(loaded.about())
    for table in tables.values():
        print(table)
    where = args.background or ('toy stories' if loaded.is_toy else 'docs/tour.txt')
    print(printable(f'\n{price_line(learned, where)}\n{args.out}: written'))


main = partial(run_cli, 'edit.py', run)

if __name__ == '__main__':
    main()
