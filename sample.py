"""Ask a trained model: continue a text, look into its words, explain a prediction, change it.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --explain she/he
    python sample.py --senses-off nurse:she/he "*:3-5" --replace "MacBook: Apple -> HP"
    python sample.py --start "The nurse said that" --html page.html

Flags that look or explain print tables and no text. Otherwise text is written; with edits, before and after.
"""

import argparse
import json
import sys
from functools import partial

import torch
from torch import Tensor

import senses
from model import Edit
from rucksack import grammar
from rucksack.common import Parser, find_device, number, output_path, printable, run_cli, write_file
from rucksack.grammar import EDITS, PROMPT, absent, named, pair_of, pieces_of, predict, shown, word_id
from rucksack.page import write_page
from rucksack.published import export
from rucksack.table import Subject, Table, load, needs_senses, write_json


def make_parser() -> Parser:
    """The flags, in groups: the model and its text, what looks, what explains, what edits."""
    parser = group = Parser(prog='sample.py', description=__doc__.splitlines()[0])
    several = dict(nargs='+', action='extend', default=[])  # values of a flag, which can also repeat

    def add(flag: str, metavar: str, help: str, **options) -> None:
        group.add_argument(flag, metavar=metavar, help=help, **options)

    add('--from', 'MODEL', 'checkpoint, folder or Hub name [the newest Backpack in out/]', dest='source')
    add('--start', 'TEXT', f'the prompt [{PROMPT}]', default=PROMPT)
    add('--num-samples', 'N', 'texts to write [2]', type=number(int, 1, 1000), default=2)
    add('--max-new-tokens', 'N', 'longest continuation [60]', type=number(int, 0, 100_000), default=60)
    add('--temperature', 'T', '0: the likeliest token [0.8]', type=number(float, 0), default=0.8)
    add('--top-k', 'K', 'draw from the K likeliest tokens alone', type=number(int, 1))
    add('--seed', 'S', 'of the draws [0]', type=number(int, 0), default=0)
    add('--device', 'D', 'auto, cpu, cuda, cuda:N or mps [auto]', default='auto')
    add('--dtype', 'T', 'of the weights that write text or are exported: float32 or bfloat16 [float32; text '
        'on CUDA bfloat16]', choices=('float32', 'bfloat16'))
    add('--json', 'FILE', 'write the tables to a file too')
    add('--html', 'FILE', 'only write a page in which the model runs, with a slider for each sense')
    add('--export', 'DIR', 'only write the model in the published format')
    group = parser.add_argument_group('look at senses (--show: as edits leave them)')
    add('--show', 'WORD[:SENSES]', 'the words that each sense of WORD raises and lowers most', **several)
    add('--find', 'A/B|A+B', 'senses that most separate A from B, or speak for A and B (Eq. 17)', **several)
    add('--similar', 'WORD', 'the words most like WORD in each sense (Eq. 13, Eq. 14)', **several)
    group = parser.add_argument_group('explain the prediction after the prompt')
    add('--explain', 'WORD|A/B', 'what each sense of each token adds to the logit of WORD [the likeliest], '
        'or to that of A above B', nargs='?', const='')
    add('--sweep', 'WORD:SENSES', 'the next words with these senses at weight 0 to 1 (Figure 3)', **several)
    group = parser.add_argument_group('edit senses, in this order (SENSES: numbers as 3-5,10; or A/B, the '
                                      'sense that most separates these words. *:SENSES is of every word)')
    add('--senses-off', 'WORD:SENSES', 'turn senses off: nurse:10, nurse:she/he', **several)
    add('--senses-scale', 'WORD:SENSES=F', 'multiply senses by F: nurse:10=0.5', **several)
    add('--replace', '"WORD: OLD -> NEW"', 'what WORD says of OLD it says of NEW', **several)
    add('--topic', '"A, B"', 'turn up the senses that speak for these words, or for a topic of Table 10: '
        + ', '.join(senses.TOPICS), **several)
    add('--strength', 'S', 'of all topics, or of each: 0 to 3 (Table 11), or 3.3,3.3,3,1 [2]', **several)
    add('--save-edit', 'FILE', 'write these edits to a .json file, for --edit here and of eval.py')
    add('--edit', 'FILE', 'apply the edits of such a file too', **several)
    return parser


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = make_parser()
    args = parser.parse_args(argv)
    args.edits = args.edit + args.senses_off + args.senses_scale + args.replace + args.topic
    args.looks = args.show + args.find + args.similar + args.sweep + [''] * (args.explain is not None)
    for flag, wrong, why in (
            ('--export', args.export and (args.edits or args.html), 'writes the model as it is: no edits'),
            ('--html', args.html and args.edits + args.looks, 'goes without looks and edits, which it has'),
            ('--json', args.json and not args.looks + args.edits, 'goes with what looks, explains or edits'),
            ('--strength', len(args.strength) > len(args.topic) or 1 < len(args.strength) < len(args.topic),
             'goes with --topic: one for each, or one for all'),
            ('--save-edit', args.save_edit and not args.edits, 'goes with edits')):
        if wrong:
            parser.error(f'{flag} {why}')
    args.strength = (args.strength or ['2']) * (len(args.topic) if len(args.strength) < 2 else 1)
    return args


def ranking(s: Subject, title: str, columns: dict[str, str], rows: list[tuple]) -> Table:
    """A table of rows (cells, ids (n,), scores (n,)): the cells under columns, then n times [word, score]."""
    pairs = map(str, range(1, len(rows[0][1]) + 1))
    columns = columns | dict.fromkeys(pairs, lambda pair: f'{pair[0][:20]} {pair[1]:+.2f}')
    rows = [[*cells, *([shown(s.encoding, v), x] for v, x in zip(ids.tolist(), scores.tolist()))]
            for cells, ids, scores in rows]
    return Table(title, columns, rows, clip=True)


def show(s: Subject, text: str, edit: Edit) -> Table:
    """Tables 1 and 3: the words that each sense of a word raises and lowers most, and its length."""
    word, _, which = text.rpartition(':') if ':' in text[1:-1] else (text.rstrip(':') or text, '', '')
    idx = torch.tensor([pieces_of(s.encoding, word)], device=s.device)  # (1, T): 1, or its pieces
    C, rows = senses.edited(s.model, idx, edit)[0, -1], []  # (k, d)
    ids, scores = (t.unflatten(1, (2, -1)) for t in senses.extremes(s.model, C, 8))  # (k, 2, 8) each
    for l in grammar.parse_word_senses(text, s.model, s.encoding)[1] if which else range(len(C)):
        rows.append(([l, C[l].norm().item(), '+'], ids[l, 0], scores[l, 0]))
        rows.append((['', '', '-'], ids[l, 1], scores[l, 1]))
    return ranking(s, f'{named(s.encoding, word)}: the words that each sense raises (+) and lowers (-) most, '
                   'in logits at weight 1', {'sense': 'd', 'norm': '.1f', '': ''}, rows)


def separate(s: Subject, text: str) -> Table:
    """Senses by how strongly they separate two words, each index over all words."""
    a, b = pair_of(s.encoding, text)
    names = f'{shown(s.encoding, a)} (+) from {shown(s.encoding, b)} (-)'
    scores = senses.separation(s.model, None, a, b)  # (V, k)
    spread, rows = scores.abs().mean(0), []  # (k,)
    for l in spread.argsort(descending=True).tolist():
        ids = scores[:, l].abs().topk(8).indices  # (8,)
        rows.append(([l, spread[l].item()], ids, scores[ids, l]))
    return ranking(s, f'How far each sense separates {names}: mean size over all words, and where most',
                   {'sense': 'd', 'mean': '.2f'}, rows)


def speak_for(s: Subject, text: str) -> Table:
    """Eq. 17: the senses, of all words, that most speak for a bag of words, and what they say."""
    bag = grammar.bag_of_words(s.encoding, grammar.words_of_bag(text))
    scores, rows = senses.affinities(s.model, [bag])[0], []  # (V, k)
    for place in scores.flatten().topk(20).indices.tolist():  # of V * k
        w, l = divmod(place, scores.shape[1])
        C = s.model.senses(torch.tensor(w, device=s.device))  # (k, d)
        ids, added = senses.extremes(s.model, C[l], 5)  # (10,) each
        rows.append(([scores[w, l].item(), shown(s.encoding, w), l], ids[:5], added[:5]))
    return ranking(s, f'The senses that most speak for {text} (Eq. 17), and the words they raise most',
                   {'score': '.2f', 'word': '<', 'sense': 'd'}, rows)


def similar(s: Subject, word: str) -> Table:
    """The words most like a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    own = word_id(s.encoding, word)
    cosines, lines = senses.similarity(s.model, own), []  # (V, k)
    cosines[own] = -1  # a word is not its own neighbour
    for name, row in [*enumerate(cosines.T), ('min', cosines.amin(-1))]:  # (V,) each
        top = row.topk(8)
        lines.append(([str(name)], top.indices, top.values))
    return ranking(s, f'{word}: the most similar words, by the cosine of each sense (Eq. 13) and its minimum '
                   '(Eq. 14)', {'sense': ''}, lines)


def next_words(s: Subject, title: str, idx: Tensor, edits: dict[str, Edit | None]) -> Table:
    """The likeliest next words and those that move most under several edits, with bars for first and last."""
    names, probs = list(edits), [predict(s.model, idx, edit) for edit in edits.values()]  # (V,) each
    moves = (probs[-1] - probs[0]).abs().topk(6)
    likely = [p.topk(10).indices for p in (probs[0], probs[-1])]
    ids = torch.cat([*likely, moves.indices[moves.values > 1e-4]]).unique().tolist()
    ids.sort(key=lambda v: -max(p[v].item() for p in probs))
    rows = [[shown(s.encoding, v), *(p[v].item() for p in (*probs, probs[0], probs[-1]))] for v in ids]
    bars = dict.fromkeys([f'{names[0]}:', f'{names[-1]}:'], lambda p: '█' * round(20 * p))
    return Table(title, {'next word': ''} | dict.fromkeys(names, '.3f') | bars, rows)


def sweep(s: Subject, text: str, idx: Tensor, edit: Edit) -> Table:
    """Figure 3: the next words as senses go from off to what they were, on top of the edit."""
    words, chosen, line = grammar.parse_word_senses(text, s.model, s.encoding)
    edits = {f'{factor:g}': senses.compose([edit, senses.scale_senses(words, chosen, factor)])
             for factor in (0, 0.25, 0.5, 0.75, 1)}
    return next_words(s, f'The weight of {line}{absent(words, idx)}', idx, edits)


def explain(s: Subject, text: str, idx: Tensor, edit: Edit) -> Table:
    """The largest terms alpha * C . E of the logit of a word (default: the likeliest), or of A above B."""
    E, probs = s.model.wte.weight.detach(), predict(s.model, idx, edit)  # (V, d), (V,)
    words = pair_of(s.encoding, text) if '/' in text else [
        word_id(s.encoding, text) if text else probs.argmax().item()]
    v = E[words[0]] - sum(E[w] for w in words[1:])  # (d,)
    C, rows = senses.edited(s.model, idx, edit), []  # (1, T, k, d)
    alpha, scores = (t[0] for t in senses.explain(s.model, idx, v, C))  # (T, k) each
    terms = (alpha * scores).flatten()  # (T * k,)
    for place in terms.abs().argsort(descending=True)[:15].tolist():
        j, l = divmod(place, alpha.shape[1])
        rows.append([terms[place].item(), alpha[j, l].item(), scores[j, l].item(),
                     shown(s.encoding, idx[0, j].item()), j, l])
    total, others = terms.sum().item(), f'the other {len(terms) - len(rows)}'
    rows.append([total - sum(row[0] for row in rows), '', '', others, '', ''])
    rows.append([total, '', '', 'in all', '', ''])
    names = ' above that of '.join(shown(s.encoding, w) for w in words)
    chances = '; '.join(f'{probs[w]:.3f}, rank {(probs > probs[w]).sum() + 1}' for w in words)
    return Table(f'What makes the logit of {names} after the prompt (probability {chances})', {
        'adds': '+.3f', '= alpha': '.3f', '* C.E': '+.2f', 'token': '<', 'position': 'd', 'sense': 'd'}, rows)


def make_tables(args: argparse.Namespace, s: Subject, idx: Tensor, edit: Edit) -> dict[str, Table]:
    """The tables that the flags ask for, by name; with edits alone, the next words before and after."""
    tables = {f'show {text}': show(s, text, edit) for text in args.show}
    for text in args.find:
        tables[f'find {text}'] = separate(s, text) if '/' in text else speak_for(s, text)
    tables |= {f'similar {word}': similar(s, word) for word in args.similar}
    if args.explain is not None:
        tables['explain'] = explain(s, args.explain, idx, edit)
    tables |= {f'sweep {text}': sweep(s, text, idx, edit) for text in args.sweep}
    if args.edits and not args.looks:
        tables['next words'] = next_words(s, 'The next word before and after the edit', idx,
                                          {'before': None, 'after': edit})
    return tables


def print_samples(s: Subject, idx: Tensor, args: argparse.Namespace, edit: Edit | None, title: str) -> None:
    """Continuations of the prompt, each up to its end-of-text."""
    if args.dtype == 'bfloat16' or args.dtype is None and s.device.type == 'cuda':
        s.model.bfloat16()  # reading its weights is most of the work
    torch.manual_seed(args.seed)
    texts = s.model.generate(idx.expand(args.num_samples, -1), args.max_new_tokens, args.temperature,
                             args.top_k, edit=edit, stop=s.eot)
    for i, row in enumerate(texts.tolist(), 1):
        row = [*row, s.eot][row[0] == s.eot:]  # an empty prompt is an end-of-text
        text = s.encoding.decode(row[:row.index(s.eot)], errors='replace')
        print(f'\n{title}{i}: {printable(text)}')


def run(argv: list[str]) -> None:
    """Load, describe, and print what was asked for. No table is printed before all are made."""
    args = parse_args(argv)
    page, file = output_path('--html', args.html, '.html'), output_path('--json', args.json, '.json')
    kept = output_path('--save-edit', args.save_edit, '.json')
    s = load(args.source, find_device(args.device))
    print(s.about() + s.chosen)
    if args.export is not None:
        export(s.model, args.export, getattr(torch, args.dtype or 'float32'))
        return print(f'{args.export}: written')
    if args.looks or args.edits:
        needs_senses(s, 'this')
    ids, lines = grammar.read_prompt(args.start, s.encoding, s.model.config.block_size)
    if page:
        prompt = s.encoding.decode([i for i in ids if i != s.eot], errors='replace')
        return print('\n'.join([*lines, f'{args.html}: {write_page(s, prompt, page)}']))
    idx = torch.tensor([ids], device=s.device)  # (1, T)
    parts = [*(grammar.read_edit(path, s.model) for path in args.edit), vars(args)]
    asked = {flag: sum((part[flag] for part in parts), []) for flag in EDITS}
    edit, more = grammar.make_edit(asked, s.model, s.encoding, idx)
    tables = make_tables(args, s, idx, edit)
    for part in [*lines, *more, *tables.values()]:
        print(printable(str(part)))
    if kept:
        write_file(kept, json.dumps({'vocabulary': s.model.config.n_vocab, 'edits': asked}, indent=1) + '\n')
    if file:
        write_json(file, [str(s)], tables)
    if not args.looks:
        for title, its in (('before ', None), ('after ', edit)) if args.edits else (('', None),):
            print_samples(s, idx, args, its, title)


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
