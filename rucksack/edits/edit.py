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
word. To limit side effects, learning also holds the predictions on a background text, on texts that
the model writes from the examples, and after prompts in which another word stands.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import rucksack
from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits.examples import WISHES
from rucksack.edits.learning import inside, learn, texts_of
from rucksack.edits.neighbours import BACKGROUND, cut, matched, read_background, write_texts
from rucksack.edits.shifts import about_shift, save_shift
from rucksack.errors import UserError, user_errors
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import examples_for, measures, neighbours_of
from rucksack.paper.likelihood import Pair, measure_edit, score
from rucksack.table import Table


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog='rucksack edit', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('examples', metavar='FILE',
        help='text file with one example per line, or a .jsonl with prefix, suffix (or suffix1 and '
             'suffix2) and perhaps subject')
    add('--out', metavar='FILE', type=Path, required=True,
        help='.safetensors file to write the edit to, for sample.py --edit @FILE')
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--also', metavar='FILE',
        help='the same wishes in other phrasings, which are not learned but measured')
    add('--wish', choices=WISHES,
        help='the wish for all rows of a .jsonl [more; equal for rows with suffix1 and suffix2]')
    add('--background', metavar='PATH',
        help='text on which no prediction should change, in any form that eval loss --data takes; '
             ' half is for training, half for measuring the price of the edit '
             '[docs/tour.txt; toy stories for a toy model]')
    add('--keep', metavar='FILE',
        help='more lines; the predictions after their prompts should stay the same')
    add('--budget', metavar='SHARE', type=number(float, 0), default=1e-3,
        help='largest increase in loss that the edit may cause, as a share of the loss [0.001]')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for the texts that the model writes [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    return parser


def prices(edited: LoadedModel, texts: dict[str, list[Pair]], notes: list[str]) -> Table:
    """Show what an edit costs on texts, and the positions whose likeliest next word changed."""
    rows = []
    for name, pairs in texts.items():
        if pairs:
            before = score(replace(edited, edit=None), pairs, name)
            after = score(edited, pairs, name)
            rows.append([name, *measure_edit(before, after).values()])
    columns = {'on': '', 'tokens': ',', 'moved': ',', 'loss': '.3f', 'price': '+.5f', '%': '+.3f',
               'changed': ',', 'repaired': ',', 'broken': ','}
    title = ('What the edit costs in nats per token, how many tokens have a moved sense, and how '
             'often the likeliest next word changed')
    return Table(title, columns, rows, notes)


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
    loaded.needs_senses('rucksack edit')
    model = loaded.model.requires_grad_(False)
    examples = examples_for(loaded, args.examples, args.wish)
    lines = {name: examples_for(loaded, path, args.wish)
             for name, path in (('generalization', args.also), ('kept', args.keep)) if path}
    keep = lines.get('kept', [])
    background = read_background(args.background, loaded)
    examples, near = neighbours_of(loaded, examples, background)
    lines = {name: matched(group, examples) for name, group in lines.items()}
    written = write_texts(model, examples, loaded.eot, args.seed)
    learned = learn(model, examples, background, written=written, near=near, keep=keep,
                    budget=args.budget)
    edited = replace(loaded, edit=learned.shift.edit())
    where = args.background or ('toy stories' if loaded.is_toy else BACKGROUND)
    before, after = cut(background[1::2], examples)
    before_written, after_written = cut(written[1::2], examples)
    texts = {
        where: before,
        'texts that the model wrote': before_written,
        'both, after a subject': after + after_written,
        'the prompts': inside(examples),
        'what follows the prompts of --keep': texts_of(keep)}
    notes = [f'The learned vectors are scaled by {learned.factor:.2f}, the most that --budget '
             'allows.',
             'The budget leaves out what follows a subject, which has a row of its own.']
    tables = [measures(edited, {'efficacy': examples} | lines, near[1::2]),
              prices(edited, texts, notes)]
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
