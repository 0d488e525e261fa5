"""Use a trained model: continue text, inspect and edit senses, explain predictions.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --explain she/he
    python sample.py --edit nurse:she/he "*:3-5" "MacBook: Apple -> HP" "topic music=2"
    python sample.py --start "My {} said that" --words nurse,guard --probs she,he --csv odds.csv
    python sample.py --start "The nurse said that" --html page.html

With --show, --find, --similar, --explain, --probs or --sweep, sample.py prints only tables.
Otherwise it generates text. If you give edits, it generates text both without and with them.

The word in an edit can be a list: nurse,teacher,guard, or @FILE with one word per line. Equation,
table and figure numbers refer to "Backpack Language Models", https://arxiv.org/abs/2305.16765.
"""

import argparse
import rucksack.interrupts  # noqa: F401 (before torch)
from functools import partial

import torch
from torch import Tensor

from rucksack import sample_tables
from rucksack.cli import Parser, number, printable, progress, run_cli
from rucksack.edits import FORMS, SensesOf, count_word, make_edit, parse_lines, parse_senses
from rucksack.errors import UserError
from rucksack.files import output_path
from rucksack.lending import cached, lend
from rucksack.loaded import LoadedModel, load_model
from rucksack.page import PAGE_BEGINS, write_page
from rucksack.paper_lists import BAGS
from rucksack.sample_tables import Pairs, Prompts
from rucksack.senses import Edit
from rucksack.table import CSV_BEGINS, Table, write_csv
from rucksack.weights import export
from rucksack.words import PROMPT, parse_bag, parse_pair, read_lines, read_prompt, word_list

# -----------------------------------------------------------------------------
# The command line.


SEVERAL = dict(nargs='+', action='extend', default=[])  # repeatable flags with several values
LISTS = dict(action='extend', default=[])  # repeatable flags whose value is a list
EDIT_HELP = '\n'.join([
    'A LINE has one of these forms. Put it in quotes if it contains spaces or *.\n',
    *(f'  {form:<28} {meaning}' for form, meaning in FORMS.items()),
    f'\nTopics: {", ".join(BAGS)}'])


def make_parser() -> Parser:
    """Declare the flags, in groups: model and text, looking, explaining, editing."""
    parser = Parser(prog='sample.py', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--start', metavar='TEXT', type=parse_prompt, **LISTS,
        help='the prompt, or @FILE with one prompt per line; with --words, {} is replaced by each '
             f'word in turn [{PROMPT}]')
    add('--words', metavar='LIST', type=word_list, **LISTS,
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
        help='random seed for text 1; text 2 uses S + 1, and so on [0]')
    add('--device', metavar='D', default='auto',
        help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision for generation and export [float32; bfloat16 when generating on CUDA]')
    add('--csv', metavar='FILE', help='also write the tables to a .csv file: --csv odds.csv')
    add = parser.add_mutually_exclusive_group().add_argument
    add('--html', metavar='FILE',
        help='write a web page that runs the model, with a slider for each sense, and exit')
    add('--export', metavar='DIR', help='export the model for Hugging Face transformers, and exit')
    add_groups(parser)
    return parser


def add_groups(parser: Parser) -> None:
    """Declare the flags that look at senses, explain a prediction or edit senses."""
    add = parser.add_argument_group('look at senses (only --show applies edits)').add_argument
    add('--show', metavar='WORD[:SENSES]', type=parse_look, **SEVERAL,
        help='the ten words that each sense of WORD raises and lowers most')
    add('--find', metavar='A/B|A+B', type=parse_find, **SEVERAL,
        help='the senses that best separate A from B (or the pairs in @FILE, one A/B per line); '
             'with --words, how far each sense of these words separates A from B; A+B: the senses '
             'that favour both words (Eq. 17)')
    add('--similar', metavar='WORD', **SEVERAL,
        help='the words most similar to WORD, sense by sense (Eq. 13, Eq. 14)')
    add = parser.add_argument_group('explain the prediction after the prompt').add_argument
    add('--explain', metavar='WORD|A/B', type=parse_words, nargs='?', const=[],
        help='what each sense of each token adds to the logit of WORD [the likeliest word], or '
             'to the logit of A minus the logit of B')
    add('--probs', metavar='LIST', type=word_list, **LISTS,
        help='the probability of these words before and after edits, one row per prompt: she,he')
    add('--sweep', metavar='WORD[:SENSES]', type=parse_look, **SEVERAL,
        help='the next words as these senses are scaled from 0 to 1 (Figure 3)')
    add = parser.add_argument_group('edit senses, in the order given', EDIT_HELP).add_argument
    add('--edit', '--senses-off', dest='edits', metavar='LINE', **SEVERAL, help='change senses')
    add('--lender', metavar='MODEL',
        help='edit this Backpack instead, and make the same change to the log-probabilities of '
             'the --from model; both need the same vocabulary')
    add('--strength', metavar='B', type=number(float, 0),
        help='scale the changes that --lender makes by B (0: no change) [1]')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; raises UserError for bad values and flags that exclude each other.

    Adds four attributes: changes (the parsed lines of --edit), needs_senses (whether the command
    needs a Backpack), looks_at_senses, and is_look (whether it prints only tables).
    """
    parser = make_parser()
    flags = parser.parse_args(argv)
    flags.start = flags.start or [PROMPT]
    flags.changes = parse_lines(flags.edits)
    looks = [*flags.show, *flags.find, *flags.similar, *flags.sweep]
    if flags.explain is not None:
        looks.append(flags.explain)
    flags.needs_senses = bool(looks or flags.changes or flags.html)
    flags.is_look = bool(looks or flags.probs)
    flags.looks_at_senses = bool(looks)
    if flags.lender and not flags.changes:
        parser.error('--lender lends an edit; add --edit or --senses-off')
    if flags.strength is not None and not flags.lender:
        parser.error('--strength needs --lender')
    if (flags.export or flags.html) and (flags.changes or flags.is_look):
        parser.error('--export and --html write the unedited model; drop the other flags')
    if flags.csv and not (flags.changes or flags.is_look):
        parser.error('--csv needs a table; add --show, --find, --similar, --explain, --probs, '
                     '--sweep or --edit')
    has_place = any('{}' in start for start in flags.start)
    has_pairs = any(pairs for _, pairs, _ in flags.find)
    if flags.words and not (has_place or has_pairs):
        parser.error('--words needs {} in --start, or --find A/B')
    if flags.html and (flags.words or len(flags.start) > 1):
        parser.error('--html takes one prompt, without --words')
    return flags


def parse_prompt(text: str) -> list[str]:
    """Parse a prompt, or @FILE with one prompt per line."""
    return read_lines(text, has_comments=False) if text.startswith('@') else [text]


def parse_look(text: str) -> SensesOf:
    """Parse WORD:SENSES, or WORD for all its senses; raises UserError for a list or a factor."""
    look = parse_senses(text) if ':' in text else SensesOf(text, [], text=text)
    if look.factor or word_list(look.word) != [look.word]:
        raise UserError(f'{text!r} is not WORD or WORD:SENSES; give one word, and no factor')
    return look


def parse_find(text: str) -> tuple[str, Pairs, list[str]]:
    """Parse pairs of words, A/B or @FILE with one A/B per line, or else a bag of words.

    Also returns the text, which names the table.
    """
    words = word_list(text)
    if any('/' in word for word in words):
        return text, [parse_pair(word) for word in words], []
    if not text.startswith('@'):  # a file is read only once: it may be a pipe
        words = parse_bag(text)
    return text, [], words


def parse_words(text: str) -> list[str]:
    """Parse the two words in A/B, or a single word."""
    return list(parse_pair(text)) if '/' in text else [text]


# -----------------------------------------------------------------------------
# The program.


def load_models(flags: argparse.Namespace) -> tuple[LoadedModel, LoadedModel]:
    """Load the model and the Backpack whose senses it uses (without --lender, the same one)."""
    loaded = load_model(flags.source, flags.device, flags.dtype)
    lender = loaded
    if flags.lender:
        lender = load_model(flags.lender, flags.device, flags.dtype)
        loaded = lend(loaded, lender, flags.strength)
    if flags.needs_senses:
        is_edit = flags.changes and not flags.looks_at_senses
        lender.needs_senses('--edit without --lender' if is_edit else 'this command')
    return loaded, lender


def read_prompts(starts: list[str], words: list[str], loaded: LoadedModel
                 ) -> tuple[Prompts, list[str]]:
    """Encode the prompts, with each word in place of {}; also returns notices."""
    prompts = []
    notices = []
    for start in starts:
        texts = [start]
        if words and '{}' in start:
            texts = [start.replace('{}', word) for word in words]
        for text in texts:
            ids, about = read_prompt(text, loaded.encoding, loaded.config.block_size)
            prompts.append((text, torch.tensor([ids], device=loaded.device)))
            notices += about
    return prompts, list(dict.fromkeys(notices))


def warnings(scaled: list, loaded: LoadedModel, texts: list[Tensor]) -> list[str]:
    """Warn of words in edits and sweeps that are in no prompt, or that are inside a longer word."""
    words = dict.fromkeys(change.word for change in scaled if change.word != '*')
    counts = {word: count_word(word, loaded.encoding, texts) for word in words}
    absent = [word for word, (touched, _) in counts.items() if touched == 0]
    longer = [word for word, (touched, whole) in counts.items() if touched > whole]
    lines = []
    if absent:
        lines.append(f'Not in any prompt, so no effect on the next word: {", ".join(absent)}')
    if longer:
        lines.append(f'Part of a longer word in a prompt, and edited there: {", ".join(longer)}')
    return lines


def make_tables(flags: argparse.Namespace, loaded: LoadedModel, lender: LoadedModel,
                prompts: Prompts) -> dict[str, Table]:
    """Make the requested tables, by name. Tables of senses show the lender's senses."""
    tables = {}
    for chosen in flags.show:
        tables[f'show {chosen.text}'] = sample_tables.show(lender, chosen, prompts)
    for text, pairs, bag in flags.find:
        if bag:
            table = sample_tables.speak_for(lender, bag)
        elif flags.words:
            table = sample_tables.separate_words(lender, text, pairs, flags.words)
        else:
            table = sample_tables.separate(lender, text, pairs)
        tables[f'find {text}'] = table
    for word in flags.similar:
        tables[f'similar {word}'] = sample_tables.similar(lender, word)
    if flags.probs:
        tables['probs'] = sample_tables.probabilities(loaded, prompts, flags.probs)
    for n, (prompt, idx) in enumerate(progress(prompts, 'prompts'), 1):
        after = {}
        if flags.explain is not None:
            after['explain'] = sample_tables.explanation(lender, flags.explain, idx)
        for scaled in flags.sweep:
            after[f'sweep {scaled.text}'] = sample_tables.sweep(lender, scaled, idx, prompts)
        if flags.changes and not flags.is_look:
            after['next words'] = sample_tables.before_and_after(loaded, idx)
        for name, table in after.items():
            if len(prompts) > 1:
                name = f'{name}: {prompt}'
                if name in tables:  # the same prompt again
                    name = f'{name} (prompt {n})'
                table.title = f'"{prompt}"\n{table.title}'
            tables[name] = table
    return tables


def generate(flags: argparse.Namespace, loaded: LoadedModel, idx: Tensor, edit: Edit | None
             ) -> list[str]:
    """Generate continuations of a prompt, ids (1, T), each up to its end-of-text."""
    texts = []
    for i in progress(range(flags.num_samples), 'texts'):
        torch.manual_seed(flags.seed + i)
        made = cached(loaded.model).generate(
            idx, flags.max_new_tokens, flags.temperature, flags.top_k, edit=edit, stop=loaded.eot)
        ids = made[0, idx.shape[1]:].tolist()
        end = [*ids, loaded.eot].index(loaded.eot)
        texts.append(loaded.encoding.decode(ids[:end]))
    return texts


def run(argv: list[str]) -> None:
    """Parse, compute, then print: all tables are made before any is printed."""
    flags = parse_args(argv)
    page = output_path('--html', flags.html, PAGE_BEGINS)
    csv_file = output_path('--csv', flags.csv, CSV_BEGINS)
    loaded, lender = load_models(flags)
    if flags.export is not None:
        dtype = getattr(torch, flags.dtype or 'float32')
        export(loaded.model, loaded.tokenizer, flags.export, dtype)
        print(printable(f'{loaded.about()}\n{flags.export}: written'))
        return
    if page:
        size = write_page(loaded, flags.start[0], page)
        print(printable(f'{loaded.about()}\n{flags.html}: {size}'))
        return

    prompts, notices = read_prompts(flags.start, flags.words, loaded)
    texts = [idx for _, idx in prompts]
    if flags.changes:
        loaded.edit, sentences = make_edit(flags.changes, lender.model, lender.encoding, texts)
        lender.edit = loaded.edit
        notices += sentences
        if flags.lender and flags.looks_at_senses:
            notices.append(f'All tables except --probs show the lender, {lender}.')
        if flags.find or flags.similar:
            notices.append('--find and --similar show the senses without the edit.')
    for line in warnings(flags.changes + flags.sweep, loaded, texts):  # first: it may be a typo
        print(printable(line))
    print(loaded.about())
    tables = make_tables(flags, loaded, lender, prompts)
    if csv_file:  # before printing: piping into head ends the program
        write_csv(csv_file, tables)
    for part in [*notices, *tables.values()]:
        print(printable(str(part)))
    if flags.is_look or flags.num_samples == 0:
        return

    if loaded.dtype == 'bfloat16':
        loaded.model.bfloat16()  # most of the time is spent reading parameters
    versions = {'': None}
    if loaded.edit:
        versions = {'before ': None, 'after ': loaded.edit}
    for prompt, idx in prompts:
        for title, edit in versions.items():
            for i, text in enumerate(generate(flags, loaded, idx, edit), 1):
                print(f'\n{title}{i}: {printable(prompt + text)}')


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main()
