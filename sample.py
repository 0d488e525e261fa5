"""Ask a trained model: continue a text, look into its words, explain a prediction, change it.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --explain she/he
    python sample.py --senses-off nurse:she/he "*:3-5" --replace "MacBook: Apple -> HP"
    python sample.py --start "The nurse said that" --html page.html

Flags that look or explain print tables and no text. Without them it writes text; with edits, both
before and after the edits.
"""

import argparse
import json
import sys
from functools import partial

import torch
from torch import Tensor

import senses
from model import Edit
from rucksack import phrases
from rucksack.common import Parser, find_device, number, output_path, printable, run_cli, write_file
from rucksack.page import write_page
from rucksack.paper import TOPICS
from rucksack.phrases import EDIT_FLAGS, PROMPT, SensesOf, quoted, word_id
from rucksack.published import export
from rucksack.subject import Subject, load_subject
from rucksack.table import Table, write_json

# -----------------------------------------------------------------------------
# The command line.


SEVERAL = dict(nargs='+', action='extend', default=[])  # flags with several values, or repeated


def make_parser() -> Parser:
    """The flags, in groups: the model and its text, what looks, what explains, what edits."""
    parser = Parser(prog='sample.py', description=__doc__.splitlines()[0])
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/]')
    add('--start', metavar='TEXT', default=PROMPT,
        help=f'the prompt [{PROMPT}]')
    add('--num-samples', metavar='N', type=number(int, 0, 1000), default=2,
        help='texts to write, 0: tables alone [2]')
    add('--max-new-tokens', metavar='N', type=number(int, 0, 100_000), default=60,
        help='longest continuation [60]')
    add('--temperature', metavar='T', type=number(float, 0), default=0.8,
        help='0: the likeliest token [0.8]')
    add('--top-k', metavar='K', type=number(int, 1),
        help='draw only from the K likeliest tokens')
    add('--seed', metavar='S', type=number(int, 0), default=0,
        help='random seed for sampling [0]')
    add('--device', metavar='D', default='auto',
        help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision for generation and export [float32; generation on CUDA bfloat16]')
    add('--json', metavar='FILE', help='also write the tables to a file')
    add('--html', metavar='FILE',
        help='only write a web page that runs the model, with a slider for each sense')
    add('--export', metavar='DIR', help='only write the model in the published format')
    add_looks(parser)
    add_edits(parser)
    return parser


def add_looks(parser: Parser) -> None:
    """The flags that look at senses or explain a prediction."""
    add = parser.add_argument_group('look at senses (--show: as edits leave them)').add_argument
    add('--show', metavar='WORD[:SENSES]', **SEVERAL,
        help='the words that each sense of WORD raises and lowers most')
    add('--find', metavar='A/B|A+B', **SEVERAL,
        help='senses that most separate A from B, or speak for A and B (Eq. 17)')
    add('--similar', metavar='WORD', **SEVERAL,
        help='the words most like WORD in each sense (Eq. 13, Eq. 14)')
    add = parser.add_argument_group('explain the prediction after the prompt').add_argument
    add('--explain', metavar='WORD|A/B', nargs='?', const='',
        help='what each sense of each token adds to the logit of WORD [the likeliest], or to the '
             'difference of the logits of A and B')
    add('--sweep', metavar='WORD:SENSES', **SEVERAL,
        help='the next words with these senses at weight 0 to 1 (Figure 3)')


def add_edits(parser: Parser) -> None:
    """The flags that edit senses."""
    add = parser.add_argument_group(
        'edit senses, in this order (SENSES: numbers such as 3-5,10; or A/B, the sense that most '
        'separates these words; *:SENSES is for every word)').add_argument
    add('--senses-off', metavar='WORD:SENSES', **SEVERAL,
        help='turn senses off: nurse:10, nurse:she/he')
    add('--senses-scale', metavar='WORD:SENSES=F', **SEVERAL,
        help='multiply senses by F: nurse:10=0.5')
    add('--replace', metavar='"WORD: OLD -> NEW"', **SEVERAL,
        help='what WORD says of OLD it says of NEW')
    add('--topic', metavar='"A, B"', **SEVERAL,
        help='turn up the senses that speak for these words, or for a topic of Table 10: '
             + ', '.join(TOPICS))
    add('--strength', metavar='S', **SEVERAL,
        help='strength of all topics, or one for each: 0 to 3 (Table 11), or four factors such as '
             '3.3,3.3,3,1 [2]')
    add('--save-edit', metavar='FILE',
        help='write these edits to a .json file, for --edit here and in eval.py')
    add('--edit', metavar='FILE', **SEVERAL,
        help='also apply the edits in such a file')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; UserError if flags do not go together."""
    parser = make_parser()
    args = parser.parse_args(argv)
    n_topics = len(args.topic)
    if not args.strength:
        args.strength = ['2'] * n_topics
    if len(args.strength) == 1 and n_topics > 1:
        args.strength *= n_topics
    if len(args.strength) != n_topics:
        parser.error('--strength goes with --topic: one for each, or one for all')
    args.edits = args.edit or any(getattr(args, flag) for flag in EDIT_FLAGS)
    args.looks = args.show or args.find or args.similar or args.sweep or args.explain is not None
    if args.export is not None and (args.edits or args.html):
        parser.error('--export writes the model as it is: no edits')
    if args.html and (args.edits or args.looks):
        parser.error('--html goes without looks and edits, which it has')
    if args.json and not (args.looks or args.edits):
        parser.error('--json goes with what looks, explains or edits')
    if args.save_edit and not args.edits:
        parser.error('--save-edit goes with edits')
    if args.save_edit and args.save_edit == args.json:
        parser.error(f'--save-edit and --json both name {args.json}; give two files')
    parse_phrases(args)
    return args


def parse_phrases(args: argparse.Namespace) -> None:
    """Turn the values of flags into objects, by text; UserError for one that cannot be parsed."""
    args.show = {text: parse_show(text) for text in args.show}
    pairs_and_bags = {}
    for text in args.find:
        parse = phrases.parse_pair if '/' in text else phrases.parse_bag
        pairs_and_bags[text] = parse(text)
    args.find = pairs_and_bags
    args.sweep = {text: phrases.parse_senses_of(text) for text in args.sweep}
    if args.explain is not None:
        args.explain = parse_words(args.explain)
    args.own_edits = {flag: getattr(args, flag) for flag in EDIT_FLAGS}
    phrases.parse_edits(args.own_edits)


def parse_show(text: str) -> tuple[str, SensesOf | None]:
    """WORD, or WORD:SENSES with the senses to show."""
    word, _, which = text.rpartition(':')
    if word and which:
        return word, phrases.parse_senses_of(text)
    return text.rstrip(':') or text, None


def parse_words(text: str) -> list[str]:
    """The two words in A/B, or the word alone; none in an empty text."""
    if '/' in text:
        return list(phrases.parse_pair(text))
    return [text] if text else []


# -----------------------------------------------------------------------------
# Looking at senses.


def ranking(subject: Subject, title: str, columns: dict[str, str], rows: list[tuple]) -> Table:
    """A table from rows (cells, ids (n,), scores (n,)).

    The cells go under columns; n words with their scores follow.
    """
    n = len(rows[0][1])
    ranks = {str(i + 1): word_and_score for i in range(n)}
    lines = []
    for cells, ids, scores in rows:
        words = [quoted(subject.encoding, v) for v in ids.tolist()]
        lines.append([*cells, *zip(words, scores.tolist())])
    return Table(title, columns | ranks, lines, clip=True)


def word_and_score(pair: tuple[str, float]) -> str:
    """A cell of a ranking."""
    word, score = pair
    return f'{word[:20]} {score:+.2f}'


def show(subject: Subject, phrase: tuple[str, SensesOf | None], edit: Edit) -> Table:
    """Tables 1 and 3: the norm of each sense of a word, and the words it raises and lowers most."""
    word, some = phrase
    pieces = phrases.pieces_of(subject.encoding, word)
    idx = torch.tensor([pieces], device=subject.device)  # (1, T)
    C = senses.edited(subject.model, idx, edit)[0, -1]  # (k, d)
    ids, logits = senses.extremes(subject.model, C, 8)  # (k, 16) each
    numbers = range(len(C))
    if some:
        _, numbers, _ = phrases.find_senses(some, subject.model, subject.encoding)
    rows = []
    for l in numbers:
        norm = C[l].norm().item()
        raised = slice(0, 8)
        lowered = slice(8, 16)
        rows.append(([l, norm, '+'], ids[l, raised], logits[l, raised]))
        rows.append((['', '', '-'], ids[l, lowered], logits[l, lowered]))
    what = phrases.describe(subject.encoding, word)
    title = (f'{what}: the words that each sense raises (+) and lowers (-) most, '
             'in logits at weight 1')
    return ranking(subject, title, {'sense': 'd', 'norm': '.1f', '': ''}, rows)


def separate(subject: Subject, pair: tuple[str, str]) -> Table:
    """Senses by how strongly they separate two words, on average over the vocabulary."""
    a, b = (word_id(subject.encoding, word) for word in pair)
    scores = senses.separation(subject.model, None, a, b)  # (V, k)
    mean_size = scores.abs().mean(0)  # (k,)
    rows = []
    for l in mean_size.argsort(descending=True).tolist():
        ids = scores[:, l].abs().topk(8).indices  # (8,)
        cells = [l, mean_size[l].item()]
        rows.append((cells, ids, scores[ids, l]))
    names = f'{quoted(subject.encoding, a)} (+) from {quoted(subject.encoding, b)} (-)'
    title = f'How far each sense separates {names}: mean size over all words, and where most'
    return ranking(subject, title, {'sense': 'd', 'mean': '.2f'}, rows)


def speak_for(subject: Subject, words: list[str]) -> Table:
    """Eq. 17: the senses, of all words, that most speak for a bag of words, and what they raise."""
    bag = phrases.bag_ids(subject.encoding, words)
    scores = senses.affinities(subject.model, [bag])[0]  # (V, k)
    rows = []
    for place in scores.flatten().topk(20).indices.tolist():  # of V * k
        w, l = divmod(place, scores.shape[1])
        C = senses.senses_of(subject.model, w)  # (k, d)
        ids, logits = senses.extremes(subject.model, C[l], 5)  # (10,) each
        cells = [scores[w, l].item(), quoted(subject.encoding, w), l]
        rows.append((cells, ids[:5], logits[:5]))
    title = (f'The senses that most speak for {"+".join(words)} (Eq. 17), '
             'and the words they raise most')
    return ranking(subject, title, {'score': '.2f', 'word': '<', 'sense': 'd'}, rows)


def similar(subject: Subject, word: str) -> Table:
    """The words most like a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    w = word_id(subject.encoding, word)
    cosines = senses.similarity(subject.model, w)  # (V, k)
    cosines[w] = -1  # a word is not its own neighbour
    kinds = {str(l): column for l, column in enumerate(cosines.T)}  # (V,) each
    kinds['min'] = cosines.amin(-1)
    rows = []
    for name, cosine in kinds.items():
        top = cosine.topk(8)
        rows.append(([name], top.indices, top.values))
    title = (f'{word}: the most similar words, by the cosine of each sense (Eq. 13) '
             'and its minimum (Eq. 14)')
    return ranking(subject, title, {'sense': ''}, rows)


# -----------------------------------------------------------------------------
# Explaining the prediction.


def next_words(subject: Subject, title: str, idx: Tensor, edits: dict[str, Edit | None]) -> Table:
    """The likeliest next words, and those that move most, under n edits.

    The first and the last edit get bars.
    """
    names = list(edits)
    predictions = [senses.predict(subject.model, idx, edit) for edit in edits.values()]
    probs = torch.stack(predictions)  # (n, V)
    first_and_last = probs[[0, -1]]  # (2, V)
    likeliest = first_and_last.topk(10).indices  # (2, 10)
    moves = first_and_last.diff(dim=0)[0].abs().topk(6)
    moving = moves.indices[moves.values > 1e-4]
    ids = torch.cat([likeliest.flatten(), moving]).unique()
    likeliest_first = probs[:, ids].amax(0).argsort(descending=True, stable=True)
    rows = []
    for v in ids[likeliest_first].tolist():
        word = quoted(subject.encoding, v)
        p = probs[:, v].tolist()
        rows.append([word, *p, p[0], p[-1]])
    columns = {'next word': ''} | dict.fromkeys(names, '.3f')
    columns |= {f'{names[0]}:': bar, f'{names[-1]}:': bar}
    return Table(title, columns, rows)


def bar(p: float) -> str:
    """A probability as a bar."""
    return '█' * round(20 * p)


def sweep(subject: Subject, phrase: SensesOf, idx: Tensor, edit: Edit) -> Table:
    """Figure 3: the next words as senses go from off to full weight, on top of the edit."""
    words, numbers, what = phrases.find_senses(phrase, subject.model, subject.encoding)
    edits = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        scale = senses.scale_senses(words, numbers, factor)
        edits[f'{factor:g}'] = senses.compose([edit, scale])
    title = f'The weight of {what}{phrases.absent(words, idx)}'
    return next_words(subject, title, idx, edits)


def explain(subject: Subject, words: list[str], idx: Tensor, edit: Edit) -> Table:
    """The largest terms alpha * C . E of the logit of a word, or of A minus that of B.

    words are [A], [A, B], or [] for the likeliest word.
    """
    probs = senses.predict(subject.model, idx, edit)  # (V,)
    ids = [word_id(subject.encoding, word) for word in words]
    if not ids:
        ids = [probs.argmax().item()]
    E = subject.model.wte.weight.detach()  # (V, d)
    v = E[ids[0]]  # (d,)
    if len(ids) == 2:
        v = v - E[ids[1]]
    C = senses.edited(subject.model, idx, edit)  # (1, T, k, d)
    alpha, scores = senses.explain(subject.model, idx, v, C)  # (1, T, k) each
    numbers = torch.stack([alpha * scores, alpha, scores]).flatten(1)  # (3, T * k)
    terms = numbers[0]  # (T * k,)
    largest = terms.abs().argsort(descending=True)[:15]
    rows = []
    for place in largest.tolist():
        j, l = divmod(place, alpha.shape[2])
        token = quoted(subject.encoding, idx[0, j].item())
        adds, weight, score = numbers[:, place].tolist()
        rows.append([adds, weight, score, token, j, l])
    total = terms.sum()
    rest = total - terms[largest].sum()
    rows.append([rest.item(), '', '', f'the other {len(terms) - len(rows)}', '', ''])
    rows.append([total.item(), '', '', 'in all', '', ''])
    names = ' above that of '.join(quoted(subject.encoding, w) for w in ids)
    chances = '; '.join(f'{probs[w]:.3f}, rank {(probs > probs[w]).sum() + 1}' for w in ids)
    title = f'What makes the logit of {names} after the prompt (probability {chances})'
    columns = {
        'adds': '+.3f',
        '= alpha': '.3f',
        '* C.E': '+.2f',
        'token': '<',
        'position': 'd',
        'sense': 'd'}
    return Table(title, columns, rows)


# -----------------------------------------------------------------------------
# The program.


def make_tables(args: argparse.Namespace, subject: Subject, idx: Tensor, edit: Edit
                ) -> dict[str, Table]:
    """The tables that the flags ask for, by name; for edits alone, next words before and after."""
    tables = {}
    for text, phrase in args.show.items():
        tables[f'show {text}'] = show(subject, phrase, edit)
    for text, words in args.find.items():
        find = separate if '/' in text else speak_for
        tables[f'find {text}'] = find(subject, words)
    for word in args.similar:
        tables[f'similar {word}'] = similar(subject, word)
    if args.explain is not None:
        tables['explain'] = explain(subject, args.explain, idx, edit)
    for text, phrase in args.sweep.items():
        tables[f'sweep {text}'] = sweep(subject, phrase, idx, edit)
    if args.edits and not args.looks:
        before_and_after = {'before': None, 'after': edit}
        title = 'The next word before and after the edit'
        tables['next words'] = next_words(subject, title, idx, before_and_after)
    return tables


def print_samples(subject: Subject, idx: Tensor, args: argparse.Namespace, edit: Edit | None,
                  title: str) -> None:
    """Continuations of the prompt, each up to its end-of-text."""
    in_bfloat16 = args.dtype == 'bfloat16'
    if args.dtype is None and subject.device.type == 'cuda':
        in_bfloat16 = True
    if in_bfloat16:
        subject.model.bfloat16()  # most of the time goes into reading weights
    torch.manual_seed(args.seed)
    prompts = idx.expand(args.num_samples, -1)
    texts = subject.model.generate(
        prompts, args.max_new_tokens, args.temperature, args.top_k, edit=edit, stop=subject.eot)
    for i, ids in enumerate(texts.tolist(), 1):
        if ids[0] == subject.eot:  # an empty prompt
            ids = ids[1:]
        if subject.eot in ids:
            end = ids.index(subject.eot)
            ids = ids[:end]
        text = subject.encoding.decode(ids, errors='replace')
        print(f'\n{title}{i}: {printable(text)}')


def all_edits(args: argparse.Namespace, n_vocab: int) -> dict[str, list[str]]:
    """The edits in files, then those on the command line: their texts by flag."""
    parts = [phrases.read_edit(path, n_vocab) for path in args.edit]
    parts.append(args.own_edits)
    return {flag: [text for part in parts for text in part[flag]] for flag in EDIT_FLAGS}


def run(argv: list[str]) -> None:
    """Load, describe, and print what was asked for. No table is printed before all are made."""
    args = parse_args(argv)
    page = output_path('--html', args.html, '.html')
    json_file = output_path('--json', args.json, '.json')
    edit_file = output_path('--save-edit', args.save_edit, '.json')

    subject = load_subject(args.source, find_device(args.device))
    config = subject.model.config
    print(subject.about())
    if args.export is not None:
        export(subject.model, args.export, getattr(torch, args.dtype or 'float32'))
        print(f'{args.export}: written')
        return
    if args.looks or args.edits:
        subject.needs_senses('this')

    ids, notices = phrases.read_prompt(args.start, subject.encoding, config.block_size)
    if page:
        visible = [i for i in ids if i != subject.eot]
        prompt = subject.encoding.decode(visible, errors='replace')
        size = write_page(subject, prompt, page)
        print(*notices, f'{args.html}: {size}', sep='\n')
        return
    idx = torch.tensor([ids], device=subject.device)  # (1, T)

    texts = all_edits(args, config.n_vocab)
    edits = phrases.parse_edits(texts)
    edit, lines = phrases.make_edit(edits, subject.model, subject.encoding, idx)
    tables = make_tables(args, subject, idx, edit)
    for part in [*notices, *lines, *tables.values()]:
        print(printable(str(part)))
    if edit_file:
        contents = {'vocabulary': config.n_vocab, 'edits': texts}
        write_file(edit_file, json.dumps(contents, indent=1) + '\n')
    if json_file:
        write_json(json_file, [str(subject)], tables)
    if args.looks or args.num_samples == 0:
        return
    if args.edits:
        print_samples(subject, idx, args, None, 'before ')
        print_samples(subject, idx, args, edit, 'after ')
    else:
        print_samples(subject, idx, args, None, '')


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
