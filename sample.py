"""Ask a trained model: continue a text, and see the prediction change when senses of a word are turned off.

    python sample.py --start "The nurse said that" --num-samples 3
    python sample.py --senses-off nurse:10
    python sample.py --senses-off nurse:she/he
"""

import argparse
import os
import sys
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from model import Backpack, Edit, UserError, find_device, from_checkpoint, from_pretrained, load_file
from prepare import UserError as PrepareError
from prepare import load_tokenizer
from senses import compose, parse_word_senses, scale_senses, word_forms

PROMPT = 'When the nurse came into the room,'


def number(kind: type, low: float):
    """An argparse type: a finite number of at least low."""
    def parse(text: str):
        """The number that the text is."""
        try:
            if low <= (value := kind(text)) < 1 << 63:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f'{text!r} is no {kind.__name__} of at least {low}')
    return parse


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = argparse.ArgumentParser(prog='sample.py', description='Continue a text, with senses off or not.')
    parser.error = lambda message: parser.exit(2, f'sample.py: {message}; see python sample.py --help\n')
    add = parser.add_argument
    add('--from', dest='source', metavar='CKPT_OR_DIR',
        help='checkpoint, folder of a run or of published weights (default: the newest Backpack in out/)')
    add('--start', metavar='TEXT', default=PROMPT, help=f'the prompt, or FILE:path [{PROMPT}]')
    add('--num-samples', type=number(int, 1), metavar='N', default=2, help='texts to write [2]')
    add('--max-new-tokens', type=number(int, 0), metavar='N', default=60, help='longest continuation [60]')
    add('--temperature', type=number(float, 0), metavar='T', default=0.8, help='0: the likeliest word [0.8]')
    add('--top-k', type=number(int, 1), metavar='K', help='draw among the K likeliest words only')
    add('--seed', type=number(int, 0), metavar='S', default=0, help='of the draws [0]')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda or mps [auto]')
    add('--senses-off', nargs='+', action='extend', default=[], metavar='WORD:SENSE',
        help='turn senses of a word off: nurse:10, nurse:3,10, or nurse:she/he, the sense of nurse that most '
             'separates these two words')
    return parser.parse_args(argv)


def newest_backpack() -> tuple[Backpack, Path]:
    """The Backpack in out/ whose checkpoint was written last."""
    for path in sorted(Path('out').glob('*/ckpt.pt'), key=lambda p: p.stat().st_mtime, reverse=True):
        model = from_checkpoint(load_file(path), path)
        if model.config.n_sense:
            return model, path
    raise UserError('no Backpack in out/ yet; run python train.py config/train_toy.py, or name one by --from')


def read_prompt(start: str, encoding: tiktoken.Encoding, block_size: int) -> list[int]:
    """Ids of the prompt; only its end where it is longer than block_size, end-of-text where it is empty."""
    if start.startswith('FILE:'):
        try:
            start = Path(start.removeprefix('FILE:')).read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f'--start {start} cannot be read as text: {error}')
    ids = encoding.encode_ordinary(start) or [encoding.eot_token]
    if len(ids) > block_size:
        print(f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.')
    return ids[-block_size:]


def edit_from(flags: list[str], model: Backpack, encoding: tiktoken.Encoding, ids: list[int]) -> Edit | None:
    """The edit that --senses-off asks for, described as it is made; None without such flags."""
    edits = []
    for text in flags:
        word, senses, line = parse_word_senses(text, model, encoding)
        forms = word_forms(encoding, word)
        print(f'Off: {line}' + ('' if set(forms) & set(ids) else f' (the prompt does not contain {word})'))
        edits.append(scale_senses(forms, senses, 0.0))
    return compose(edits) if edits else None


def shown(encoding: tiktoken.Encoding, token: int) -> str:
    """A token as it can stand in a table: the quotes show its space, control characters are written out."""
    return repr(encoding.decode_single_token_bytes(token).decode('utf-8', errors='replace'))


@torch.no_grad()
def print_next_words(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, edit: Edit) -> None:
    """The ten likeliest next words without and with the edit, their probabilities side by side (Figure 3)."""
    n = model.config.n_vocab
    before, after = (model(idx, edit=e)[0][0, -1, :n].softmax(-1) for e in (None, edit))  # (V,)
    words = before.topk(min(10, n)).indices.tolist()
    words += [w for w in after.topk(min(10, n)).indices.tolist() if w not in words]
    print(f'\n{"next word":<18}{"before":>8}{"after":>8}')
    for word in words:
        bars = ['█' * round(20 * p[word].item()) for p in (before, after)]
        line = f'{shown(encoding, word):<18}{before[word]:8.3f}{after[word]:8.3f}  {bars[0]:<20}  {bars[1]}'
        print(line.rstrip())


def print_samples(model: Backpack, encoding: tiktoken.Encoding, idx: Tensor, args: argparse.Namespace,
                  edit: Edit | None, title: str) -> None:
    """Continuations of the prompt, each up to its end-of-text."""
    torch.manual_seed(args.seed)
    idx = idx.expand(args.num_samples, -1)  # (N, T)
    texts = model.generate(idx, args.max_new_tokens, args.temperature, args.top_k, edit)
    for i, row in enumerate(texts.tolist(), 1):
        new = row[idx.shape[1]:]
        new = new[:new.index(encoding.eot_token)] if encoding.eot_token in new else new
        prompt = [t for t in row[:idx.shape[1]] if t != encoding.eot_token]
        text = encoding.decode(prompt + new, errors='replace')
        print(f'\n{title}{i}: {"".join(c if c.isprintable() or c == chr(10) else " " for c in text)}')


def run(args: argparse.Namespace) -> None:
    """Load, describe, and print what was asked for."""
    device = find_device(args.device)
    model, path = (from_pretrained(args.source), Path(args.source)) if args.source else newest_backpack()
    encoding = load_tokenizer(model.tokenizer)
    if encoding.n_vocab != model.config.n_vocab:
        raise UserError(f'{path} has {model.config.n_vocab} words, its tokenizer {encoding.n_vocab}')
    model.to(device)
    c = model.config
    print(f'{path}: ' + (f'Backpack with {c.n_sense} senses a word' if c.n_sense else 'Transformer')
          + f', {c.n_layer} layers of width {c.n_embd}, {c.n_vocab:,} words')
    ids = read_prompt(args.start, encoding, c.block_size)
    idx = torch.tensor([ids], device=device)  # (1, T)
    edit = edit_from(args.senses_off, model, encoding, ids)
    if edit:
        print_next_words(model, encoding, idx, edit)
        print_samples(model, encoding, idx, args, None, 'before ')
        print_samples(model, encoding, idx, args, edit, 'after ')
    else:
        print_samples(model, encoding, idx, args, None, '')


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        run(args)
        sys.stdout.flush()
    except (UserError, PrepareError) as error:
        print(f'sample.py: {error}', file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader, as head does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')  # a terminal without unicode still gets a table
    main(sys.argv[1:])
