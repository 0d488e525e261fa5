"""Turn text into tokens: write data/NAME/train.bin, val.bin and meta.json for train.py.

    python prepare.py toy                                  the toy world, a grammar; no download
    python prepare.py openwebtext --num-proc 16            the paper's corpus, from the Hub
    python prepare.py NAME --text FILE... [--val FILE...]  your .jsonl, .parquet, .tar, .txt or .md
    python prepare.py NAME --hub wikimedia/wikipedia:20231101.simple     any text dataset on the Hub
    python prepare.py NAME --text FILE --like english      to fine-tune a model: use its tokenizer

A .bin file holds only token ids, as little-endian uint16: no vocabulary here has more than 65,536
ids. An end-of-text id follows each document. A document is one object of a .jsonl (field "text"),
one row of a .parquet (column "text"), one .txt in a .tar, or a whole .txt or .md file.

Without --val, documents over 20,000 characters are cut at paragraphs into pieces, which then count
as documents. If there are fewer than 100 documents, the pieces are smaller. 1% of the documents are
held out. If there are fewer than 1,000, ten are held out; if fewer than 100, a tenth. Of
OpenWebText, which is not cut, 0.05% are held out.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from rucksack.cli import (
    Parser,
    UserError,
    appearing_whole,
    lock_folder,
    number,
    progress,
    reading,
    run_cli,
)
from rucksack.data import BIN_DTYPE, DATA_NAME
from rucksack.documents import FORMATS, files_in, kind_of, openwebtext_files, read_texts
from rucksack.hub import from_pretrained
from rucksack.tokenizer import (
    encode,
    gpt2_tokenizer,
    load_tokenizer,
    vocab_size,
    words_tokenizer,
)
from rucksack.toy import toy_stories

HUB_DATASET = r'\w[\w.-]*/\w[\w.-]*(:[^:]*){0,2}'
LONGEST = 20_000  # characters; longer documents are cut
BLOCK_SIZE = 512  # train.py's default
TOY_STORIES = {'train': 60_000, 'val': 4_000}


# -----------------------------------------------------------------------------
# Holding out, encoding, writing.


def cut(parts: list) -> list:
    """Cut documents over LONGEST characters into pieces, so that text of all kinds is held out.

    If there are fewer than 100 documents, the pieces are smaller: about a hundred in all.
    """
    size = LONGEST
    if sum(map(len, parts)) < 100:
        characters = sum(len(text) for part in parts for text in part['text'])
        size = min(size, max(100, characters // 100))
    return [part.map(cut_rows, batched=True, batch_size=100, fn_kwargs={'size': size})
            for part in parts]


def cut_rows(rows: dict, size: int) -> dict:
    """Cut documents into pieces of up to size characters, at paragraphs, lines or words."""
    ends = [r'\Z', r'\n\s*\n', r'\n', r'\s', '.']  # the first that works
    piece = re.compile('|'.join(f'.{{0,{size}}}{end}' for end in ends), re.DOTALL)
    pieces = []
    for document in rows['text']:
        pieces.extend(text for text in piece.findall(document) if text)
    return {'text': pieces}


def hold_out(n: int, share: float, seed: int) -> np.ndarray:
    """Choose which of n documents to hold out, (n,): a random share, at least one."""
    n_held = max(1, round(share * n))
    order = np.random.default_rng(seed).permutation(n)
    return np.isin(np.arange(n), order[:n_held])


def encoded(parts: list, encoding: Encoding, num_threads: int) -> Iterator[list[int]]:
    """Yield the ids of each document, end-of-text included."""
    with ThreadPoolExecutor(num_threads) as pool:
        for part in parts:
            for batch in part.iter(batch_size=1000):
                for ids in pool.map(partial(encode, encoding), batch['text']):
                    yield [*ids, encoding.eot_token]


def write_bins(files: dict[str, Path], documents: Iterable[list[int]], is_held: np.ndarray) -> dict:
    """Write ids to files['train'], or to files['val'] if held out; returns counts and checksums."""
    tokens = {'train': 0, 'val': 0}
    sums = {'train': hashlib.sha256(), 'val': hashlib.sha256()}
    writing = reading(files['train'].parent, problem='cannot be written')
    with writing, open(files['train'], 'wb') as train, open(files['val'], 'wb') as val:
        for ids, held in zip(documents, progress(is_held, 'encoding')):
            name = 'val' if held else 'train'
            data = np.array(ids, BIN_DTYPE).tobytes()
            (val if held else train).write(data)
            sums[name].update(data)
            tokens[name] += len(ids)
    return {
        'documents': len(is_held),
        'tokens': tokens,
        'sha256': {name: digest.hexdigest() for name, digest in sums.items()}}


def write_corpus(files: dict[str, Path], args: argparse.Namespace, tokenizer: dict, cache: str
                 ) -> dict:
    """Write the bins of text files, by way of a folder cache; returns the facts for meta.json."""
    encoding = load_tokenizer(tokenizer)
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    is_openwebtext = args.name == 'openwebtext'
    sources = args.sources or openwebtext_files()
    parts = []
    skipped = Counter(args.skipped)
    for source in [*sources, *args.val]:
        texts, skipped_rows = read_texts(source, args.field, cache)
        parts.append(texts)
        skipped += skipped_rows
    n_train = sum(map(len, parts[:len(sources)]))
    if args.val:
        is_held = np.arange(sum(map(len, parts))) >= n_train
    else:
        share = 0.0005
        if not is_openwebtext:
            parts = cut(parts)
            ten = 10 / max(1, sum(map(len, parts)))  # as a share of the documents
            share = max(0.01, min(0.1, ten))
        is_held = hold_out(sum(map(len, parts)), share, args.seed)
    facts = write_bins(files, encoded(parts, encoding, args.num_proc), is_held)
    return {'tokenizer': tokenizer, **facts, 'skipped': dict(skipped)}


def write_toy(files: dict[str, Path], seed: int) -> dict:
    """Write the bins of the toy world; returns the facts for meta.json, entropy included."""
    n_train = TOY_STORIES['train']
    stories = toy_stories(seed, n_train + TOY_STORIES['val'])
    texts = [text for text, _ in stories]
    tokenizer = words_tokenizer(texts)
    encoding = load_tokenizer(tokenizer)
    documents = [encoding.encode_ordinary(text) + [encoding.eot_token] for text in texts]
    facts = write_bins(files, documents, np.arange(len(texts)) >= n_train)
    tokens = facts['tokens']
    nats = sum(nats for _, nats in stories)
    val_nats = sum(nats for _, nats in stories[n_train:])
    return {
        'tokenizer': tokenizer, **facts,
        'entropy_per_token': nats / sum(tokens.values()),
        'val_entropy_per_token': val_nats / tokens['val'],
        'entropy_note': 'nats, whole stories with their end-of-text; '
                        'exact, each has one derivation'}


def tokenizer_and_block_size(args: argparse.Namespace) -> tuple[dict | None, int]:
    """Describe the tokenizer to use (None for toy); also returns the block_size to expect."""
    if args.name == 'toy':
        return None, BLOCK_SIZE
    if args.like is None:
        return gpt2_tokenizer(args.merges), BLOCK_SIZE
    model, tokenizer = from_pretrained(args.like)
    load_tokenizer(tokenizer)  # UserError if it has none
    return tokenizer, model.config.block_size


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Write the three files of data/NAME, each whole or not at all, and print a summary.

    Nothing else in the folder is touched.
    """
    tokenizer, block_size = tokenizer_and_block_size(args)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder, f'another prepare.py is making {folder}; wait for it')
    cache = folder / '.prepare-cache'
    try:
        for name in ('train.bin', 'val.bin', 'meta.json'):
            if os.path.lexists(folder / name) and not args.overwrite:
                raise UserError(f'{folder / name} exists; add --overwrite to make it again, '
                                'or choose another NAME')
        shutil.rmtree(cache, ignore_errors=True)  # left by a killed run
        for file in folder.iterdir():
            if re.fullmatch(r'(train\.bin|val\.bin|meta\.json)\.\d+\.partial', file.name):
                file.unlink()
        facts = write_data(folder, args, tokenizer, str(cache))
    finally:
        os.close(lock)
        shutil.rmtree(cache, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # unless it is empty
                folder.rmdir()
    train, val = facts['tokens'].values()
    skipped = [f'{n:,} {why}' for why, n in facts.get('skipped', {}).items() if n]
    print(f'{folder}: {facts["documents"]:,} documents, {train:,} tokens to train on and '
          f'{val:,} held out, {facts["vocab_size"]:,} ids; skipped: {", ".join(skipped) or "none"}')
    if val < 4 * block_size:
        print(f'{val:,} held-out tokens are fewer than four texts of block_size={block_size}: '
              'hold out more with --val FILE, or train with a smaller --block_size')
    if 'entropy_per_token' in facts:
        print(f'The entropy of this world is {facts["entropy_per_token"]:.4f} nats per token.')


def write_data(folder: Path, args: argparse.Namespace, tokenizer: dict | None, cache: str) -> dict:
    """Write train.bin, val.bin and meta.json; returns the facts in meta.json."""
    # The last file here appears first. A run killed after it leaves checksums that do not fit the
    # other two, so train.py refuses them.
    with (appearing_whole(folder / 'val.bin') as val,
          appearing_whole(folder / 'train.bin') as train,
          appearing_whole(folder / 'meta.json') as meta):
        files = {'train': train, 'val': val}
        if args.name == 'toy':
            facts = write_toy(files, args.seed)
        else:
            facts = write_corpus(files, args, tokenizer, cache)
        if not all(facts['tokens'].values()):
            sources = ', '.join(args.sources + args.val)
            raise UserError(f'{sources}: too little text to hold some out; add more, or --val FILE')
        facts['vocab_size'] = vocab_size(facts['tokenizer'])
        facts['dtype'] = 'uint16'
        meta.write_text(json.dumps(facts, indent=1), encoding='utf-8')
    return facts


# -----------------------------------------------------------------------------
# The program.


def files_of(paths: list[str]) -> tuple[list[str], Counter]:
    """List the files in files and folders; also counts those that are skipped, by reason."""
    files = []
    skipped = Counter()
    for path in paths:
        found, skipped_there = files_in(path)
        files += found
        skipped += skipped_there
    return files, skipped


def warn_of_shared_files(text: list[str], val: list[str]) -> None:
    """Print a line for each file that is both trained on and held out."""
    for file in val:
        if any(os.path.samefile(file, other) for other in text):
            print(f'{file} is in both --text and --val: the validation loss will be measured on '
                  'text that the model was trained on')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; UserError if its flags do not fit together."""
    parser = Parser(
        prog='prepare.py',
        description='Tokenize text: write data/NAME/train.bin, val.bin and meta.json.')
    files = {'nargs': '+', 'action': 'extend', 'metavar': 'FILE', 'default': []}
    add = parser.add_argument
    add('name', metavar='NAME', help='toy, openwebtext, or a name for your --text or --hub data')
    add('--text', help=f'text to prepare: {FORMATS}; a folder means all such files in it', **files)
    add('--hub', metavar='DATASET',
        help='OWNER/DATASET[:CONFIG[:SPLIT]] on the Hugging Face Hub, such as '
             'roneneldan/TinyStories (default split: train)')
    add('--field', metavar='F', default='text', help='field or column that holds the text [text]')
    add('--val', help='files to hold out (default: 1%% of the documents; openwebtext: 0.05%%)',
        **files)
    add('--merges', type=number(int, 1, 50_000), metavar='N',
        help="keep only the first N merges of GPT-2's BPE; up to 16,384 need no download")
    add('--like', metavar='MODEL',
        help='use the tokenizer of the model to fine-tune: --like english, or a checkpoint, '
             'folder or Hub name')
    add('--num-proc', type=number(int, 1), metavar='N', default=os.cpu_count(),
        help='threads for encoding (default: all cores)')
    add('--seed', type=number(int, 0), metavar='S', default=0,
        help='random seed for the toy world and the split [0]')
    add('--overwrite', action='store_true', help='replace the three files in data/NAME')
    args = parser.parse_args(argv)
    if not re.fullmatch(DATA_NAME, args.name):
        parser.error(f'NAME is {args.name!r}; it takes up to 200 letters, digits, _, - and .')
    args.text, skipped = files_of(args.text)
    args.val, skipped_of_val = files_of(args.val)
    args.skipped = skipped + skipped_of_val
    for file in args.text + args.val:
        if not os.path.isfile(file) or not kind_of(file):
            parser.error(f'{file} is missing or of an unknown kind; give {FORMATS}')
    args.sources = list(args.text)
    if args.hub:
        if not re.fullmatch(HUB_DATASET, args.hub):
            parser.error(f'--hub {args.hub} is not OWNER/DATASET[:CONFIG[:SPLIT]]')
        args.sources.append(f'hub:{args.hub}')
    if args.name == 'toy' and (args.sources or args.val or args.like or args.merges):
        parser.error('toy takes no --text, --hub, --val, --like or --merges')
    if args.like is not None and args.merges:
        parser.error('--like and --merges both choose a tokenizer; give one')
    warn_of_shared_files(args.text, args.val)
    if args.name not in ('toy', 'openwebtext') and not args.sources:
        parser.error(f'NAME is {args.name!r}; any name but toy and openwebtext needs '
                     '--text or --hub')
    return args


def run(argv: list[str]) -> None:
    """Make data/NAME."""
    args = parse_args(argv)
    prepare(Path('data', args.name), args)


main = partial(run_cli, 'prepare.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
