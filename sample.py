"""Use a trained model: continue text, inspect senses, explain predictions, edit senses.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --explain she/he
    python sample.py --edit nurse:she/he "*:3-5" "MacBook: Apple -> HP" "topic music=2"
    python sample.py --start "My {} said that" --words nurse,guard --probs she,he --csv odds.csv
    python sample.py --start "The nurse said that" --html page.html

With --show, --find, --similar, --explain, --probs or --sweep, sample.py prints only tables.
Otherwise it generates text; with edits, it generates text before and after them.

A word of an edit can be a list: nurse,teacher,guard, or @FILE with one word per line. Equations,
tables and figures are those of "Backpack Language Models", https://arxiv.org/abs/2305.16765.
"""

import argparse
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rucksack import sample_tables
from rucksack.cli import Parser, number, printable, progress, run_cli
from rucksack.edits import (
    FORMS,
    SensesOf,
    count_word,
    make_edit,
    parse_lines,
    parse_senses,
)
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.files import output_path
from rucksack.loaded import LoadedModel, load_model
from rucksack.page import PAGE_BEGINS, write_page
from rucksack.paper_lists import BAGS
from rucksack.sample_tables import Prompts
from rucksack.senses import Edit
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.weights import export
from rucksack.words import PROMPT, parse_bag, parse_pair, read_lines, read_prompt, word_list

# -----------------------------------------------------------------------------
# The command line.


SAMPLES_AT_ONCE = 10
SEVERAL = dict(nargs='+', action='extend', default=[])  # flags with several values, or repeated
EDIT_HELP = '\n'.join([
    'A LINE is one of these; quote lines with spaces or *.\n',
    *(f'  {form:<28} {meaning}' for form, meaning in FORMS.items()),
    f'\nTopics: {", ".join(BAGS)}'])


def make_parser() -> Parser:
    """Declare the flags, in groups: model and text, looking, explaining, editing."""
    parser = Parser(prog='sample.py', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--start', metavar='TEXT', type=parse_start, default=PROMPT,
        help='the prompt, or @FILE with one prompt per line; {} stands for each of --words '
             f'[{PROMPT}]')
    add('--words', metavar='LIST', type=word_list, default=[],
        help='words for {} in --start, and for --find A/B: nurse,teacher,guard or @nouns.txt')
    add('--num-samples', metavar='N', type=number(int, 0), default=2,
        help='texts to generate (0: tables only) [2]')
    add('--max-new-tokens', metavar='N', type=number(int, 0), default=60,
        help='maximum new tokens per text [60]')
    add('--temperature', metavar='T', type=number(float, 0), default=0.8,
        help='sampling temperature (0: always take the likeliest token) [0.8]')
    add('--top-k', metavar='K', type=number(int, 1),
        help='sample only from the K likeliest tokens')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for sampling [0]')
    add('--device', metavar='D', default='auto',
        help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision for generation and export [float32; bfloat16 when generating on CUDA]')
    add('--csv', metavar='FILE', help='also write the numbers to a .csv file: --csv odds.csv')
    add = parser.add_mutually_exclusive_group().add_argument
    add('--html', metavar='FILE',
        help='write a web page that runs the model, with a slider for each sense, and exit')
    add('--export', metavar='DIR', help='export the model for Hugging Face transformers, and exit')
    add_groups(parser)
    return parser


def add_groups(parser: Parser) -> None:
    """Declare the flags that look at senses, explain a prediction or edit senses."""
    add = parser.add_argument_group('look at senses (--show applies your edits)').add_argument
    add('--show', metavar='WORD[:SENSES]', type=parse_look, **SEVERAL,
        help='the words that each sense of WORD raises and lowers most')
    add('--find', metavar='A/B|A+B', type=parse_find, **SEVERAL,
        help='senses that best separate A from B (or the pairs in @FILE, one A/B per line), or '
             'favour A and B (Eq. 17); with --words, how far each sense of these words separates '
             'A from B')
    add('--similar', metavar='WORD', **SEVERAL,
        help='the words most like WORD in each sense (Eq. 13, Eq. 14)')
    add = parser.add_argument_group('explain the prediction after the prompt').add_argument
    add('--explain', metavar='WORD|A/B', type=parse_words, nargs='?', const='',
        help='what each sense of each token adds to the logit of WORD [the likeliest], or to '
             'the logit of A minus the logit of B')
    add('--probs', metavar='LIST', type=word_list, default=[],
        help='the probability of these words, before and after edits, one row per prompt: she,he')
    add('--sweep', metavar='WORD[:SENSES]', type=parse_look, **SEVERAL,
        help='the next words as these senses are scaled from 0 to 1 (Figure 3)')
    add = parser.add_argument_group('edit senses, in the order given', EDIT_HELP).add_argument
    add('--edit', '--senses-off', dest='edits', metavar='LINE', **SEVERAL, help='change senses')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; UserError for a bad value, or flags that do not fit together."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    flags.changes = parse_lines(flags.edits)
    is_edit_or_look = flags.changes or is_look(flags)
    if (flags.export or flags.html) and is_edit_or_look:
        parser.error('--export and --html take no look, explain or edit flags: they write the '
                     'unedited model')
    if flags.csv and not is_edit_or_look:
        parser.error('--csv writes tables; add a flag that looks, explains or edits')
    has_place = any('{}' in start for start in flags.start)
    has_pairs = any(isinstance(words[0], tuple) for _, words in flags.find)
    if flags.words and not (has_place or has_pairs):
        parser.error('--words needs {} in --start, or --find A/B')
    if has_place and not flags.words:
        parser.error('{} in --start needs --words, as in --words nurse,teacher')
    if flags.html and (flags.words or len(flags.start) > 1):
        parser.error('--html takes one prompt, without --words')
    return flags


def looks_at_senses(flags: argparse.Namespace) -> bool:
    """Tell whether a command asks for a table that only a Backpack has."""
    return bool(flags.show or flags.find or flags.sweep or flags.similar
                or flags.explain is not None)


def is_look(flags: argparse.Namespace) -> bool:
    """Tell whether a command wants tables alone, and no text."""
    return looks_at_senses(flags) or bool(flags.probs)


def parse_start(text: str) -> list[str]:
    """Parse a prompt, or @FILE with one prompt per line."""
    return read_lines(text, has_comments=False) if text.startswith('@') else [text]


def parse_look(text: str) -> tuple[str, SensesOf]:
    """Parse WORD:SENSES, or WORD for all its senses; UserError for a list or a factor.

    The text names the table.
    """
    look = parse_senses(text) if ':' in text else SensesOf(text, [])
    if look.factor or len(word_list(look.word)) > 1:
        raise UserError(f'{text!r} is not WORD or WORD:SENSES; give one word, and no factor')
    return text, look


def parse_find(text: str) -> tuple[str, list]:
    """Parse pairs of words, A/B or @FILE with one A/B per line, or a bag of words.

    The text names the table.
    """
    pairs = word_list(text)
    if any('/' in pair for pair in pairs):
        return text, [parse_pair(pair) for pair in pairs]
    return text, parse_bag(text)


def parse_words(text: str) -> list[str]:
    """Parse the two words in A/B, or a single word; an empty text has none."""
    if '/' in text:
        return list(parse_pair(text))
    return [text] if text else []


# -----------------------------------------------------------------------------
# The program.


def read_prompts(flags: argparse.Namespace, loaded: LoadedModel) -> tuple[Prompts, list[str]]:
    """Read the prompts of --start, with each of --words in place of {}; also returns notices."""
    block_size = loaded.config.block_size
    prompts = {}
    notices = []
    for start in flags.start:
        for word in flags.words or ['']:
            text = start.replace('{}', word)
            ids, about = read_prompt(text, loaded.encoding, block_size)
            prompts[text] = torch.tensor([ids], device=loaded.device)
            notices += about
    return prompts, list(dict.fromkeys(notices))


def make_tables(flags: argparse.Namespace, loaded: LoadedModel, prompts: Prompts,
                has_effect: bool) -> dict[str, Table]:
    """Make the tables that the flags ask for, by name; for edits only, next words before and after.

    An edit without effect on the prompts has no table of its own.
    """
    tables = {}
    for text, chosen in flags.show:
        tables[f'show {text}'] = sample_tables.show(loaded, chosen)
    for text, words in flags.find:
        if isinstance(words[0], str):
            table = sample_tables.speak_for(loaded, words)
        elif flags.words:
            table = sample_tables.separate_words(loaded, text, words, flags.words)
        else:
            table = sample_tables.separate(loaded, text, words)
        tables[f'find {text}'] = table
    for word in flags.similar:
        tables[f'similar {word}'] = sample_tables.similar(loaded, word)
    if flags.probs:
        tables['probs'] = sample_tables.probabilities(loaded, prompts, flags.probs)
    for prompt, idx in progress(prompts.items(), 'prompts'):
        for name, table in tables_after(idx, flags, loaded, has_effect).items():
            if len(prompts) > 1:
                name = f'{name}: {prompt}'
                table.title = f'"{prompt}"\n{table.title}'
            tables[name] = table
    return tables


def tables_after(idx: Tensor, flags: argparse.Namespace, loaded: LoadedModel, has_effect: bool
                 ) -> dict[str, Table]:
    """Explain the prediction after a prompt (1, T), or show how an edit changes it, in tables."""
    tables = {}
    if flags.explain is not None:
        tables['explain'] = sample_tables.explanation(loaded, flags.explain, idx)
    for text, scaled in flags.sweep:
        tables[f'sweep {text}'] = sample_tables.sweep(loaded, scaled, idx)
    if has_effect and not is_look(flags):
        before_and_after = {'before': None, 'after': loaded.edit}
        title = 'The next word before and after the edit'
        tables['next words'] = sample_tables.next_words(loaded, title, idx, before_and_after)
    return tables


def warnings_of(flags: argparse.Namespace, loaded: LoadedModel, prompts: Prompts, has_effect: bool
                ) -> list[str]:
    """Say which words the edits and sweeps miss, or find inside others, and if nothing changes."""
    scaled = [*flags.changes, *dict(flags.sweep).values()]
    absent = []
    longer = []
    for word in dict.fromkeys(change.word for change in scaled if change.word != '*'):
        touched, whole = count_word(word, loaded.encoding, prompts.values())
        if touched == 0:
            absent.append(word)
        if touched > whole:
            longer.append(word)
    lines = []
    if absent:
        lines.append(f'Not in any prompt, so without effect on the next word: {", ".join(absent)}')
    elif flags.changes and not has_effect:
        lines.append('The edit changes nothing in any prompt')
    if longer:
        lines.append(f'Part of a longer word in a prompt, and edited there: {", ".join(longer)}')
    return lines


def changes_any(loaded: LoadedModel, prompts: Prompts) -> bool:
    """Tell whether the loaded's edit changes a sense of any prompt."""
    for idx in prompts.values():
        C = loaded.model.senses(idx)  # (1, T, k, d)
        if not torch.equal(loaded.edit(idx, C), C):
            return True
    return False


def print_samples(loaded: LoadedModel, prompt: str, idx: Tensor, flags: argparse.Namespace,
                  edit: Edit | None, title: str) -> None:
    """Print continuations of the prompt, ids (1, T), each up to its end-of-text."""
    torch.manual_seed(flags.seed)
    copies = idx.expand(flags.num_samples, -1)
    texts = []
    for some in progress(copies.split(SAMPLES_AT_ONCE), 'texts'):
        ids = Cached(loaded.model).generate(
            some, flags.max_new_tokens, flags.temperature, flags.top_k, edit=edit, stop=loaded.eot)
        new = ids[:, idx.shape[1]:]
        texts += new.tolist()
    for i, ids in enumerate(texts, 1):
        end = [*ids, loaded.eot].index(loaded.eot)
        text = loaded.encoding.decode(ids[:end])
        print(f'\n{title}{i}: {printable(prompt + text)}')


def run(argv: list[str]) -> None:
    """Load, describe, and print what was asked for. No table is printed before all are made."""
    flags = parse_args(argv)
    page = output_path('--html', flags.html, PAGE_BEGINS)
    csv_file = output_path('--csv', flags.csv, CSV_BEGINS)
    loaded = load_model(flags.source, flags.device, flags.dtype)
    if looks_at_senses(flags) or flags.changes or page:
        loaded.needs_senses('this command')
    if flags.export is not None:
        dtype = getattr(torch, flags.dtype or 'float32')
        export(loaded.model, loaded.tokenizer, flags.export, dtype)
        print(f'{loaded.about()}\n{flags.export}: written')
        return
    if page:
        size = write_page(loaded, flags.start[0], page)
        print(f'{loaded.about()}\n{flags.html}: {size}')
        return

    prompts, notices = read_prompts(flags, loaded)
    has_effect = False
    if flags.changes:
        edit, sentences = make_edit(
            flags.changes, loaded.model, loaded.encoding, prompts.values())
        loaded = replace(loaded, edit=edit)
        has_effect = changes_any(loaded, prompts)
        notices += sentences
        if flags.find or flags.similar:
            notices.append('--find and --similar look at senses as they are without the edit.')
    for line in warnings_of(flags, loaded, prompts, has_effect):  # first: often misspelled words
        print(printable(line))
    print(loaded.about())
    tables = make_tables(flags, loaded, prompts, has_effect)
    if csv_file:  # the file first, as printing into head ends the program
        write_csv(csv_file, tables)
    for part in [*notices, *tables.values()]:
        print(printable(str(part)))
    if is_look(flags) or flags.num_samples == 0:
        return
    if loaded.dtype == 'bfloat16':
        loaded.model.bfloat16()  # most of the time goes into reading parameters
    versions = {'': None}
    if loaded.edit:
        versions = {'before ': None, 'after ': loaded.edit}
    for prompt, idx in prompts.items():
        for title, one in versions.items():
            print_samples(loaded, prompt, idx, flags, one, title)


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main()
