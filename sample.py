"""Ask a trained model: continue a text, look into its words, explain a prediction, change it.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --show nurse
    python sample.py --find she/he
    python sample.py --explain she/he
    python sample.py --senses-off nurse:10 "*:3-5" --replace "MacBook: Apple -> HP"
    python sample.py --start "The nurse said that" --html page.html

Flags that look or explain print and write no text; --html makes a page for a browser, with a slider for each
sense. Otherwise a text is written; with edits, before and after.
"""

import argparse
import shutil
import sys

import tiktoken
import torch
from torch import Tensor

import senses
from model import Backpack, Edit
from rucksack import grammar
from rucksack.checkpoint import newest_backpack
from rucksack.common import SEVERAL, Parser, UserError, answer, find_device, number, place_for, printable
from rucksack.data import load_tokenizer
from rucksack.grammar import PROMPT, not_there, predict, read_prompt, shown, word_id
from rucksack.page import TEMPLATE, write_page
from rucksack.published import export, from_pretrained


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it writes."""
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder of a run or of published weights, or their name on the Hugging Face Hub, as '
             'stanfordnlp/backpack-gpt2 (default: the newest Backpack in out/)')
    add('--start', metavar='TEXT', default=PROMPT, help=f'the prompt, or FILE:path [{PROMPT}]')
    add('--num-samples', type=number(int, 1, 1000), metavar='N', default=2, help='texts to write [2]')
    add('--max-new-tokens', type=number(int, 0, 100_000), metavar='N', default=60,
        help='longest continuation [60]')
    add('--temperature', type=number(float, 0), metavar='T', default=0.8, help='0: the likeliest word [0.8]')
    add('--top-k', type=number(int, 1), metavar='K', help='draw among the K likeliest words only')
    add('--seed', type=number(int, 0), metavar='S', default=0, help='of the draws [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--html', metavar='FILE', help='write a page on the prediction after the prompt and nothing else: '
        'its words, their senses, a slider for each; words of --show can be looked up there too')
    add('--export', metavar='DIR', help='write the model in the format of stanfordnlp/backpack-gpt2 (a '
        'Transformer: of gpt2) and nothing else')


def add_look_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that read words and predictions."""
    group = parser.add_argument_group('look at senses (as the model has them; --show: as edits leave them)')
    look = group.add_argument
    look('--show', **SEVERAL, metavar='WORD', help='the words that each sense of WORD raises and lowers most')
    look('--find', **SEVERAL, metavar='A/B|A+B+..',
         help='A/B: senses ranked by how strongly they separate word A from B; A+B+..: words and senses '
              'ranked by how strongly they speak for this bag of words (Eq. 17)')
    look('--word', metavar='WORD', help='with --find A/B: the senses of this word alone')
    look('--similar', **SEVERAL, metavar='WORD',
         help='the words most like WORD in each sense (Eq. 13) and in all (Eq. 14)')
    which = group.add_mutually_exclusive_group().add_argument
    which('--sense', type=number(int, 0), metavar='L', help='with --similar: by sense L alone')
    which('--min', action='store_true', help='with --similar: by the least alike sense alone')
    add = parser.add_argument_group('explain the prediction after the prompt').add_argument
    add('--explain', nargs='?', const='', metavar='WORD|A/B',
        help='what each sense of each word of the prompt adds to the score of WORD (default: the likeliest '
             'next word), or to the score of A above B')
    add('--weights', nargs='?', const='senses', choices=('senses', 'mean'),
        help='the weights alpha on the words of the prompt, a row a sense, or their mean')
    add('--sweep', **SEVERAL, metavar='WORD:SENSES',
        help='the next words with the senses at weight 0, 0.25, 0.5, 0.75 and 1 (Figure 3)')


def add_edit_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that change senses."""
    add = parser.add_argument_group(
        'edit senses (one after another in this order; SENSES are numbers and ranges as 3-5,10, or A/B, the '
        'sense that most separates these words; *:SENSES is every word)').add_argument
    add('--senses-off', **SEVERAL, metavar='WORD:SENSES', help='turn senses off: nurse:10, nurse:she/he')
    add('--senses-scale', **SEVERAL, metavar='WORD:SENSES=F', help='multiply senses by F: nurse:10=0.5')
    add('--replace', **SEVERAL, metavar='"WORD: OLD -> NEW"',
        help='what WORD says of OLD it says of NEW: "MacBook: Apple -> HP"')
    add('--topic', **SEVERAL, metavar='"A, B"',
        help='turn senses up that speak for these words, or for a topic of Table 10: '
             + ', '.join(senses.TOPICS))
    add('--strength', **SEVERAL, metavar='S',
        help='of the topic: 0 to 3, a row of Table 11, or four numbers as 3.3,3.3,3,1; one for each --topic, '
             'or one for all [2]')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(prog='sample.py', description=__doc__.splitlines()[0])
    add_model_flags(parser)
    add_look_flags(parser)
    add_edit_flags(parser)
    args = parser.parse_args(argv)
    edits = args.senses_off + args.senses_scale + args.replace + args.topic
    if args.export is not None and edits:
        parser.error('--export writes the model as it is; leave the edits out')
    if args.html is not None and (edits + args.find + args.similar + args.sweep or args.weights
                                  or args.explain is not None or args.export is not None):
        parser.error('--html writes a page of the model as it is, to edit there; leave out what else looks, '
                     'explains, edits or exports, but --show')
    for flag, needs, missing in (
            ('--word', '--find A/B', args.word is not None and not any('/' in text for text in args.find)),
            ('--sense and --min', '--similar', (args.min or args.sense is not None) and not args.similar),
            ('--strength', '--topic', args.strength and not args.topic)):
        if missing:
            parser.error(f'{flag}: only with {needs}')
    if len(args.strength) > 1 and len(args.strength) != len(args.topic):
        parser.error(f'{len(args.topic)} --topic and {len(args.strength)} --strength; give one strength for '
                     'each topic, or one for all')
    return args


def edit_from(args: argparse.Namespace, model: Backpack, encoding: tiktoken.Encoding,
              ids: list[int]) -> Edit | None:
    """The edit that the flags ask for, described once all of it is made; None without such flags."""
    edits, lines = [], []

    def add(edit: Edit, words: list[int] | None, line: str) -> None:
        """Take one more edit, with a line that says so."""
        lines.append(line + not_there(words, ids))
        edits.append(edit)

    for text in args.senses_off:
        words, chosen, line = grammar.parse_word_senses(text, model, encoding)
        add(senses.scale_senses(words, chosen, 0.0), words, f'Off: {line}')
    for text in args.senses_scale:
        text, factor = grammar.parse_factor(text)
        words, chosen, line = grammar.parse_word_senses(text, model, encoding)
        add(senses.scale_senses(words, chosen, factor), words, f'Times {factor:g}: {line}')
    for text in args.replace:
        words, old, new = grammar.parse_replacement(text, encoding)
        add(senses.replace_word(model, words, old, new), words,
            f'Replaced: what {shown(encoding, words[0])} says of {shown(encoding, old)} it says of '
            f'{shown(encoding, new)}')
    strengths = [grammar.parse_strength(text) for text in args.strength or ['2']]
    topics = [senses.TOPICS.get(text.strip()) or text.replace(',', ' ').split() for text in args.topic]
    bags = [grammar.bag_of_words(encoding, words) for words in topics]  # all are words, before the long work
    for words, bag, weights in zip(topics, bags, strengths * len(bags) if len(strengths) == 1 else strengths):
        add(senses.topic(model, senses.affinity(model, bag), weights), None,
            f'Topic: {", ".join(words)}; senses times {", ".join(f"{w:g}" for w in weights)}')
    print(''.join(f'{line}\n' for line in lines), end='')
    return senses.compose(edits) if edits else None


def check_words(args: argparse.Namespace, model: Backpack, encoding: tiktoken.Encoding) -> None:
    """Raise UserError for a word or sense that is not there before anything is printed."""
    for word in args.show + args.similar + ([] if args.word is None else [args.word]):
        word_id(encoding, word)
    for text in args.find:
        grammar.pair_of(encoding, text) if '/' in text else grammar.bag_of_words(encoding, text.split('+'))
    for text in args.sweep:
        grammar.parse_word_senses(text, model, encoding)
    if args.explain:
        grammar.pair_of(encoding, args.explain) if '/' in args.explain else word_id(encoding, args.explain)
    if args.sense is not None:
        grammar.sense_numbers(str(args.sense), model.config.n_sense)


# -----------------------------------------------------------------------------
# Look.


def fit(cells: list[str], indent: int) -> str:
    """As many of the cells, each 18 columns wide, as fit a line of the terminal beside an indent."""
    columns = shutil.get_terminal_size((100, 24)).columns
    return ''.join(f'{cell:<18}' for cell in cells[:max(1, (columns - indent) // 18)]).rstrip()


def cells_of(encoding: tiktoken.Encoding, words: Tensor, scores: Tensor) -> list[str]:
    """A cell for each word, (n,) ids and (n,) scores, with a long word cut."""
    names = [shown(encoding, w) for w in words.tolist()]
    names = [name if len(name) < 11 else name[:8] + "…'" for name in names]
    return [f'{name} {score:+.2f}' for name, score in zip(names, scores.tolist())]


@torch.no_grad()
def print_senses(model: Backpack, encoding: tiktoken.Encoding, word: str, edit: Edit | None) -> None:
    """Tables 1 and 3: the words that each sense of a word raises and lowers most, and its length."""
    idx = torch.tensor([[word_id(encoding, word)]], device=model.wte.weight.device)
    C = senses.edited_senses(model, idx, edit)[0, 0]  # (k, d)
    words, scores = (t.unflatten(1, (2, -1)) for t in senses.extremes(model, C, 8))  # (k, 2, 8) each
    print(f'\n{word}: the words that each sense raises (+) and lowers (-) most, in logits at weight 1\n'
          'sense  norm')
    for l in range(len(C)):
        high, low = (fit(cells_of(encoding, *end), 15) for end in zip(words[l], scores[l]))
        print(f'{l:5}{C[l].norm():6.1f}  + {high}\n{"":11}  - {low}')


def print_separation(model: Backpack, encoding: tiktoken.Encoding, pair: str, word: str | None) -> None:
    """Senses by how strongly they separate two words: of one word, or each index over the vocabulary."""
    a, b = grammar.pair_of(encoding, pair)
    names = f'{shown(encoding, a)} (+) from {shown(encoding, b)} (-)'
    scores = senses.separation(model, None if word is None else word_id(encoding, word), a, b)  # (.., k)
    if word is not None:
        print(f'\n{word}: how far each sense separates {names}, in logits at weight 1\nsense')
        for l in scores.abs().argsort(descending=True).tolist():
            print(f'{l:5}  {scores[l]:+8.2f}')
        return
    spread = scores.abs().mean(0)  # (k,)
    print(f'\nHow far each sense separates {names}: mean size over all words, and where most\nsense  mean')
    for l in spread.argsort(descending=True).tolist():
        words = scores[:, l].abs().topk(min(8, len(scores))).indices  # (n,)
        print(f'{l:5}{spread[l]:6.2f}  {fit(cells_of(encoding, words, scores[words, l]), 13)}')


@torch.no_grad()
def print_affinity(model: Backpack, encoding: tiktoken.Encoding, bag: str) -> None:
    """Eq. 17: the senses, of all words, that most speak for a bag of words, and what they say."""
    scores = senses.affinity(model, grammar.bag_of_words(encoding, bag.split('+')))  # (V, k)
    top = scores.flatten().topk(min(20, scores.numel())).indices  # of V * k
    print(f'\nThe senses that most speak for {bag} (Eq. 17), and the words they raise most\n'
          f'score  {"word":<16}sense')
    for place in top.tolist():
        word, l = divmod(place, scores.shape[1])
        C = model.senses(torch.tensor([word], device=scores.device))[0, l]  # (d,)
        high = model.project(C)[:model.config.n_vocab].topk(min(5, len(scores)))
        print(f'{scores[word, l]:5.2f}  {shown(encoding, word):<16}{l:5}  '
              f'{fit(cells_of(encoding, high.indices, high.values), 30)}')


def print_similar(model: Backpack, encoding: tiktoken.Encoding, word: str, args: argparse.Namespace) -> None:
    """The words most like a word under Sim_l (Eq. 13) and Sim_min (Eq. 14)."""
    k, own = model.config.n_sense, word_id(encoding, word)
    table = senses.similarity(model, own)  # (V, k)
    rows = {str(l): table[:, l] for l in range(k)} | {'min': table.min(-1).values}
    chosen = 'min' if args.min else str(args.sense) if args.sense is not None else None
    print(f'\n{word}: the most similar words, by the cosine of each sense (Eq. 13) and its minimum (Eq. 14)\n'
          'sense')
    for name, row in rows.items():
        if chosen in (None, name):
            words = row.topk(min(9, len(row))).indices  # (n,)
            words = words[words != own]
            print(f'{name:>5}  {fit(cells_of(encoding, words, row[words]), 7)}')


def print_next_words(encoding: tiktoken.Encoding, columns: dict[str, Tensor]) -> None:
    """The likeliest next words side by side (Figure 3), with bars for the first and the last column."""
    probs = list(columns.values())  # (V,) each
    n = min(10, len(probs[0]))
    words = list(dict.fromkeys(w for p in (probs[-1], probs[0]) for w in p.topk(n).indices.tolist()))
    words.sort(key=lambda w: -max(p[w].item() for p in probs))
    print(f'\n{"next word":<18}' + ''.join(f'{title:>8}' for title in columns))
    for word in words:
        bars = ['█' * round(20 * p[word].item()) for p in (probs[0], probs[-1])]
        numbers = ''.join(f'{p[word]:8.3f}' for p in probs)
        print(f'{shown(encoding, word):<18}{numbers}  {bars[0]:<20}  {bars[1]}'.rstrip())


def print_sweep(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, text: str,
                edit: Edit | None) -> None:
    """Figure 3: the next words as senses go from off to what they were, on top of the edit."""
    words, chosen, line = grammar.parse_word_senses(text, model, encoding)
    print(f'\nThe weight of {line}{not_there(words, idx[0].tolist())}:', end='')
    columns = {}
    for factor in (0, 0.25, 0.5, 0.75, 1):
        edits = [edit] if edit else []
        edits.append(senses.scale_senses(words, chosen, factor))
        columns[f'{factor:g}'] = predict(model, idx, senses.compose(edits))
    print_next_words(encoding, columns)


@torch.no_grad()
def print_explanation(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, text: str,
                      edit: Edit | None) -> None:
    """The terms alpha * C . E that a logit, or the difference of two, is the sum of; largest first."""
    E, probs = model.wte.weight, predict(model, idx, edit)  # (V,)
    if '/' in text:
        a, b = grammar.pair_of(encoding, text)
        v, what = E[a] - E[b], f'the score of {shown(encoding, a)} above that of {shown(encoding, b)}'
        chances = f'probabilities {probs[a]:.3f} and {probs[b]:.3f}'
    else:
        word = word_id(encoding, text) if text else probs.argmax().item()
        v, what = E[word], f'the score of {shown(encoding, word)}'
        chances = f'probability {probs[word]:.3f}, rank {(probs > probs[word]).sum().item() + 1}'
    alpha, scores = (t[0] for t in senses.explain(model, idx, v, edit))  # (T, k) each
    terms = (alpha * scores).flatten()  # (T * k,)
    print(f'\nWhat makes {what} after the prompt ({chances})\n'
          f'    adds = alpha *   C.E  {"word":<16}position  sense')
    top = terms.abs().argsort(descending=True)[:15]
    for place in top.tolist():
        j, l = divmod(place, alpha.shape[1])
        print(f'{terms[place]:+8.3f}{alpha[j, l]:8.3f}{scores[j, l]:+8.2f}  '
              f'{shown(encoding, idx[0, j].item()):<16}{j:8}{l:7}')
    if len(terms) > len(top):
        print(f'{terms.sum() - terms[top].sum():+8.3f}  the other {len(terms) - len(top)}')
    print(f'{terms.sum():+8.3f}  in all, {what}')


@torch.no_grad()
def print_weights(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, rows: str) -> None:
    """A heat map of alpha (Eq. 12): how much the next word's prediction takes of each word, by sense."""
    alpha = model.alpha(idx)[0, :, -1]  # (k, T)
    table = {'mean': alpha.mean(0)} if rows == 'mean' else {str(l): row for l, row in enumerate(alpha)}
    names = [shown(encoding, t)[1:-1].strip() or '_' for t in idx[0].tolist()]
    width = shutil.get_terminal_size((100, 24)).columns - 7
    print('\nThe weights alpha of the words, for the next one; a full block is 1, each row sums to 1')
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and sum(len(name) + 1 for name in names[start:end + 1]) <= width:
            end += 1
        print('sense  ' + ' '.join(names[start:end]))
        for name, row in table.items():
            blocks = (' ▁▂▃▄▅▆▇█'[round(8 * a)] * len(word)
                      for a, word in zip(row[start:end].tolist(), names[start:end]))
            print(f'{name:>5}  {" ".join(blocks)}'.rstrip())
        start = end


# -----------------------------------------------------------------------------
# Write.


def print_samples(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, args: argparse.Namespace,
                  edit: Edit | None, title: str) -> None:
    """Continuations of the prompt, each up to its end-of-text."""
    torch.manual_seed(args.seed)
    idx = idx.expand(args.num_samples, -1)  # (N, T)
    texts = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, edit,
                           stop=encoding.eot_token)
    for i, row in enumerate(texts.tolist(), 1):
        new = row[idx.shape[1]:]
        new = new[:new.index(encoding.eot_token)] if encoding.eot_token in new else new
        prompt = [t for t in row[:idx.shape[1]] if t != encoding.eot_token]
        print(f'\n{title}{i}: {printable(encoding.decode(prompt + new, errors="replace"))}')


def print_texts(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, args: argparse.Namespace,
                edit: Edit | None) -> None:
    """Texts; with an edit also the next words, and both before and after it."""
    if edit is None:
        return print_samples(model, encoding, idx, args, None, '')
    print_next_words(encoding, {'before': predict(model, idx, None),
                                'after': predict(model, idx, edit)})
    print_samples(model, encoding, idx, args, None, 'before ')
    print_samples(model, encoding, idx, args, edit, 'after ')


def run(args: argparse.Namespace) -> None:
    """Load, describe, and print what was asked for."""
    device, file = find_device(args.device), None
    if args.html is not None:
        file = place_for('--html', args.html, '.html')
        if file == TEMPLATE.resolve():
            raise UserError(f'{args.html} is the template of such pages; name another file')
    model, path = newest_backpack() if args.source is None else (from_pretrained(args.source), args.source)
    c = model.config
    kind = f'Backpack with {c.n_sense} senses a word' if c.n_sense else 'Transformer'
    print(about := printable(f'{path}: {kind}, {c.n_layer} layers of width {c.n_embd}, {c.n_vocab:,} words'))
    if args.export is not None:
        export(model, args.export)
        return print(f'{args.export}: written')
    encoding = load_tokenizer(model.tokenizer)
    if encoding.n_vocab != c.n_vocab:
        raise UserError(f'{path} has {c.n_vocab} words, its tokenizer {encoding.n_vocab}')
    looks = (args.show, args.find, args.similar, args.explain is not None, args.weights, args.sweep)
    edits = (args.senses_off, args.senses_scale, args.replace, args.topic)
    if any(looks + edits + (file,)) and not c.n_sense:
        raise UserError(f'{path} is a Transformer; only a Backpack has senses to look at, explain or edit')
    check_words(args, model, encoding)
    model.to(device)
    ids, cropped = read_prompt(args.start, encoding, c.block_size)
    if cropped:
        print(cropped)
    if file is not None:
        asked = [word_id(encoding, word) for word in args.show]
        print(f'{printable(args.html)}: {write_page(model, encoding, ids, asked, file, about, cropped)}')
        return
    idx = torch.tensor([ids], device=device)  # (1, T)
    edit = edit_from(args, model, encoding, ids)
    for word in args.show:
        print_senses(model, encoding, word, edit)
    for text in args.find:
        if '/' in text:
            print_separation(model, encoding, text, args.word)
        else:
            print_affinity(model, encoding, text)
    for word in args.similar:
        print_similar(model, encoding, word, args)
    if args.explain is not None:
        print_explanation(model, encoding, idx, args.explain, edit)
    if args.weights:
        print_weights(model, encoding, idx, args.weights)
    for text in args.sweep:
        print_sweep(model, encoding, idx, text, edit)
    if not any(looks):
        print_texts(model, encoding, idx, args, edit)


def main(argv: list[str]) -> None:
    """Run the command line."""
    answer('sample.py', run, parse_args(argv))


if __name__ == '__main__':
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')  # a terminal without unicode still gets a table
    main(sys.argv[1:])
