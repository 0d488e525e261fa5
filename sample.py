"""Ask a trained model: continue a text, look into its words, explain a prediction, change it.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --show nurse
    python sample.py --find she/he
    python sample.py --explain she/he
    python sample.py --senses-off nurse:she/he "*:3-5" --replace "MacBook: Apple -> HP"
    python sample.py --start "The nurse said that" --html page.html

Flags that look or explain print tables and write no text; --html makes a page for a browser, with a slider
for each sense. Otherwise a text is written; with edits, before and after.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import senses
from model import Edit
from rucksack import grammar
from rucksack.common import Parser, find_device, number, output_path, printable, run_cli
from rucksack.grammar import PROMPT, absent, pair_of, predict, shown, word_id
from rucksack.page import write_page
from rucksack.published import export
from rucksack.table import Subject, Table, load, needs_senses, write_json

SEVERAL = dict(nargs='+', action='extend', default=[])  # a flag that takes several values, and repeats


def make_parser() -> Parser:
    """The flags, in groups: the model and its text, what looks, what explains, what edits."""
    parser = group = Parser(prog='sample.py', description=__doc__.splitlines()[0])

    def add(flag: str, metavar: str, help: str, **options) -> None:
        """A flag of the group."""
        group.add_argument(flag, metavar=metavar, help=help, **options)

    add('--from', 'MODEL', 'checkpoint, folder of a run or of published weights, or Hub name as '
        'stanfordnlp/backpack-gpt2 (default: the newest Backpack in out/)', dest='source')
    add('--start', 'TEXT', f'the prompt, or FILE:path [{PROMPT}]', default=PROMPT)
    add('--num-samples', 'N', 'texts to write [2]', type=number(int, 1, 1000), default=2)
    add('--max-new-tokens', 'N', 'longest continuation [60]', type=number(int, 0, 100_000), default=60)
    add('--temperature', 'T', '0: the likeliest token [0.8]', type=number(float, 0), default=0.8)
    add('--top-k', 'K', 'draw from the K likeliest tokens alone', type=number(int, 1))
    add('--seed', 'S', 'of the draws [0]', type=number(int, 0), default=0)
    add('--device', 'D', 'auto, cpu, cuda, cuda:N or mps [auto]', default='auto')
    add('--json', 'FILE', 'write the tables to a file too')
    add('--html', 'FILE', 'write a page with a slider for each sense of the prompt, and nothing else; '
        'words of --show can be looked up there')
    add('--export', 'DIR', 'write the model as published (Backpack or GPT-2), and nothing else')
    group = parser.add_argument_group('look at senses (--show: as edits leave them)')
    add('--show', 'WORD[:SENSES]', 'the words that each sense of WORD raises and lowers most', **SEVERAL)
    add('--find', 'A/B|A+B', 'A/B: senses by how strongly they separate A from B; A+B: words and senses '
        'by how strongly they speak for this bag (Eq. 17)', **SEVERAL)
    add('--word', 'WORD', 'with --find A/B: the senses of this word alone')
    add('--similar', 'WORD', 'the words most like WORD in each sense (Eq. 13, Eq. 14)', **SEVERAL)
    group = parser.add_argument_group('explain the prediction after the prompt')
    add('--explain', 'WORD|A/B', 'what each sense of each token adds to the logit of WORD (default: the '
        'likeliest), or to that of A above B', nargs='?', const='')
    group.add_argument('--weights', nargs='?', const='senses', choices=('senses', 'mean'),
                       help='the weights alpha on the tokens, a column a sense, or their mean')
    add('--sweep', 'WORD:SENSES', 'the next words with these senses at weight 0 to 1 (Figure 3)', **SEVERAL)
    group = parser.add_argument_group(
        'edit senses (one after another in this order; SENSES are numbers and ranges as 3-5,10, or A/B, the '
        'sense that most separates these words; *:SENSES is every word)')
    add('--senses-off', 'WORD:SENSES', 'turn senses off: nurse:10, nurse:she/he', **SEVERAL)
    add('--senses-scale', 'WORD:SENSES=F', 'multiply senses by F: nurse:10=0.5', **SEVERAL)
    add('--replace', '"WORD: OLD -> NEW"', 'what WORD says of OLD it says of NEW', **SEVERAL)
    add('--topic', '"A, B"', 'turn senses up that speak for these words, or for a topic of Table 10: '
        + ', '.join(senses.TOPICS), **SEVERAL)
    add('--strength', 'S', 'of the topic: 0 to 3, a row of Table 11, or four numbers as 3.3,3.3,3,1; one for '
        'each --topic, or one for all [2]', **SEVERAL)
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.edits = args.senses_off + args.senses_scale + args.replace + args.topic
    args.looks = args.show + args.find + args.similar + args.sweep + [
        flag for flag in (args.explain, args.weights) if flag is not None]
    for flag, wrong, why in (
            ('--export', args.export and (args.edits or args.html), 'writes the model as it is: no edits'),
            ('--html', args.html and (args.edits or args.looks != args.show), 'goes with nothing but --show'),
            ('--json', args.json and not args.looks + args.edits, 'goes with what looks, explains or edits'),
            ('--word', args.word and not any('/' in text for text in args.find), 'goes with --find A/B'),
            ('--strength', args.strength and len(args.strength) not in (1, len(args.topic)) or
             args.strength and not args.topic, 'goes with --topic: one for each, or one for all')):
        if wrong:
            parser.error(f'{flag} {why}')
    return args


def edit_from(args: argparse.Namespace, s: Subject, prompt: list[int]) -> tuple[Edit | None, list[str]]:
    """The edit that the flags ask for, None without such flags, and a line on each part of it."""
    edits, lines = [], []

    def add(edit: Edit, ids: list[int] | None, line: str) -> None:
        """Take one more edit, with a line that says so."""
        lines.append(line + absent(ids, prompt))
        edits.append(edit)

    scaled = [(text, 0.0) for text in args.senses_off] + list(map(grammar.parse_factor, args.senses_scale))
    for text, factor in scaled:
        ids, chosen, line = grammar.parse_word_senses(text, s.model, s.encoding)
        line = f'Times {factor:g}: {line}' if factor else f'Off: {line}'
        add(senses.scale_senses(ids, chosen, factor), ids, line)
    for text in args.replace:
        ids, old, new = grammar.parse_replacement(text, s.encoding)
        word, old_word, new_word = (shown(s.encoding, v) for v in (ids[0], old, new))
        add(senses.replace_word(s.model, ids, old, new), ids,
            f'Replaced: what {word} says of {old_word} it says of {new_word}')
    strengths = [grammar.parse_strength(text) for text in args.strength or ['2']]
    topics = [grammar.words_of_bag(text) for text in args.topic]
    bags = [grammar.bag_of_words(s.encoding, words) for words in topics]  # all parsed before the long work
    for words, bag, weights in zip(topics, bags, strengths * len(bags) if len(strengths) == 1 else strengths):
        add(senses.topic(s.model, senses.affinity(s.model, bag), weights), None,
            f'Topic: {", ".join(words)}; senses times {", ".join(f"{w:g}" for w in weights)}')
    return (senses.compose(edits) if edits else None), lines


def pairs(s: Subject, ids: Tensor, scores: Tensor) -> list[list]:
    """[word, score] for each of the ids and scores (n,); a long word is cut."""
    names = [shown(s.encoding, v) for v in ids.tolist()]
    return [[name if len(name) < 20 else name[:18] + "…'", round(score, 4)]
            for name, score in zip(names, scores.tolist())]


def pair_columns(n: int) -> dict[str, Callable]:
    """n columns of [word, score]."""
    return {str(i): lambda pair: f'{pair[0]} {pair[1]:+.2f}' for i in range(1, n + 1)}


def show(s: Subject, word: str, w: int, chosen: list[int], edit: Edit | None) -> Table:
    """Tables 1 and 3: the words that each sense of a word raises and lowers most, and its length."""
    C = senses.edited(s.model, torch.tensor([[w]], device=s.device), edit)[0, 0]  # (k, d)
    ids, scores = (t.unflatten(1, (2, -1)) for t in senses.extremes(s.model, C, 8))  # (k, 2, n) each
    rows = []
    for l in chosen:
        rows.append([l, C[l].norm().item(), '+', *pairs(s, ids[l, 0], scores[l, 0])])
        rows.append(['', '', '-', *pairs(s, ids[l, 1], scores[l, 1])])
    return Table(f'{word}: the words that each sense raises (+) and lowers (-) most, in logits at weight 1',
                 {'sense': 'd', 'norm': '.1f', '': '', **pair_columns(ids.shape[-1])}, rows, clip=True)


def separate(s: Subject, a: int, b: int, word: str | None) -> Table:
    """Senses by how strongly they separate two words: those of one word, or each index over all words."""
    names = f'{shown(s.encoding, a)} (+) from {shown(s.encoding, b)} (-)'
    if word is not None:
        scores = senses.separation(s.model, word_id(s.encoding, word), a, b)  # (k,)
        rows = [[l, scores[l].item()] for l in scores.abs().argsort(descending=True).tolist()]
        return Table(f'{word}: how far each sense separates {names}, in logits at weight 1',
                     {'sense': 'd', 'logits': '+.2f'}, rows)
    scores = senses.separation(s.model, None, a, b)  # (V, k)
    spread, rows, n = scores.abs().mean(0), [], min(8, len(scores))  # (k,)
    for l in spread.argsort(descending=True).tolist():
        ids = scores[:, l].abs().topk(n).indices  # (n,)
        rows.append([l, spread[l].item(), *pairs(s, ids, scores[ids, l])])
    return Table(f'How far each sense separates {names}: mean size over all words, and where most',
                 {'sense': 'd', 'mean': '.2f', **pair_columns(n)}, rows, clip=True)


def speak_for(s: Subject, text: str, bag: list[int]) -> Table:
    """Eq. 17: the senses, of all words, that most speak for a bag of words, and what they say."""
    scores, rows = senses.affinity(s.model, bag), []  # (V, k)
    for place in scores.flatten().topk(min(20, scores.numel())).indices.tolist():  # of V * k
        w, l = divmod(place, scores.shape[1])
        C = s.model.senses(torch.tensor(w, device=s.device))[l]  # (d,)
        ids, added = (t.unflatten(0, (2, -1))[0] for t in senses.extremes(s.model, C, 5))  # (n,) each
        rows.append([scores[w, l].item(), shown(s.encoding, w), l, *pairs(s, ids, added)])
    return Table(f'The senses that most speak for {text} (Eq. 17), and the words they raise most',
                 {'score': '.2f', 'word': '<', 'sense': 'd', **pair_columns(len(ids))}, rows, clip=True)


def similar(s: Subject, word: str, own: int) -> Table:
    """The words most like a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    cosines, lines = senses.similarity(s.model, own), []  # (V, k)
    rows = {str(l): row for l, row in enumerate(cosines.T)} | {'min': cosines.min(-1).values}  # (V,) each
    n = min(9, len(cosines))
    for name, row in rows.items():
        ids = row.topk(n).indices  # (n,)
        ids = ids[ids != own][:n - 1]
        lines.append([name, *pairs(s, ids, row[ids])])
    return Table(f'{word}: the most similar words, by the cosine of each sense (Eq. 13) and its minimum '
                 '(Eq. 14)', {'sense': '', **pair_columns(n - 1)}, lines, clip=True)


def next_words(s: Subject, title: str, columns: dict[str, Tensor]) -> Table:
    """The likeliest next words under several edits side by side, with bars for the first and the last."""
    probs = list(columns.values())  # (V,) each
    ids = torch.cat([p.topk(min(10, len(p))).indices for p in (probs[0], probs[-1])]).unique().tolist()
    ids.sort(key=lambda v: -max(p[v].item() for p in probs))
    rows = [[shown(s.encoding, v), *(p[v].item() for p in probs), probs[0][v].item(), probs[-1][v].item()]
            for v in ids]
    bars = [f'{name}:' for name in (list(columns)[0], list(columns)[-1])]
    return Table(title, {'next word': '', **dict.fromkeys(columns, '.3f'),
                         **dict.fromkeys(bars, lambda p: '█' * round(20 * p))}, rows)


def sweep(s: Subject, parsed: tuple, idx: Tensor, edit: Edit | None) -> Table:
    """Figure 3: the next words as senses go from off to what they were, on top of the edit."""
    (ids, chosen, line), columns = parsed, {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        both = [*([edit] if edit else []), senses.scale_senses(ids, chosen, factor)]
        columns[f'{factor:g}'] = predict(s.model, idx, senses.compose(both))
    return next_words(s, f'The weight of {line}{absent(ids, idx[0].tolist())}', columns)


def explain(s: Subject, words: list[int], idx: Tensor, edit: Edit | None) -> Table:
    """The terms alpha * C . E that the logit of a word (by default the likeliest), or the difference of the
    logits of two, is the sum of; largest first.
    """
    E, probs = s.model.wte.weight.detach(), predict(s.model, idx, edit)  # (V, d), (V,)
    w, *other = words or [probs.argmax().item()]
    what, v = f'the logit of {shown(s.encoding, w)}', E[w]  # (d,)
    chances = f'probability {probs[w]:.3f}, rank {(probs > probs[w]).sum().item() + 1}'
    for b in other:
        what, v = f'{what} above that of {shown(s.encoding, b)}', E[w] - E[b]
        chances = f'probabilities {probs[w]:.3f} and {probs[b]:.3f}'
    C = senses.edited(s.model, idx, edit)  # (1, T, k, d)
    alpha, scores = (t[0] for t in senses.explain(s.model, idx, v, C))  # (T, k) each
    terms, rows = (alpha * scores).flatten(), []  # (T * k,)
    top = terms.abs().argsort(descending=True)[:15]
    for place in top.tolist():
        j, l = divmod(place, alpha.shape[1])
        rows.append([terms[place].item(), alpha[j, l].item(), scores[j, l].item(),
                     shown(s.encoding, idx[0, j].item()), j, l])
    for x, what_for in ((terms.sum() - terms[top].sum(), f'the other {len(terms) - len(top)}'),
                        (terms.sum(), 'in all')):
        rows.append([x.item(), '', '', what_for, '', ''])
    return Table(f'What makes {what} after the prompt ({chances})', {
        'adds': '+.3f', '= alpha': '.3f', '* C.E': '+.2f', 'token': '<', 'position': 'd', 'sense': 'd'}, rows)


@torch.no_grad()
def weights(s: Subject, which: str, idx: Tensor) -> Table:
    """Eq. 12: how much the prediction after the prompt takes of each token, by sense or in the mean."""
    alpha = s.model.alpha(idx)[0, :, -1]  # (k, T)
    rows = {'mean': alpha.mean(0)} if which == 'mean' else {str(l): row for l, row in enumerate(alpha)}
    blocks = dict.fromkeys(rows, lambda a: ' ▁▂▃▄▅▆▇█'[round(8 * a)] * 3)
    lines = [[shown(s.encoding, t), *(row[j].item() for row in rows.values())]
             for j, t in enumerate(idx[0].tolist())]
    return Table('The weights alpha of the tokens for the next one; a full block is 1, each column sums to 1',
                 {'token': '', **blocks}, lines)


def print_samples(s: Subject, idx: Tensor, args: argparse.Namespace, edit: Edit | None, title: str) -> None:
    """Continuations of the prompt, each up to its end-of-text."""
    torch.manual_seed(args.seed)
    eot, start = s.encoding.eot_token, idx.shape[1]
    texts = s.model.generate(idx.expand(args.num_samples, -1), args.max_new_tokens, args.temperature,
                             args.top_k, edit=edit, stop=eot)
    for i, row in enumerate(texts.tolist(), 1):
        end = row.index(eot, start) if eot in row[start:] else len(row)
        text = s.encoding.decode([t for t in row[:end] if t != eot], errors='replace')
        print(f'\n{title}{i}: {printable(text)}')


def tables_of(args: argparse.Namespace, s: Subject, idx: Tensor, edit: Edit | None) -> dict[str, Callable]:
    """What makes each table that the flags ask for; all words are parsed before any table is made."""
    makers, encoding, every = {}, s.encoding, list(range(s.model.config.n_sense))
    for text in args.show:
        word, _, which = text.rpartition(':') if ':' in text[1:-1] else (text, '', '')
        chosen = grammar.parse_word_senses(text, s.model, encoding)[1] if which else every
        makers[f'show {text}'] = partial(show, s, word, word_id(encoding, word), chosen, edit)
    for text in args.find:
        if '/' in text:
            makers[f'find {text}'] = partial(separate, s, *pair_of(encoding, text), args.word)
        else:
            bag = grammar.bag_of_words(encoding, grammar.words_of_bag(text))
            makers[f'find {text}'] = partial(speak_for, s, text, bag)
    for word in args.similar:
        makers[f'similar {word}'] = partial(similar, s, word, word_id(encoding, word))
    if args.explain is not None:
        words = pair_of(encoding, args.explain) if '/' in args.explain else \
            [word_id(encoding, args.explain)] if args.explain else []
        makers['explain'] = partial(explain, s, words, idx, edit)
    if args.weights:
        makers['weights'] = partial(weights, s, args.weights, idx)
    for text in args.sweep:
        parsed = grammar.parse_word_senses(text, s.model, encoding)
        makers[f'sweep {text}'] = partial(sweep, s, parsed, idx, edit)
    if edit and not makers:
        makers['next words'] = lambda: next_words(s, 'The next word before and after the edit', {
            'before': predict(s.model, idx, None), 'after': predict(s.model, idx, edit)})
    return makers


def run(argv: list[str]) -> None:
    """Load, describe, and print what was asked for."""
    args = parse_args(argv)
    page, file = output_path('--html', args.html, '.html'), output_path('--json', args.json, '.json')
    s = load(args.source, find_device(args.device))
    print(s.about())
    if args.export is not None:
        export(s.model, args.export)
        return print(f'{args.export}: written')
    if page or args.looks or args.edits:
        needs_senses(s, 'this')
    ids, lines = grammar.read_prompt(args.start, s.encoding, s.model.config.block_size)
    idx = torch.tensor([ids], device=s.device)  # (1, T)
    if page:
        words = [word_id(s.encoding, word) for word in args.show]
        return print('\n'.join([*lines, f'{args.html}: {write_page(s, ids, words, page, lines)}']))
    edit, more = edit_from(args, s, ids)
    makers, tables = tables_of(args, s, idx, edit), {}
    print(''.join(f'{line}\n' for line in lines + more), end='')
    for name, make in makers.items():
        tables[name] = make()
        print(tables[name])
    if file:
        write_json(file, [str(s)], tables)
    if not args.looks:
        for one, title in ((None, 'before '), (edit, 'after ')) if edit else ((None, ''),):
            print_samples(s, idx, args, one, title)


def main(argv: list[str]) -> None:
    """Run the command line."""
    run_cli('sample.py', run, argv)


if __name__ == '__main__':
    main(sys.argv[1:])
