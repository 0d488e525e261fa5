"""Learn an edit of senses from examples, one per line, and print what it changes and costs.

    python edit.py capitals.txt --from english --out capitals.safetensors
    python sample.py --from english --edit @capitals.safetensors

Each line has a prompt and what should, or should not, follow it:

    PROMPT -> A           A should be likelier after PROMPT
    PROMPT -/> A          A should be less likely
    PROMPT -> A > B       A should be likelier than B
    PROMPT -> A | B       A and B should be equally likely

To do this, edit.py moves a few senses of the prompt's words (arXiv 2402.06155). No parameter of the
model changes. To limit side effects, it also trains on texts whose predictions should stay the
same: a background text, and texts that the model generates from the examples.
"""

import argparse
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

import torch

import rucksack
from rucksack.cli import HOME, Parser, number, printable, run_cli
from rucksack.edits.examples import WISHES, Example
from rucksack.edits.learning import inside, learn, texts_of, write_texts
from rucksack.edits.shifts import about_shift, save_shift
from rucksack.errors import UserError, user_errors
from rucksack.fast import Cached
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import examples_for, fulfilled, log_odds
from rucksack.paper.likelihood import Pair, measure_edit, score, windows
from rucksack.paper.loss import held_out
from rucksack.table import Table, shortened
from rucksack.toy import toy_stories

BACKGROUND = 'docs/tour.txt'  # no bundled model was trained on it
TEXT_LENGTH = 128  # tokens per background text
MOST_TEXTS = 400
MOST_SHOWN = 6  # rows in the tables that show texts


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog='rucksack edit', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('examples', metavar='FILE',
        help='text file with one example per line, or a .jsonl with prefix and suffix (or '
             'suffix1 and suffix2)')
    add('--out', metavar='FILE', type=Path, required=True,
        help='.safetensors file to write the edit to, for sample.py --edit @FILE')
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--wish', choices=WISHES,
        help='the wish for all rows of a .jsonl [more; equal for rows with suffix1 and suffix2]')
    add('--background', metavar='PATH',
        help='text on which no prediction should change, in any form that eval.py loss --data '
             'takes; half is for training, half for measuring the price of the edit '
             '[docs/tour.txt; toy stories for a toy model]')
    add('--keep', metavar='FILE',
        help='more lines; the predictions after their prompts should stay the same')
    add('--budget', metavar='SHARE', type=number(float, 0), default=1e-3,
        help='largest increase in loss that the edit may cause, as a share of the loss [0.001]')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for the texts that the model writes [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    return parser


def read_background(path: str | None, loaded: LoadedModel) -> list[Pair]:
    """Split the background into texts of up to TEXT_LENGTH tokens, after the token before each."""
    if path is None and loaded.is_toy:
        ids = loaded.encode('\n'.join(story for story, _ in toy_stories(seed=1, n=200)))
    else:
        ids, _ = held_out(loaded, path or str(HOME / BACKGROUND))
    pairs = windows(ids, loaded.eot, min(TEXT_LENGTH, loaded.config.block_size))
    if len(pairs) < 2:
        raise UserError(f'{path} has only {len(ids)} tokens; give a longer background')
    return pairs[::ceil(len(pairs) / MOST_TEXTS)]  # spread over a long file


# -----------------------------------------------------------------------------
# The tables.


def lines_table(title: str, edited: LoadedModel, examples: list[Example], kept: bool = False
                ) -> Table:
    """Show the probability of A for each example, or the odds of A to B, before and after.

    The notes count the examples that reach the thresholds of eval.py, and list those that do not
    or, for kept lines, that no longer do.
    """
    before = log_odds(replace(edited, edit=None), examples)  # (examples,)
    after = log_odds(edited, examples)
    was_right = fulfilled(examples, before)
    is_right = fulfilled(examples, after)
    is_broken = was_right & ~is_right
    rows = []
    for one, old, new in zip(examples, before.exp().tolist(), after.exp().tolist()):
        rows.append([one.line, 'p(A)/p(B)' if one.b else 'p(A)', old, new])
    notes = [f'Fulfilled before: {was_right.sum()} of {len(examples)}; after: {is_right.sum()}. '
             f'Repaired: {(is_right & ~was_right).sum()}; broken: {is_broken.sum()}']
    is_missed = is_broken if kept else ~is_right
    if is_missed.any():
        notes.append('Not fulfilled (lines may contradict each other or compete):')
        notes += [examples[i].line for i in is_missed.nonzero()]
    columns = {'example': shortened, 'what': str, 'before': '.4g', 'after': '.4g'}
    return Table(title, columns, rows, notes)


def texts_table(edited: LoadedModel, examples: list[Example]) -> Table:
    """Show the likeliest continuations of the first prompts, before and after the edit."""
    rows = []
    for one in examples[:MOST_SHOWN]:
        idx = torch.tensor([one.prompt], device=edited.device)  # (1, T)
        row = [one.line]
        for edit in (None, edited.edit):
            made = Cached(edited.model).generate(idx, 8, 0.0, edit=edit)
            row.append(edited.encoding.decode(made[0, idx.shape[1]:].tolist()))
        rows.append(row)
    columns = {'example': shortened, 'before': repr, 'after': repr}
    return Table('The likeliest text after the prompts', columns, rows)


def effects(edited: LoadedModel, texts: dict[str, list[Pair]], note: str) -> list[Table]:
    """Show the positions of texts whose likeliest next word changed, and what the edit costs."""
    moved = []
    prices = []
    for name, pairs in texts.items():
        if not pairs:
            continue
        before = score(replace(edited, edit=None), pairs, name)
        after = score(edited, pairs, name)
        prices.append([name, *measure_edit(before, after).values()])
        for i, j in (before.likeliest != after.likeliest).nonzero().tolist():
            context, continuation = pairs[i]
            prompt = edited.encoding.decode((context + continuation)[:j + 1])
            words = [edited.encoding.decode([scores.likeliest[i, j].item()])
                     for scores in (before, after)]
            moved.append([prompt, *words, after.p[i, j].item()])
    moved.sort(key=lambda row: -row[3])  # by the probability of the new word
    columns = {'prompt': shortened, 'before': repr, 'after': repr, 'p(after)': '.2f'}
    what_moved = Table('What else moved: the likeliest next word', columns, moved, most=MOST_SHOWN)
    columns = {'on': '', 'tokens': ',', 'moved': ',', 'loss': '.3f', 'price': '+.5f', '%': '+.3f',
               'changed': ',', 'repaired': ',', 'broken': ','}
    title = ('What the edit costs in nats per token, how many tokens have a moved sense, and how '
             'often the likeliest next word changed')
    return [what_moved, Table(title, columns, prices, [note])]


# -----------------------------------------------------------------------------
# The program.


def run(argv: list[str]) -> None:
    """Read the examples, learn an edit, write it, and print its tables."""
    args = make_parser().parse_args(argv)
    if args.out.suffix != '.safetensors':
        raise UserError(f'--out {args.out}: give a name that ends in .safetensors')
    output_path('--out', args.out, begins='')
    if args.out.exists():
        with user_errors(f'--out {args.out}', 'give the name of a new file, or of a learned edit'):
            about_shift(args.out)
    loaded = load_model(args.source, args.device)
    loaded.needs_senses('edit.py')
    model = loaded.model.requires_grad_(False)
    examples = examples_for(loaded, args.examples, args.wish)
    keep = examples_for(loaded, args.keep, args.wish) if args.keep else []
    background = read_background(args.background, loaded)
    written = write_texts(model, examples, loaded.eot, args.seed)
    learned = learn(model, examples, [[*context, *rest] for context, rest in background],
                    written=written, keep=keep, budget=args.budget)
    edited = replace(loaded, edit=learned.shift.edit())
    where = args.background or ('toy stories' if loaded.is_toy else BACKGROUND)
    texts = {
        where: background[1::2],
        'texts that the model wrote': written[1::2],
        'the prompts': inside(examples),
        'what follows the prompts of --keep': texts_of(keep)}
    tables = [lines_table('The examples, before and after the edit', edited, examples)]
    if keep:
        tables.append(lines_table('The lines of --keep', edited, keep, kept=True))
    tables.append(texts_table(edited, examples))
    note = f'The learned vectors are scaled by {learned.factor:.2f}, the most that --budget allows.'
    tables += effects(edited, texts, note)
    about = {'examples': [one.line for one in examples], 'factor': learned.factor,
             'price': learned.price, 'background': where, 'version': rucksack.__version__}
    save_shift(args.out, learned.shift, model, loaded.encoding, about)
    print(loaded.about())
    for table in tables:
        print(table)
    print(printable(f'{args.out}: written'))


main = partial(run_cli, 'rucksack edit', run)

if __name__ == '__main__':
    main()
