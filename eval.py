"""Print the tables of "Backpack Language Models" (arXiv 2305.16765) for a Backpack and a baseline.

    python eval.py all                every table of the paper that you have data for
    python eval.py gender --from out/small --baseline out/small_gpt
    python eval.py loss out/small out/small_4

The default --baseline is the Transformer NAME_gpt next to the model NAME, if it exists.
"""

import argparse
import rucksack.interrupts  # noqa: F401 (before torch)
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits import Topic, make_edit, parse_lines
from rucksack.errors import UserError
from rucksack.examples import WISHES
from rucksack.files import output_path
from rucksack.lending import lend
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.canonical import examples_for, examples_table
from rucksack.paper.gender import estimation_prompts, gender_table
from rucksack.paper.likelihood import (
    blimp_table,
    lambada_table,
    loss_table,
    senses_table,
    wikitext_table,
)
from rucksack.paper.similarity import similarity_table
from rucksack.paper.topics import topic_tables
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.weights import BUNDLED

# -----------------------------------------------------------------------------
# The tables.


@dataclass(frozen=True)
class Kind:
    """A table that eval.py can make. make takes the models, then the values of the flags.

    make returns the table or, if it is slow, yields it again after each row.
    """

    make: Callable[..., Table | Iterator[Table]]
    number: str                 # number in the paper; eval.py all prints only numbered tables
    about: str                  # contents, for --help
    flags: tuple[str, ...] = ('data',)  # flags whose values are passed to make, in order
    needs_senses: bool = False  # the first model must be a Backpack; other tables take --edit


TABLES = {
    'loss': Kind(loss_table, 'Tables 2, 8', 'perplexity on held-out text'),
    'lambada': Kind(lambada_table, 'Table 2', 'predicting the last word of a passage'),
    'wikitext': Kind(wikitext_table, 'Table 2', "perplexity per word of WikiText's raw test set"),
    'blimp': Kind(blimp_table, 'Table 2', 'choosing the grammatical sentence in a pair'),
    'examples': Kind(
        examples_table, '', 'how well a model fulfils the examples (see edit.py) in --data FILE',
        flags=('data', 'wish')),
    'similarity': Kind(
        similarity_table, 'Table 4', 'word similarity, sense by sense', needs_senses=True),
    'gender': Kind(
        gender_table, 'Table 5', 'she or he after a role noun, with and without a sense'),
    'topic': Kind(
        topic_tables, 'Table 12', 'topic control, compared with PPLM on the Transformer',
        flags=('texts', 'length', 'step_sizes'), needs_senses=True),
    'senses': Kind(
        senses_table, '', "loss on a text with each sense off, and the sense's share of the sum",
        needs_senses=True)}


# -----------------------------------------------------------------------------
# The command line.


def shared_flags() -> Parser:
    """Declare the flags that all tables share."""
    shared = Parser(add_help=False)
    add = shared.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name (default: the newest Backpack in out/, else english)')
    add('--baseline', metavar='MODEL',
        help='Transformer to compare with (default: NAME_gpt next to the model NAME, if it exists)')
    add('--data', metavar='PATH',
        help='benchmark file, or a folder to search for it (default: download it from the Hub; '
             'similarity has no default, except for a toy model). For loss and senses, a text '
             'file, a folder in data/ or a .bin file (default: val.bin of the training data). For '
             "gender, a text file with a noun or a prompt with {} on each line (default: the "
             "paper's)")
    add('--device', metavar='D', default='auto',
        help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision of losses and generated texts [bfloat16 on CUDA, else float32]')
    add('--csv', metavar='FILE', help='also write the numbers to a .csv file: --csv loss.csv')
    return shared


def make_parser() -> Parser:
    """Declare the flags that all tables share, and those of each table."""
    listed = '\n'.join(f'    {name:<12} {kind.number:<11} {kind.about}'
                       for name, kind in TABLES.items())
    parser = Parser(prog='eval.py', description=f'{__doc__}\n{listed}',
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(runs=[], edits=None, lender=None, strength=None)
    commands = parser.add_subparsers(
        dest='table', metavar='TABLE', required=True,
        help='a table from the list above, or all; eval.py TABLE --help lists its flags')
    shared = shared_flags()
    of = {name: commands.add_parser(name, parents=[shared]) for name in ('all', *TABLES)}
    for name in ('topic', 'all'):
        add = of[name].add_argument
        add('--texts', type=number(int, 1), metavar='N', default=100,
            help='texts for each topic [100]')
        add('--length', type=number(int, 1), metavar='N', default=100,
            help='tokens per text [100]')
        add('--step-sizes', type=number(float, 0, 1000), nargs='+', metavar='S',
            help="step sizes of PPLM [the paper's and larger ones; toy models: 0.2 0.3 0.5]")
    add = of['examples'].add_argument
    add('--wish', choices=WISHES,
        help='the wish for all rows of a .jsonl [more; equal for rows with suffix1 and suffix2]')
    for name, kind in TABLES.items():
        if kind.needs_senses:
            continue
        add = of[name].add_argument
        add('runs', nargs='*', metavar='RUN', help='models to compare, instead of --from')
        add('--edit', '--senses-off', dest='edits', metavar='LINE', nargs='+', action='extend',
            help='also score the first model with these edits: nurse:10, or @FILE with one per '
                 'line; sample.py --help lists the forms')
        add('--lender', metavar='MODEL',
            help='edit this Backpack instead, and make the same change to the log-probabilities '
                 'of the first model; both need the same vocabulary')
        add('--strength', type=number(float, 0), metavar='B',
            help='scale the changes that --lender makes by B (0: no change) [1]')
    return parser


def load_models(args: argparse.Namespace) -> list[LoadedModel]:
    """Load the named runs, or --from and a baseline; with edits, add the first model, edited."""
    load = partial(load_model, device=args.device, dtype=args.dtype)
    models = [load(name) for name in args.runs or [args.source]]
    if not args.runs and args.table != 'senses':
        models += load_baseline(models[0], args.baseline, load)
    lender = models[0]
    changed = replace(models[0], why='')
    if args.lender:
        lender = load(args.lender)
        changed = lend(changed, lender, args.strength)
        # Both read the same number of tokens; otherwise we would compare context lengths.
        models[0].config = replace(models[0].config, block_size=changed.config.block_size)
    if args.edits:
        prompts = prompts_of(models[0], args)
        changed = under_edit(changed, lender, args.edits, prompts)
    if args.edits or args.lender:
        models.insert(1, changed)
    return models


def prompts_of(loaded: LoadedModel, args: argparse.Namespace) -> list[list[int]]:
    """Encode the prompts of a table; only gender and examples have some."""
    if args.table == 'gender':
        return estimation_prompts(loaded, args.data)
    if args.table == 'examples':
        return [example.prompt for example in examples_for(loaded, args.data, args.wish)]
    return []


def load_baseline(own: LoadedModel, name: str | None, load: Callable) -> list[LoadedModel]:
    """Load the Transformer to compare with.

    Without a name, it is NAME_gpt; if that cannot be used, a line says why. Raises UserError if
    the named model is a Backpack or has another vocabulary.
    """
    beside = f'{own.name.rstrip("/")}_gpt'
    if name is None and beside not in BUNDLED and not Path(beside).exists():
        return []
    try:
        baseline = load(name or beside)
        if baseline.config.n_sense:
            raise UserError(f'{baseline.name} is a Backpack; --baseline takes a Transformer')
        if baseline.tokenizer != own.tokenizer:
            raise UserError(f'{baseline.name} and {own.name} have different vocabularies; '
                            'choose another --baseline')
    except UserError as error:
        if name:
            raise
        print(printable(f'No baseline: {error}'))
        return []
    return [baseline]


def under_edit(loaded: LoadedModel, lender: LoadedModel, lines: list[str],
               prompts: list[list[int]]) -> LoadedModel:
    """Apply edits, one per line, to a model; raises UserError if any would see later tokens.

    The senses come from the lender. Prompts, as ids, determine the sense in nurse:she/he.
    """
    lender.needs_senses('--edit without --lender')
    changes = parse_lines(lines)
    if any(isinstance(change, Topic) for change in changes):
        raise UserError('a topic edit depends on later tokens, so no text can be scored under it; '
                        'use other edits here, or sample.py')
    texts = [torch.tensor([ids], device=loaded.device) for ids in prompts]  # (1, T) each
    edit, sentences = make_edit(changes, lender.model, lender.encoding, texts)
    name = f'{loaded.name} under {", ".join(lines)}'
    why = '; '.join([loaded.why, *sentences])
    return replace(loaded, name=name, edit=edit, why=why)


def make_tables(name: str, models: list[LoadedModel], args: argparse.Namespace
                ) -> Iterable[Table]:
    """Yield the table called name; a slow table is yielded again after each row.

    Raises UserError if it cannot be made for the first model or the data.
    """
    kind = TABLES[name]
    if kind.needs_senses:
        models[0].needs_senses(name)
    values = vars(args)
    has_its_own = name in ('loss', 'gender') or (name == 'similarity' and models[0].is_toy)
    if args.table == 'all' and has_its_own:
        values = values | {'data': None}  # --data is for the English benchmarks
    options = [values[flag] for flag in kind.flags]
    made = kind.make(models, *options)
    return [made] if isinstance(made, Table) else made


def run(argv: list[str]) -> None:
    """Print a table, or every table that can be made, and write the numbers after each."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if (args.source or args.baseline) and args.runs:
        parser.error('--from and --baseline cannot be combined with RUN')
    if args.lender and not args.edits and args.table != 'gender':
        parser.error('--lender lends an edit; add --edit or --senses-off')
    if args.strength is not None and not args.lender:
        parser.error('--strength needs --lender')
    if args.baseline and args.table == 'senses':
        parser.error('senses takes one model; drop --baseline')
    names = [args.table]
    if args.table == 'all':
        names = [name for name, kind in TABLES.items() if kind.number]
    csv_file = output_path('--csv', args.csv, CSV_BEGINS)
    if args.data and Path(args.data).is_fifo():
        folder = TemporaryDirectory()  # each model reads the data; a pipe can be read only once
        copy = Path(folder.name, Path(args.data).name)
        copy.write_bytes(Path(args.data).read_bytes())
        args.data = str(copy)
    models = load_models(args)
    for loaded in models:
        print(loaded.about())
    tables = {}
    for name in names:
        text = ''
        try:
            for table in make_tables(name, models, args):
                tables[name] = table
                text = str(table)
                if csv_file:  # before printing: piping into head ends the program
                    write_csv(csv_file, tables)
        except UserError as error:
            if args.table != 'all' or name in tables:
                raise
            text = printable(f'\n{name}: skipped, {error}')
        finally:
            print(text, flush=True)


main = partial(run_cli, 'eval.py', run)

if __name__ == '__main__':
    main()
