"""Write a text without and with an edit of senses, and explain what comes next.

    python sample.py --from english --explain she/he
    python sample.py --from english --senses-off nurse:she/he
    python sample.py --start "He was born in Paris," --edit "Paris: France -> Germany"

Load a model. Read the prompt, by default "When the nurse came into the room,". Make the edit: a
function from the senses C of all tokens to those to use instead, which changes no parameter and no
weight alpha. Print the next words before and after it, then texts without and with it (same seeds).

    a line of --edit            the call to senses.py that makes it; [nurse] stands for its ids
    nurse:10                    scale_senses([nurse], [10], 0): sense 10 (from 0) of nurse, off
    nurse,teacher:3-5,10=0.5    scale_senses for each word, times 0.5
    nurse:she/he                the sense whose terms after the prompt most separate she/he, off
    *:3                         scale_senses(None, [3], 0): of every word
    Paris: France -> Germany    replace_word(model, [Paris], France, Germany)
    topic music=2               topic(model, scores, STRENGTHS[2]), for a topic of Table 10
    topic jazz, piano           the same for your own words; =0 to =3, as in Table 11
    @FILE.safetensors=0.5       add_to_senses(ids, numbers, 0.5 * vectors), from the verb edit
    @FILE                       all lines in FILE; @FILE:10 is sense 10 of all words in FILE

[nurse] has the id of " nurse" and, if it is one token, of "nurse" without the space, as at the
start of a text (a word of several tokens is edited at its last). The edit acts wherever the word
stands, in the prompt and in new text. Paper: arXiv 2305.16765. Other commands: python -m rucksack
"""

from argparse import RawDescriptionHelpFormatter
from functools import partial

import torch
from torch import Tensor

from rucksack.cli import Parser, number, printable, run_cli
from rucksack.edits.lines import make_edit, parse_lines
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.loaded import LoadedModel, load_model
from rucksack.words import read_prompts

OTHERS = ('everything else is a verb, python -m rucksack VERB: show, find, similar, sweep, '
          'explain, probs, page, export, edit, eval')


def make_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(prog='sample.py', description=__doc__,
                    formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name [the newest Backpack in out/, else english]')
    add('--start', metavar='TEXT', action='append',
        help='the prompt, or @FILE with one prompt per line; repeatable')
    add('--edit', '--senses-off', '--senses_off', metavar='LINE', nargs='+', action='extend',
        default=[], help='change senses: lines as above, in this order; quote spaces and *')
    add('--explain', metavar='WORD|A/B', nargs='?', const='',
        help='instead of texts, print what each sense of each token adds to the logit of WORD '
             '[the likeliest], or of A minus that of B, under the edit')
    add('--lender', metavar='MODEL', help='edit this Backpack, and change logits of --from as much')
    add('--strength', metavar='B', type=number(float, 0),
        help='scale the changes that --lender makes by B [1]')
    add('--num-samples', '--num_samples', metavar='N', type=int, default=2,
        help='texts of each version; one if they are greedy [2]')
    add('--max-new-tokens', '--max_new_tokens', metavar='N', type=int, default=60,
        help='maximum new tokens per text [60]')
    add('--temperature', metavar='T', type=number(float, 0), default=0.8,
        help='sampling temperature (0: greedy, always the likeliest token) [0.8]')
    add('--top-k', '--top_k', metavar='K', type=number(int, 1),
        help='sample only from the K likeliest tokens [all]')
    add('--seed', metavar='S', type=int, default=0,
        help='random seed for text 1; text 2 uses S + 1, and so on [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--dtype', choices=('float32', 'bfloat16'),
        help='precision for generation [float32; bfloat16 on CUDA]')
    return parser


def print_table(loaded: LoadedModel, idx: Tensor, asked: str | None) -> None:
    """Print the terms of the logit asked for or, if None, the next words before and after."""
    if asked is not None:
        from rucksack.looks.explain import explain
        print(explain(loaded, asked, idx, most=15))
    elif loaded.edit:
        from rucksack.looks.next_words import before_and_after
        print(before_and_after(loaded, idx))


def run(argv: list[str]) -> None:
    """Print the tables and texts for each prompt."""
    parser = make_parser()
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f'{" ".join(unknown)}: no such flag here; {OTHERS}')
    if flags.strength is not None and not flags.lender:
        parser.error('--strength needs --lender')
    loaded = load_model(flags.source, flags.device, flags.dtype)
    writer = Cached(loaded.model)  # writes the same texts as model.generate, faster
    if flags.lender:
        from rucksack.edits.lending import cached, lend
        loaded = lend(loaded, load_model(flags.lender, flags.device), flags.strength)
        writer = cached(loaded.model)
    print(loaded.about())

    texts = read_prompts(flags.start)
    prompts = [loaded.read_prompt(text) for text in texts]  # ids (1, T) each
    versions = {'': None}  # label of the texts -> edit
    if flags.edit:
        changes = parse_lines(flags.edit)
        loaded.edit, notices = make_edit(changes, loaded.backpack, loaded.encoding, prompts)
        versions = {'before ': None, 'after ': loaded.edit}
        for notice in notices:
            print(printable(notice))

    if flags.lender and flags.explain is not None:
        print(f'--explain shows the lender, {flags.lender}')
    for text, idx in zip(texts, prompts):
        if len(texts) > 1:
            print(f'\n"{text}"')
        print_table(loaded, idx, flags.explain)
    if flags.explain is not None:
        return

    if loaded.dtype == 'bfloat16':
        loaded.model.bfloat16()  # not earlier: the tables are of float32
    seeds = range(flags.seed, flags.seed + flags.num_samples)
    if flags.temperature == 0:
        seeds = seeds[:1]  # all texts would be the same
    for text, idx in zip(texts, prompts):
        for version, edit in versions.items():
            for i, seed in enumerate(seeds, 1):
                torch.manual_seed(seed)
                made = writer.generate(idx, flags.max_new_tokens, flags.temperature, flags.top_k,
                                       edit=edit, stop=loaded.eot)
                ids = [v for v in made[0, idx.shape[1]:].tolist() if v != loaded.eot]
                print(printable(f'\n{version}{i}: {text}{loaded.encoding.decode(ids)}'))


main = partial(run_cli, 'sample.py', run)

if __name__ == '__main__':
    main()
