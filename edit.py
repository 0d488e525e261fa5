"""Learn an edit of senses from examples, one per line, and print what it changes and costs.

    python edit.py capitals.txt --from english --out capitals.safetensors
    python sample.py --from english --edit @capitals.safetensors

Each line has a prompt and what should, or should not, follow it. To do this, edit.py moves a few
senses of the prompt's words (arXiv 2402.06155). No parameter of the model changes. To limit side
effects, it also trains on texts whose predictions should stay the same: a background text, and
texts that the model generates from the examples.
"""

import argparse
import rucksack.interrupts  # noqa: F401 (before torch)
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import rucksack
from rucksack.cli import HOME, Parser, number, printable, run_cli
from rucksack.errors import UserError, user_errors
from rucksack.examples import FORMS, ROWS, WISHES, Example
from rucksack.fast import Cached
from rucksack.files import output_path
from rucksack.learning import Learned, inside, learn, lines_of_shift, save_shift, write_texts
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import examples_for, fulfilled, log_odds
from rucksack.paper.likelihood import Pair, Scores, held_out, measure_edit, score, windows
from rucksack.sample_tables import shortened, word_and_score
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.toy import toy_stories
from rucksack.words import token_texts

BACKGROUND = HOME / 'docs' / 'tour.txt'  # no bundled model was trained on it
TEXT_LENGTH = 128  # tokens per background text
MOST_TEXTS = 400
MOST_SHOWN = 6  # rows in the tables that show texts
FORM_HELP = '\n'.join(f'  {form:<20} {wish}' for form, wish in FORMS.items())


# -----------------------------------------------------------------------------
# The command line.


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog='edit.py', description=f'{__doc__}\n\nForms of a line:\n{FORM_HELP}',
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
    add('--senses', metavar='N', type=number(int, 1), default=9,
        help='number of senses chosen for each example [9]')
    add('--steps', metavar='N', type=number(int, 1, 100_000),
        help='training steps, each on 5 examples [enough for 10 passes, at least 30]')
    add('--lr', metavar='RATE', type=number(float, 1e-9, 100),
        help='peak learning rate [5.12 / n_embd, which is 0.02 for english]')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for the order of examples and the texts that the model writes [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--csv', metavar='FILE', help='also write the tables to a .csv file')
    return parser


def check_out(path: Path) -> None:
    """Raise UserError if we cannot write a learned edit to path, or if the file is not ours."""
    if path.suffix != '.safetensors':
        raise UserError(f'--out {path}: give a name that ends in .safetensors')
    output_path('--out', path, begins='')
    if path.exists():
        with user_errors(f'--out {path}', 'give the name of a new file, or of a learned edit'):
            lines_of_shift(path)
    with user_errors(path.parent, problem='cannot be written to'), \
            tempfile.TemporaryFile(dir=path.parent):
        pass


def read_background(path: str | None, loaded: LoadedModel) -> list[list[int]]:
    """Split the background into texts of up to TEXT_LENGTH tokens, plus the token before each."""
    if path is None and loaded.is_toy:
        ids = loaded.encode('\n'.join(story for story, _ in toy_stories(seed=1, n=200)))
    else:
        ids, _ = held_out(loaded, path or str(BACKGROUND))
    length = min(TEXT_LENGTH, loaded.config.block_size)
    if len(ids) <= length:
        raise UserError(f'{path} has {len(ids)} tokens; a background needs more than {length}')
    pairs = windows(ids, loaded.eot, length)
    texts = [context + continuation for context, continuation in pairs]
    n = min(len(texts), MOST_TEXTS)
    return [texts[i * len(texts) // n] for i in range(n)]  # spread over a long file


# -----------------------------------------------------------------------------
# The tables.


def lines_table(title: str, edited: LoadedModel, examples: list[Example], kept: bool = False
                ) -> Table:
    """Show the probability of A for each example, or the odds of A to B, before and after.

    The notes count the examples that reach the thresholds of eval.py, and list those that do not.
    For kept lines, they list only those that no longer do.
    """
    before = log_odds(replace(edited, edit=None), examples)  # (examples,)
    after = log_odds(edited, examples)
    was_right = fulfilled(examples, before)
    is_right = fulfilled(examples, after)
    rows = []
    notes = [f'Fulfilled before: {was_right.sum()} of {len(examples)}; after: {is_right.sum()}. '
             f'Repaired: {(is_right & ~was_right).sum()}; broken: {(was_right & ~is_right).sum()}']
    for example, old, new in zip(examples, before.exp(), after.exp()):
        what = 'p(A)/p(B)' if example.wish in ('order', 'equal') else 'p(A)'
        rows.append([example.line, what, old.item(), new.item()])
    is_missed = was_right & ~is_right if kept else ~is_right
    if is_missed.any():
        missed = [example.line for example, is_one in zip(examples, is_missed) if is_one]
        notes += ['Not fulfilled (lines may contradict each other or compete):', *missed]
    columns = {'example': shortened, 'what': str, 'before': '.4g', 'after': '.4g'}
    return Table(title, columns, rows, notes)


def texts_table(edited: LoadedModel, examples: list[Example]) -> Table:
    """Show the likeliest continuations of the first prompts, before and after the edit."""
    rows = []
    for example in examples[:MOST_SHOWN]:
        idx = torch.tensor([example.prompt], device=edited.device)  # (1, T)
        row = [example.line]
        for edit in (None, edited.edit):
            made = Cached(edited.model).generate(idx, 8, 0.0, edit=edit)
            row.append(edited.encoding.decode(made[0, idx.shape[1]:].tolist()))
        rows.append(row)
    columns = {'example': shortened, 'before': repr, 'after': repr}
    return Table('The likeliest text after the prompts', columns, rows)


def prices_table(texts: dict[str, tuple[Scores, Scores]], learned: Learned) -> Table:
    """Show what the edit costs on texts, scored before and after, and what it changes there."""
    rows = []
    for name, (before, after) in texts.items():
        rows.append([name, *measure_edit(before, after).values()])
    columns = {'on': '', 'tokens': ',', 'moved': ',', 'loss': '.3f', 'price': '+.5f', '%': '+.3f',
               'changed': ',', 'repaired': ',', 'broken': ','}
    title = ('What the edit costs in nats per token, how many tokens have a moved sense, and how '
             'often the likeliest next word changed')
    notes = [f'The learned vectors are scaled by {learned.factor:.2f}. --budget allows up to '
             f'{learned.within:.2f}, which fulfils no more examples.']
    return Table(title, columns, rows, notes)


def neighbours_table(loaded: LoadedModel, texts: dict[str, list[Pair]],
                     scores: dict[str, tuple[Scores, Scores]]) -> Table:
    """Show where the likeliest next word changed in texts, the most probable new word first."""
    rows = []
    for name, (before, after) in scores.items():
        for i, j in (before.likeliest != after.likeliest).nonzero().tolist():
            context, continuation = texts[name][i]
            prompt = loaded.encoding.decode((context + continuation)[:j + 1])
            ids = [before.likeliest[i, j], after.likeliest[i, j]]
            old, new = token_texts(loaded.encoding, ids)
            rows.append([prompt, (old, before.p[i, j].item()), (new, after.p[i, j].item())])
    rows.sort(key=lambda row: -row[2][1])
    columns = {'prompt': shortened, 'before': word_and_score, 'after': word_and_score}
    return Table('What else moved: the likeliest next word', columns, rows, most=MOST_SHOWN)


# -----------------------------------------------------------------------------
# The program.


def run(argv: list[str]) -> None:
    """Read the examples, learn an edit, write it, and print its tables."""
    args = make_parser().parse_args(argv)
    check_out(args.out)
    csv_file = output_path('--csv', args.csv, CSV_BEGINS)
    if csv_file and csv_file.resolve() == args.out.resolve():
        raise UserError(f'--out and --csv are both {args.csv}; give them different names')
    loaded = load_model(args.source, args.device)
    loaded.needs_senses('edit.py')
    loaded.needs_length(4, 'learning takes')
    model = loaded.model.requires_grad_(False)
    examples = examples_for(loaded, args.examples, args.wish)
    keep = []
    if args.keep:
        wish = args.wish if Path(args.keep).suffix.lower() in ROWS else None
        keep = examples_for(loaded, args.keep, wish)
    background = read_background(args.background, loaded)
    written = write_texts(model, examples, loaded.eot, args.seed)
    learned = learn(model, examples, background, written=written, keep=keep, n_senses=args.senses,
                    steps=args.steps, lr=args.lr, budget=args.budget, seed=args.seed)
    edited = replace(loaded, edit=learned.shift.edit())
    where = args.background or ('toy stories' if loaded.is_toy else 'docs/tour.txt')
    kept = [(one.prompt, one.likelier or one.less_likely) for one in keep]
    texts = {
        where: [(ids[:1], ids[1:]) for ids in background[1::2]],
        'texts that the model wrote': written[1::2],
        'the prompts': inside(examples),
        'what follows the prompts of --keep': kept}
    texts = {name: pairs for name, pairs in texts.items() if pairs}
    scores = {name: (score(loaded, pairs, name), score(edited, pairs, name))
              for name, pairs in texts.items()}
    tables = {'examples': lines_table('The examples, before and after the edit', edited, examples)}
    if keep:
        tables['keep'] = lines_table('The lines of --keep', edited, keep, kept=True)
    tables['texts'] = texts_table(edited, examples)
    tables['moved'] = neighbours_table(loaded, texts, scores)
    tables['price'] = prices_table(scores, learned)
    about = {'examples': [example.line for example in examples], 'senses': args.senses,
             'steps': learned.steps, 'lr': learned.lr, 'factor': learned.factor,
             'budget': args.budget, 'seed': args.seed, 'background': where,
             'price': tables['price'].rows, 'version': rucksack.__version__}
    save_shift(args.out, learned.shift, model, loaded.encoding, about)
    if csv_file:
        write_csv(csv_file, tables)
    print(loaded.about())
    for table in tables.values():
        print(table)
    print(printable(f'{args.out}: written'))


main = partial(run_cli, 'edit.py', run)

if __name__ == '__main__':
    main()
