"""The tables of the paper, one command each: a Backpack, and beside it the Transformer it is compared with.

    python eval.py all                                    every table that the data at hand allows
    python eval.py gender --from out/small --baseline out/small_gpt
    python eval.py lambada --from stanfordnlp/backpack-gpt2 --data lambada_test.jsonl --json lambada.json

    loss         Table 2             perplexity on the held-out part of the training data
    lambada      Table 2             the last word of a passage
    wikitext     Table 2             perplexity per word of WikiText's raw test set
    blimp        Table 2             which of two sentences is the grammatical one
    similarity   Table 4             how alike two words are, by each sense
    gender       Table 5             she or he after a role noun, with and without a sense
    topic        Table 12, Figure 2  control of the topic, beside PPLM on the Transformer
    timing       Table 7             forward pass, training step and generation
    ablation     Table 8             runs that differ in the number of senses
    cost         not in the paper    a training step as batch, length, senses and size grow; not among all
    plot         Figure 3            a picture: the losses of runs, or next words as senses are turned down

    python eval.py plot out/toy out/toy_gpt --out loss.svg
    python eval.py plot --sweep nurse:she/he --out sweep.svg
"""

import argparse
import json
import sys
from pathlib import Path

from model import SIZES
from rucksack.common import Parser, UserError, answer, find_device, number, place_for, printable, write_file
from rucksack.grammar import PROMPT
from rucksack.likelihood import ablation_table, blimp_table, lambada_table, loss_table, wikitext_table
from rucksack.plot import plot
from rucksack.table import Missing, Subject, Table, load_subjects, needs_senses
from rucksack.timing import cost_table, timing_table
from rucksack.topics import topic_table
from rucksack.words import gender_table, similarity_table

# -----------------------------------------------------------------------------
# The command line.

TABLES = {'loss': loss_table, 'lambada': lambada_table, 'wikitext': wikitext_table, 'blimp': blimp_table,
          'similarity': similarity_table, 'gender': gender_table, 'topic': topic_table,
          'timing': timing_table, 'ablation': ablation_table, 'cost': cost_table, 'plot': plot}
NOT_IN_ALL = ('cost', 'plot')
OF_SENSES = ('similarity', 'gender', 'topic', 'timing', 'ablation', 'plot')
ONLY_WITH = {'first': ('similarity', 'all'), 'sense': ('gender', 'all'), 'texts': ('topic', 'all'),
             'length': ('topic', 'all'), 'seed': ('topic', 'all'), 'step_sizes': ('topic', 'all'),
             'runs': ('ablation', 'plot'), 'out': ('plot',), 'sweep': ('plot',), 'start': ('plot',)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(
        prog='eval.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('table', choices=['all', *TABLES], metavar='TABLE', help='one of the above, or all')
    add('runs', nargs='*', metavar='RUN', default=[],
        help='plot: runs; ablation: runs (default: those in out/ of the shape and data of --from)')
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name, as for sample.py (default: the newest Backpack in out/)')
    add('--baseline', metavar='MODEL',
        help='Transformer to compare with (default: the folder of --from with _gpt behind its name, in it '
        'the file that --from names)')
    add('--data', metavar='PATH', help='file of a benchmark, or folder to look for it in (default: the Hub); '
        'loss and ablation: folder below data/, or a .bin in it (default: val.bin of the training)')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--json', metavar='FILE', help='write the numbers to a file too')
    add('--first', action='store_true', help='similarity: of a word of several tokens take the first')
    add('--sense', type=number(int, 0), metavar='L',
        help='gender: the sense to take away (default: the one that most separates she from he)')
    add('--texts', type=number(int, 1), metavar='N', default=100,
        help='topic: texts for each topic and strength [100]')
    add('--length', type=number(int, 1), metavar='N', default=100, help='topic: longest text, tokens [100]')
    add('--step-sizes', type=number(float, 0, 1000), nargs='+', metavar='S',
        help="topic: of PPLM [the paper's; in the toy world 0.05 0.1 0.2]")
    add('--seed', type=number(int, 0), metavar='S', default=0, help='topic: of the draws [0]')
    add('--size', choices=SIZES,
        help="timing and cost: a size of the paper's with random weights, without --from")
    add('--out', metavar='FILE.svg', help='plot: the picture to write')
    add('--sweep', metavar='WORD:SENSES', help='plot: the senses to turn down, as in sample.py --sweep')
    add('--start', metavar='TEXT', default=PROMPT, help=f'plot --sweep: the prompt, or FILE:path [{PROMPT}]')
    args = parser.parse_intermixed_args(argv)
    for flag, tables in ONLY_WITH.items():
        if getattr(args, flag) != parser.get_default(flag) and args.table not in tables:
            parser.error(f'{flag if flag == "runs" else "--" + flag.replace("_", "-")}: only with '
                         + ' and '.join(table for table in tables if table != 'all'))
    if args.table == 'plot' and (args.out is None or bool(args.runs) == (args.sweep is not None)):
        parser.error('plot takes --out FILE.svg and either runs or --sweep WORD:SENSES')
    if args.table == 'plot' and (args.baseline or args.runs and (args.source or args.start != PROMPT)):
        parser.error('plot takes --from and --start with --sweep alone, and no --baseline')
    if (args.size or args.table == 'cost') and (args.source or args.baseline):
        parser.error('cost and --size have random weights; leave --from and --baseline out')
    if args.size and args.table not in ('timing', 'cost'):
        parser.error('--size: only with timing and cost')
    return args


def write_json(path: Path, subjects: list[Subject], tables: dict[str, Table]) -> None:
    """The numbers of the tables; the file has its name only when complete."""
    content = {'models': list(map(str, subjects)), 'tables': {
        name: {'title': t.title, 'columns': list(t.columns), 'rows': t.rows, 'notes': t.notes}
        for name, t in tables.items()}}
    write_file(path, json.dumps(content, indent=1) + '\n')


def run(args: argparse.Namespace) -> None:
    """Load, and print one table after another; the numbers are written after each. What is wrong with one of
    all tables is said again at the end.
    """
    args.device, file = find_device(args.device), None
    if args.json is not None:
        file = place_for('--json', args.json)
    if args.out is not None:
        args.out = place_for('--out', args.out, '.svg')
        if args.out == file:
            raise UserError('--out and --json are one file; name two')
    bare = args.size or args.runs or args.table == 'cost'
    subjects, tables, wrong = [] if bare else load_subjects(args), {}, None
    for name in [name for name in TABLES if name not in NOT_IN_ALL] if args.table == 'all' else [args.table]:
        try:
            if name in OF_SENSES and subjects:
                needs_senses(subjects[0], name)
            tables[name] = TABLES[name](subjects, args)
        except UserError as error:
            if args.table != 'all':
                raise
            print(printable(f'\n{name}: skipped, {error}'), flush=True)
            wrong = wrong if isinstance(error, Missing) else error
            continue
        if file:
            write_json(file, subjects, tables)
        print(printable(str(tables[name])), flush=True)
    if wrong:
        raise wrong


def main(argv: list[str]) -> None:
    """Run the command line."""
    answer('eval.py', run, parse_args(argv))


if __name__ == '__main__':
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')  # a terminal without unicode still gets a table
    main(sys.argv[1:])
