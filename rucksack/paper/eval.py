"""Print the tables of "Backpack Language Models" (arXiv 2305.16765) for Backpacks and Transformers.

    python -m rucksack eval all            every table of the paper that you have data for
    python -m rucksack eval gender --from out/small    also for out/small_gpt, if it exists
    python -m rucksack eval loss out/small out/small_4

    loss         Tables 2, 8   perplexity on held-out text
    lambada      Table 2       predicting the last word of a passage
    wikitext     Table 2       perplexity per word of WikiText's raw test set
    blimp        Table 2       choosing the grammatical sentence in a pair
    similarity   Table 4       word similarity, sense by sense (needs --data)
    gender       Table 5       she or he after a role noun, with and without a sense
    examples                   how well a model fulfils the examples (see rucksack edit) in --data

Tables 7, 12 and 13 are timing.py, control.py and pronouns.py in docs/dev.

--data takes the files of a benchmark, or a folder that has them. Without it, lambada, wikitext and
blimp come from the Hugging Face Hub.

    lambada     https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
    wikitext    https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip
    blimp       https://github.com/alexwarstadt/blimp
    similarity  https://github.com/john-hewitt/backpacks-flash-attn, in training/data
"""

import csv
import inspect
import os
from argparse import Namespace
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits.examples import read_examples
from rucksack.edits.lending import lend
from rucksack.edits.lines import parse_lines
from rucksack.errors import UserError
from rucksack.files import write_file
from rucksack.hub.find import BUNDLED
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.gender import read_lists
from rucksack.paper.lists import ESTIMATION_PROMPTS
from rucksack.table import FIRST_COLUMN
from rucksack.verbs import edit_model, make_parser

# Table -> its module, where NAME_rows measures one model; its docstring is printed above the rows.
# Its parameters are named as the flags that it takes.
TABLES = {
    'loss': 'loss',
    'lambada': 'benchmarks',
    'wikitext': 'benchmarks',
    'blimp': 'benchmarks',
    'similarity': 'similarity',
    'gender': 'gender',
    'examples': 'canonical'}
IN_PAPER = ['loss', 'lambada', 'wikitext', 'blimp', 'similarity', 'gender']


def eval_parser() -> Parser:
    """Declare the flags."""
    parser = make_parser('eval', __doc__, '--from', '--edit', '--lender', '--strength', '--device',
                         '--csv')
    add = parser.add_argument
    add('table', metavar='TABLE', choices=['all', *TABLES],
        help='a table from the list above, or all')
    add('runs', nargs='*', metavar='RUN', help='models to compare, instead of --from')
    add('--data', metavar='PATH', type=os.path.expanduser,
        help='benchmark file, or a folder to search for it; for loss, a text file, a folder '
             'in data/ or a .bin file (default: val.bin of the training data); for gender, '
             "a file with a noun or a prompt with {} on each line (default: the paper's)")
    add('--field', metavar='N', type=number(int, 1), nargs=3,
        help='similarity: the columns of the two words and the score in --data FILE, from 1')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision of losses [bfloat16 on CUDA, else float32]')
    return parser


def load_models(args: Namespace) -> list[LoadedModel]:
    """Load the named runs, or --from; with edits, add the first model, edited.

    The model NAME of --from is compared with NAME_gpt, if it exists and has the same vocabulary.
    """
    load = partial(load_model, device=args.device, dtype=args.dtype)
    models = [load(name) for name in args.runs or [args.source]]
    own = models[0]
    beside = own.name.rstrip('/\\') + '_gpt'
    is_there = BUNDLED.get(beside, Path(beside).expanduser()).exists()
    if is_there and not args.runs:
        try:
            baseline = load(beside)
            if baseline.tokenizer != own.tokenizer:
                raise UserError(f'{beside} has a different vocabulary')
            models.append(baseline)
        except UserError as error:
            print(printable(f'No baseline: {error}'))
    changed = own
    if args.lender:
        changed = lend(own, load(args.lender), args.strength)
        # Both read the same number of tokens; otherwise we would compare context lengths.
        own.config = replace(own.config, block_size=changed.config.block_size)
    if args.edit:
        changed = replace(changed, name=f'{changed.name} under {", ".join(args.edit)}')
        changed.needs_senses('--edit without --lender')
        changes = parse_lines(args.edit)
        if any(change['bag'] for change in changes):
            raise UserError('a topic edit depends on later tokens, so no text can be scored under '
                            'it; use other edits here, or sample.py')
        edit_model(changed, changes, prompts_of(own, args))
    if changed is not own:
        models.insert(1, changed)
    return models


def prompts_of(loaded: LoadedModel, args: Namespace) -> list[Tensor]:
    """Encode a table's prompts, ids (1, T) each: they choose the sense in nurse:she/he."""
    if args.table == 'gender':
        nouns, _ = read_lists(args.data)
        texts = [prompt.replace('{}', noun) for noun in nouns for prompt in ESTIMATION_PROMPTS]
        return [loaded.read_prompt(text) for text in texts]
    if args.table == 'examples':
        examples = read_examples(args.data, loaded)
        return [
            torch.tensor([one.prompt], device=loaded.device)
            for one in examples]
    return []


def measure_of(table: str, args: Namespace) -> partial:
    """Make a function that measures one model for a table, with the flags that it takes."""
    module = import_module(f'rucksack.paper.{TABLES[table]}')
    rows_of = getattr(module, f'{table}_rows')
    data = args.data
    if args.table == 'all' and table in ('loss', 'gender'):
        data = None  # --data has the benchmarks and the word pairs
    if table == 'similarity':
        return partial(rows_of, data=data, field=args.field)
    return partial(rows_of, data=data)


def run(argv: list[str]) -> None:
    """Print a table, or every table that can be made, and write the numbers after each."""
    args = eval_parser().parse_args(argv)
    if (args.edit or args.lender) and args.table in ('all', 'similarity'):
        raise UserError(f'{args.table} takes no --edit and no --lender')
    if args.strength is not None and not args.lender:
        raise UserError('--strength needs --lender')
    import pandas  # slow to import
    models = load_models(args)
    for loaded in models:
        print(loaded.about())
    tables = {}
    for name in IN_PAPER if args.table == 'all' else [args.table]:
        measure = measure_of(name, args)
        found = []
        try:
            for loaded in models:
                rows = measure(loaded)
                names = [str(loaded)] * len(rows)
                found.append(pandas.DataFrame(rows, names, dtype=object))
        except (UserError, OSError) as error:
            if args.table != 'all':
                raise
            print(printable(f'\n{name}: skipped, {error}'))
            continue
        tables[name] = pandas.concat(found)
        text = tables[name].to_string(float_format='{:.4f}'.format, na_rep='-')
        print(f'\n{inspect.getdoc(measure.func)}\n\n{text}', flush=True)
        if args.csv:
            all_rows = pandas.concat(tables, names=[FIRST_COLUMN, 'model'])
            write_file(args.csv, all_rows.to_csv(
                quoting=csv.QUOTE_NONNUMERIC, lineterminator='\n'))


main = partial(run_cli, 'rucksack eval', run)
