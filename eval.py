"""The tables of the paper, one command each: a Backpack, and beside it the Transformer it is compared with.

    python eval.py all                                    every table that the data at hand allows
    python eval.py gender --from out/small --baseline out/small_gpt

    loss         Tables 2, 8 perplexity on held-out text; as gender and similarity, also of RUN...
    lambada      Table 2     the last word of a passage
    wikitext     Table 2     perplexity per word of WikiText's raw test set
    blimp        Table 2     which of two sentences is the grammatical one
    similarity   Table 4     how similar two words are, by each sense
    gender       Table 5     she or he after a role noun, with and without a sense
    topic        Table 12    topic control, beside PPLM on the Transformer
    timing       Table 7     forward pass, training step and generation
    plot                     a picture: the losses of runs; not part of all
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from model import SIZES
from rucksack.common import Parser, UserError, find_device, number, output_path, printable, run_cli
from rucksack.gender import gender_table
from rucksack.grammar import make_edit, read_edit
from rucksack.likelihood import blimp_table, lambada_table, loss_table, wikitext_table
from rucksack.plot import plot
from rucksack.similarity import similarity_table
from rucksack.table import Subject, load, needs_senses, write_json
from rucksack.timing import timing_table
from rucksack.topics import topic_table

TABLES = {  # functions of the subjects and the command line
    'loss': loss_table, 'lambada': lambada_table, 'wikitext': wikitext_table, 'blimp': blimp_table,
    'similarity': lambda subjects, args: similarity_table(
        subjects, args.data, by_run=bool(args.runs), or_toy=args.table == 'all'),
    'gender': lambda subjects, args: gender_table(subjects, by_run=bool(args.runs)),
    'topic': topic_table, 'timing': timing_table, 'plot': plot}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line: flags that all tables share, and those of the table named."""
    shared = Parser(add_help=False)
    add = shared.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name, as for sample.py (default: the newest Backpack in out/)')
    add('--baseline', metavar='MODEL', help='Transformer to compare with (default: the folder of --from with '
        '_gpt behind its name, in it the file that --from names)')
    add('--data', metavar='PATH', help='file of a benchmark, or folder to look for it in (default: the Hub); '
        'loss: folder below data/, or a .bin in it (default: val.bin of the training data)')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'), help='of losses, generated texts and timing (default: '
        'bfloat16 on CUDA, else float32; timing: that of the training)')
    add('--json', metavar='FILE', help='write the numbers to a file too')
    parser = Parser(prog='eval.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(runs=[], size=None, edit=None)
    commands = parser.add_subparsers(dest='table', metavar='TABLE', required=True,
                                     help='one of the above, or all; eval.py TABLE --help lists its flags')
    of = {name: commands.add_parser(name, prog='eval.py', usage=f'eval.py {name} [flags]', parents=[shared])
          for name in ('all', *TABLES)}
    for add in (of['topic'].add_argument, of['all'].add_argument):
        add('--texts', type=number(int, 1), metavar='N', default=100, help='topic: texts on each [100]')
        add('--length', type=number(int, 1), metavar='N', default=100, help='topic: tokens of a text [100]')
        add('--step-sizes', type=number(float, 0, 1000), nargs='+', metavar='S',
            help="topic: of PPLM [the paper's; in the toy world 0.2 0.3 0.5]")
        add('--seed', type=number(int, 0), metavar='S', default=0, help='topic: of the draws [0]')
    of['timing'].add_argument('--size', choices=SIZES, help="a size of the paper's, in place of --from")
    for name in ('loss', 'gender', 'similarity'):
        of[name].add_argument('runs', nargs='*', metavar='RUN', help='default: --from and its baseline')
    for name in ('loss', 'lambada', 'wikitext', 'blimp', 'gender'):
        of[name].add_argument('--edit', metavar='FILE', help='score it under this edit of --save-edit too')
    of['plot'].add_argument('runs', nargs='+', metavar='RUN', help='runs whose losses to draw')
    of['plot'].add_argument('--out', metavar='FILE.svg', required=True, help='the picture to write')
    args = parser.parse_args(argv)
    if (args.source or args.baseline or args.edit) and (args.size or args.runs):
        parser.error('--from, --baseline and --edit go without --size and without RUN')
    return args


def load_subjects(args: argparse.Namespace) -> list[Subject]:
    """The runs named; or the model of --from, also under --edit, and its baseline if it has one."""
    if args.size or args.runs:
        return [load(name, args.device, args.dtype) for name in args.runs if args.table != 'plot']
    subjects = [load(args.source, args.device, args.dtype)]
    path = Path(subjects[0].name)
    beside = Path(f'{path.parent}_gpt', path.name) if path.suffix == '.pt' else Path(f'{path}_gpt')
    if args.baseline or subjects[0].kind == 'Backpack' and args.table != 'timing' and beside.exists():
        subjects.append(load(args.baseline or str(beside), args.device, args.dtype))
        if subjects[1].kind == 'Backpack':
            raise UserError(f'{subjects[1].name} is a Backpack; --baseline takes a Transformer')
        if subjects[1].model.tokenizer != subjects[0].model.tokenizer:
            raise UserError(f'{subjects[0].name} and {subjects[1].name} have different vocabularies')
    if args.edit is not None:
        needs_senses(own := subjects[0], '--edit')
        if (asked := read_edit(args.edit, own.model))['topic']:
            raise UserError(f'{args.edit} has a topic, whose annealing would see the future of each text; '
                            'take other edits, or sample.py')
        edit, _ = make_edit(asked, own.model, own.encoding)
        subjects.insert(1, replace(own, name=f'{own.name} under {args.edit}', edit=edit, chosen=''))
    print(*(subject.about() + subject.chosen for subject in subjects), sep='\n')
    return subjects


def run(argv: list[str]) -> None:
    """Print a table, or all that can be made one after another, and write the numbers after each."""
    args = parse_args(argv)
    args.device, file = find_device(args.device), output_path('--json', args.json, '.json')
    subjects = load_subjects(args)
    names, tables = [name for name in TABLES if name != 'plot'] if args.table == 'all' else [args.table], {}
    for name in names:
        try:
            if name in ('similarity', 'gender', 'topic', 'timing') and subjects and not args.runs:
                needs_senses(subjects[0], name)
            tables[name] = TABLES[name](subjects, args)
        except UserError as error:
            if args.table != 'all':
                raise
            print(printable(f'\n{name}: skipped, {error}'), flush=True)
            continue
        if file:
            write_json(file, list(map(str, subjects)), tables)
        print(tables[name], flush=True)


main = partial(run_cli, 'eval.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
