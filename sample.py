"""Use a trained model: continue text, inspect senses, explain predictions, edit senses.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --explain she/he
    python sample.py --senses-off nurse:she/he "*:3-5" --replace "MacBook: Apple -> HP"
    python sample.py --start "My {} said that" --words nurse,guard --probs she,he --csv odds.csv
    python sample.py --start "The nurse said that" --html page.html

With a flag that looks or explains, sample.py prints only tables. Otherwise it generates text; if
you give edits, it does so both without and with them.

Any WORD can be a list: nurse,teacher,guard, or @FILE with one word per line. Equations, tables and
figures are those of "Backpack Language Models", https://arxiv.org/abs/2305.16765.
"""

import argparse
import sys
from functools import partial

import torch

from rucksack import edits as phrases
from rucksack import looks
from rucksack.cli import Parser, find_device, number, output_path, printable, run_cli
from rucksack.edits import EDIT_FLAGS, PROMPT, SensesOf
from rucksack.hub import export
from rucksack.loaded import Subject, load_subject
from rucksack.looks import Prompt
from rucksack.page import write_page
from rucksack.paper.lists import TOPICS
from rucksack.senses import Edit
from rucksack.table import Table, write_csv, write_json

# -----------------------------------------------------------------------------
# The command line.


SEVERAL = dict(nargs='+', action='extend', default=[])  # flags with several values, or repeated


def make_parser() -> Parser:
    """Declare the flags, in groups: model and text, looking, explaining, editing."""
    parser = Parser(prog='sample.py', description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--start', metavar='TEXT', default=PROMPT,
        help='the prompt, or @FILE with one prompt per line; {} stands for each of --words '
             f'[{PROMPT}]')
    add('--words', metavar='LIST',
        help='words for {} in --start, and for --find A/B: nurse,teacher,guard or @nouns.txt')
    add('--num-samples', metavar='N', type=number(int, 0, 1000), default=2,
        help='texts to generate (0: tables only) [2]')
    add('--max-new-tokens', metavar='N', type=number(int, 0, 100_000), default=60,
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
    add('--json', metavar='FILE', help='also write the tables to a .json file')
    add('--csv', metavar='FILE', help='also write the tables to a .csv file: --csv odds.csv')
    add('--html', metavar='FILE',
        help='write a web page that runs the model, with a slider for each sense, and exit')
    add('--export', metavar='DIR', help='export the model for Hugging Face transformers, and exit')
    add_looks(parser)
    add_edits(parser)
    return parser


def add_looks(parser: Parser) -> None:
    """Declare the flags that look at senses or explain a prediction."""
    add = parser.add_argument_group('look at senses (--show applies your edits)').add_argument
    add('--show', metavar='WORD[:SENSES]', **SEVERAL,
        help='the words that each sense of WORD raises and lowers most')
    add('--find', metavar='A/B|A+B', **SEVERAL,
        help='senses that best separate A from B, or favour A and B (Eq. 17); with --words, '
             'how far each sense of these words separates A from B')
    add('--similar', metavar='WORD', **SEVERAL,
        help='the words most like WORD in each sense (Eq. 13, Eq. 14)')
    add = parser.add_argument_group('explain the prediction after the prompt').add_argument
    add('--explain', metavar='WORD|A/B', nargs='?', const='',
        help='what each sense of each token adds to the logit of WORD [the likeliest], or to '
             'the logit of A minus the logit of B')
    add('--probs', metavar='LIST',
        help='the probability of these words, before and after edits, one row per prompt: she,he')
    add('--sweep', metavar='WORD:SENSES', **SEVERAL,
        help='the next words as these senses are scaled from 0 to 1 (Figure 3)')


def add_edits(parser: Parser) -> None:
    """Declare the flags that edit senses."""
    add = parser.add_argument_group(
        'edit senses, applied in this order (SENSES: numbers such as 3-5,10, or A/B for the sense '
        'that best separates A from B; WORD may be *, for every word, with numbers)').add_argument
    add('--senses-off', metavar='WORD:SENSES', **SEVERAL,
        help='turn senses off: nurse:10, nurse:she/he, @nouns.txt:7,10')
    add('--senses-scale', metavar='WORD:SENSES=F', **SEVERAL,
        help='multiply senses by F: nurse:10=0.5')
    add('--replace', metavar='"WORD: OLD -> NEW"', **SEVERAL,
        help='give NEW what WORD gave OLD')
    add('--topic', metavar='"A, B"', **SEVERAL,
        help='turn up the senses that favour these words, or a topic of Table 10: '
             + ', '.join(TOPICS))
    add('--strength', metavar='S', **SEVERAL,
        help='topic strength, one for all topics or one for each: 0 to 3, or four factors as in '
             'Table 11, such as 3.3,3.3,3,1 [2]')
    add('--save-edit', metavar='FILE',
        help='write these edits to a .json file, for --edit here and in eval.py')
    add('--edit', metavar='FILE', **SEVERAL,
        help='also apply edits saved by --save-edit')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; UserError if flags do not go together."""
    parser = make_parser()
    args = parser.parse_args(argv)
    n_topics = len(args.topic)
    if not args.strength:
        args.strength = ['2'] * n_topics
    if len(args.strength) == 1 and n_topics > 1:
        args.strength *= n_topics
    args.edits = args.edit or any(getattr(args, flag) for flag in EDIT_FLAGS)
    args.of_senses = (
        args.show or args.find or args.similar or args.sweep or args.explain is not None)
    args.looks = args.of_senses or args.probs
    if args.export is not None and (args.edits or args.looks or args.html):
        parser.error('--export takes no look, explain or edit flags, nor --html: it writes the '
                     'unedited model')
    if args.html and (args.edits or args.looks):
        parser.error('--html takes no look, explain or edit flags: the page does all three')
    if (args.json or args.csv) and not (args.looks or args.edits):
        parser.error('--json and --csv write tables; add a flag that looks, explains or edits')
    if args.save_edit and not args.edits:
        parser.error('--save-edit has no edit to save; add one, such as --senses-off nurse:10')
    parse_phrases(args)
    has_place = any('{}' in text for text in args.start)
    has_pair = any(isinstance(words, tuple) for words in args.find.values())
    if args.words and not (has_place or has_pair):
        parser.error('--words needs {} in --start, or --find A/B')
    if args.html and (len(args.start) > 1 or args.words):
        parser.error('--html takes one prompt; drop --words, and give one --start')
    return args


def parse_phrases(args: argparse.Namespace) -> None:
    """Parse the values of flags into objects, keyed by their text; UserError for a bad value."""
    args.words = phrases.word_list(args.words) if args.words else []
    args.probs = phrases.word_list(args.probs) if args.probs else []
    args.probs = list(dict.fromkeys(args.probs))  # no repeated column
    args.start = phrases.read_lines(args.start) if args.start[:1] == '@' else [args.start]
    args.show = {text: parse_show(text) for text in phrases.phrase_lists(args.show)}
    args.find = {text: parse_pair_or_bag(phrases.bag_text(text)) for text in args.find}
    args.similar = [word for text in args.similar for word in phrases.word_list(text)]
    args.sweep = {text: phrases.parse_senses_of(text) for text in phrases.phrase_lists(args.sweep)}
    if args.explain is not None:
        args.explain = {text: parse_words(text) for text in phrases.word_list(args.explain)}
    args.own_edits = phrases.write_out({flag: getattr(args, flag) for flag in EDIT_FLAGS})
    phrases.parse_edits(args.own_edits)


def parse_pair_or_bag(text: str) -> tuple[str, str] | list[str]:
    """Parse the two words in A/B, or the words of a bag."""
    return phrases.parse_pair(text) if '/' in text else phrases.parse_bag(text)


def parse_show(text: str) -> tuple[str, SensesOf | None]:
    """Parse WORD, or WORD:SENSES with the senses to show."""
    word, _, which = text.rpartition(':')
    if word and which:
        return word, phrases.parse_senses_of(text)
    return text.rstrip(':') or text, None


def parse_words(text: str) -> list[str]:
    """Parse the two words in A/B, or a single word; an empty text has none."""
    if '/' in text:
        return list(phrases.parse_pair(text))
    return [text] if text else []


# -----------------------------------------------------------------------------
# The program.


def read_prompts(args: argparse.Namespace, subject: Subject) -> tuple[list[Prompt], list[str]]:
    """Read the prompts of --start, with each of --words in place of {}; also returns notices."""
    prompts = []
    notices = []
    for template in args.start:
        words = args.words if '{}' in template else []
        for word in words or ['']:
            text = template.replace('{}', word) if words else template
            ids, more = phrases.read_prompt(
                text, subject.encoding, subject.model.config.block_size)
            idx = torch.tensor([ids], device=subject.device)  # (1, T)
            prompts.append(Prompt(text, idx, template, word))
            notices += more
    return prompts, list(dict.fromkeys(notices))


def make_tables(args: argparse.Namespace, subject: Subject, prompts: list[Prompt],
                edit: Edit | None) -> dict[str, Table]:
    """Make the tables that the flags ask for, by name; for edits only, next words before and after.

    edit is None if there are no edits.
    """
    tables = {}
    for text, phrase in args.show.items():
        tables[f'show {text}'] = looks.show(subject, phrase, edit)
    for text, words in args.find.items():
        tables |= tables_of_find(text, words, args, subject, prompts, edit)
    for word in args.similar:
        tables[f'similar {word}'] = looks.similar(subject, word)
    if args.probs:
        tables['probs'] = looks.probabilities(subject, prompts, args.probs, edit)
    for prompt in prompts:
        for name, table in tables_after(prompt, args, subject, edit).items():
            if len(prompts) > 1:
                name = f'{name}: {prompt.text}'
                table.title = f'"{prompt.text}"\n{table.title}'
            tables[name] = table
    return tables


def tables_of_find(text: str, words: tuple[str, str] | list[str], args: argparse.Namespace,
                   subject: Subject, prompts: list[Prompt], edit: Edit | None) -> dict[str, Table]:
    """Make the tables of --find: for a bag, or for a pair over all words or over --words."""
    if isinstance(words, list):
        return {f'find {text}': looks.speak_for(subject, words)}
    if not args.words:
        return {f'find {text}': looks.separate(subject, words)}
    tables = {f'find {text}': looks.separate_words(subject, words, args.words)}
    for template in args.start:
        own = [prompt for prompt in prompts if prompt.template == template and prompt.word]
        if own:
            tables[f'adds {text}: {template}'] = looks.adds(subject, words, own, edit)
    return tables


def tables_after(prompt: Prompt, args: argparse.Namespace, subject: Subject, edit: Edit | None
                 ) -> dict[str, Table]:
    """Make the tables that explain a prediction after a prompt, or show how an edit changes it."""
    tables = {}
    explained = args.explain or {}
    for text, words in explained.items():
        name = 'explain' if len(explained) == 1 else f'explain {text}'
        tables[name] = looks.explain(subject, words, prompt.idx, edit)
    for text, phrase in args.sweep.items():
        tables[f'sweep {text}'] = looks.sweep(subject, phrase, prompt.idx, edit)
    if args.edits and not args.looks:
        before_and_after = {'before': None, 'after': edit}
        title = 'The next word before and after the edit'
        tables['next words'] = looks.next_words(subject, title, prompt.idx, before_and_after)
    return tables


def print_samples(subject: Subject, prompt: Prompt, args: argparse.Namespace, edit: Edit | None,
                  title: str) -> None:
    """Print continuations of the prompt, each up to its end-of-text."""
    if subject.in_bfloat16:
        subject.model.bfloat16()  # most of the time goes into reading weights
    torch.manual_seed(args.seed)
    copies = prompt.idx.expand(args.num_samples, -1)
    texts = subject.model.generate(
        copies, args.max_new_tokens, args.temperature, args.top_k, edit=edit, stop=subject.eot)
    for i, ids in enumerate(texts.tolist(), 1):
        if ids[0] == subject.eot:  # an empty prompt
            ids = ids[1:]
        if subject.eot in ids:
            end = ids.index(subject.eot)
            ids = ids[:end]
        text = subject.encoding.decode(ids, errors='replace')
        print(f'\n{title}{i}: {printable(text)}')


def all_edits(args: argparse.Namespace, subject: Subject, prompts: list[Prompt]
              ) -> tuple[dict[str, list[str]], Edit | None, list[str]]:
    """Collect the edits in files, then those on the command line.

    Returns their texts by flag, one edit (None if there are none), and a line about each.
    """
    n_vocab = subject.model.config.n_vocab
    saved = [phrases.read_edit(path, n_vocab) for path in args.edit]
    texts = phrases.combined([*saved, args.own_edits])
    if not args.edits:
        return texts, None, []
    edit, lines = phrases.make_edit(
        phrases.parse_edits(texts), subject.model, subject.encoding,
        [prompt.idx for prompt in prompts])
    return texts, edit, lines


def run(argv: list[str]) -> None:
    """Load, describe, and print what was asked for. No table is printed before all are made."""
    args = parse_args(argv)
    page = output_path('--html', args.html, '.html', '<!DOCTYPE html>\n<!-- ')
    json_file = output_path('--json', args.json, '.json', '{\n "models"')
    csv_file = output_path('--csv', args.csv, '.csv', 'table,')
    edit_file = output_path('--save-edit', args.save_edit, '.json', '{\n "vocabulary"')
    subject = load_subject(args.source, find_device(args.device), args.dtype)
    print(subject.about())
    if args.export is not None:
        dtype = getattr(torch, args.dtype or 'float32')
        export(subject.model, subject.tokenizer, args.export, dtype)
        print(f'{args.export}: written')
        return
    if args.of_senses or args.edits:
        subject.needs_senses('this command')

    prompts, notices = read_prompts(args, subject)
    if page:
        ids = prompts[0].idx[0].tolist()
        text = '' if ids == [subject.eot] else subject.encoding.decode(ids, errors='replace')
        size = write_page(subject, text, page)
        print(*notices, f'{args.html}: {size}', sep='\n')
        return

    texts, edit, lines = all_edits(args, subject, prompts)
    tables = make_tables(args, subject, prompts, edit)
    try:  # files first, as printing into head ends the program
        if edit_file:
            phrases.write_edit(edit_file, subject.model.config.n_vocab, texts)
        if json_file:
            write_json(json_file, [str(subject)], tables)
        if csv_file:
            write_csv(csv_file, tables)
    finally:
        for part in [*notices, *lines, *tables.values()]:
            print(printable(str(part)))
    if edit_file:
        print(f'\n{args.save_edit}: written')
    if args.looks or args.num_samples == 0:
        return
    for prompt in prompts:
        if args.edits:
            print_samples(subject, prompt, args, None, 'before ')
            print_samples(subject, prompt, args, edit, 'after ')
        else:
            print_samples(subject, prompt, args, None, '')


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
