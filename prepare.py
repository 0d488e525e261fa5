"""Turn text into tokens: write data/NAME/train.bin, val.bin and meta.json for train.py.

    python prepare.py toy                                  the toy world, a grammar; no download
    python prepare.py openwebtext                          the paper's corpus, from the Hub
    python prepare.py NAME --text FILE... [--val FILE...]  your .jsonl, .parquet, .tar, .txt or .md
    python prepare.py NAME --hub wikimedia/wikipedia:20231101.simple     any text dataset on the Hub
    python prepare.py NAME --text FILE --like english      to fine-tune a model: use its tokenizer
    python prepare.py NAME --text FILE --like tokenizer.json   your own tokenizer: a byte-level BPE

A .bin file holds only token ids, as little-endian uint16: no vocabulary here has more than 65,536
ids. An end-of-text id follows each document. A document is one object of a .jsonl (field "text"),
one row of a .parquet (column "text"), one .txt in a .tar, or a whole .txt or .md file.

Without --val, documents over 20,000 characters are cut at paragraphs into pieces, which then count
as documents. If there are fewer than 100, the pieces are smaller. 1% of the documents are held out,
but at least ten, or a tenth if there are fewer than 100. OpenWebText is not cut; 0.05% is held out.
"""

import argparse
import hashlib
import json
import re
import rucksack.interrupts  # noqa: F401 (before torch)
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from rucksack.cli import Parser, number, printable, progress, run_cli
from rucksack.data import BIN_DTYPE, data_folder, sha256_of_start
from rucksack.documents import FORMATS, counted, files_in, openwebtext_files, read_texts
from rucksack.errors import UserError
from rucksack.files import atomic, locked_folder
from rucksack.tokenizer import (
    encode,
    gpt2_tokenizer,
    load_tokenizer,
    read_tokenizer,
    vocab_size,
    words_tokenizer,
)
from rucksack.toy import toy_stories
from rucksack.weights import from_pretrained

LONGEST = 20_000  # characters; longer documents are cut
LARGEST_VOCAB = 1 << 16  # ids in a .bin are uint16
TOY_TRAIN = 60_000  # stories
TOY_VAL = 4_000
CACHE = '.prepare-cache'  # a folder in data/NAME, removed at the end


# -----------------------------------------------------------------------------
# Holding out, encoding, writing.


def cut(texts):
    """Cut documents over LONGEST characters into pieces, so that text of all kinds is held out.

    They are cut at paragraphs, lines or words. If there are fewer than 100 documents, a piece is at
    most a hundredth of the text, but 100 characters or more.
    """
    size = LONGEST
    if len(texts) < 100:
        characters = sum(map(len, texts['text']))
        size = min(size, max(100, characters // 100))
    ends = [r'\Z', r'\n\s*\n', r'\n', r'\s', '.']  # the first that matches
    piece = re.compile('|'.join(f'.{{0,{size}}}{end}' for end in ends), re.DOTALL)

    def pieces(rows: dict) -> dict:
        found = []
        for document in rows['text']:
            found.extend(filter(None, piece.findall(document)))
        return {'text': found}

    return texts.map(pieces, batched=True, batch_size=100)


def warn_of_copies(train, val) -> None:
    """Print how many documents in train are identical to one in val."""
    held_out = set(val['text'])
    copies = sum(text in held_out for rows in train.iter(1000) for text in rows['text'])
    if copies:
        print(f'training documents identical to held-out ones: {copies:,}')


def write_bin(path: Path, texts, encoding: Encoding) -> None:
    """Write the ids of texts to a file, with the end-of-text id after each text.

    texts is a datasets.Dataset with a column text.
    """
    with open(path, 'wb') as file, ThreadPoolExecutor() as pool:
        for start in progress(range(0, len(texts), 1000), 'encoding'):
            for ids in pool.map(partial(encode, encoding), texts[start:start + 1000]['text']):
                file.write(np.array([*ids, encoding.eot_token], BIN_DTYPE).tobytes())


def write_bins(files: dict[str, Path], texts: dict, encoding: Encoding) -> dict:
    """Write the ids of texts['train'] and texts['val'] to two files; return facts for meta.json."""
    facts = {'documents': sum(map(len, texts.values())),
             'tokens': {}, 'sha256': {}, 'sha256_of_start': {}}
    for name, path in files.items():
        if not len(texts[name]):
            raise UserError('too little text to hold some out; add more text, or use --val FILE')
        write_bin(path, texts[name], encoding)
        ids = np.memmap(path, BIN_DTYPE, mode='r')
        facts['tokens'][name] = len(ids)
        facts['sha256'][name] = hashlib.sha256(ids).hexdigest()
        facts['sha256_of_start'][name] = sha256_of_start(ids)
    return facts


def choose_tokenizer(args: argparse.Namespace) -> dict:
    """Describe the tokenizer of --like, or else GPT-2's with the first --merges merges.

    Raises UserError if it has more ids than a .bin can hold.
    """
    if args.like is None:
        return gpt2_tokenizer(args.merges)
    if args.like.endswith('.json'):
        tokenizer = read_tokenizer(Path(args.like))
    else:
        _, tokenizer = from_pretrained(args.like)
    n_vocab = vocab_size(tokenizer)
    if n_vocab > LARGEST_VOCAB:
        raise UserError(f'{args.like} has {n_vocab:,} ids; a .bin holds at most {LARGEST_VOCAB:,}')
    return tokenizer


def write_corpus(files: dict[str, Path], args: argparse.Namespace, skipped: Counter) -> dict:
    """Write the bins of a corpus and return the facts for meta.json; temporary files go to CACHE.

    Files in both --text and --val are held out. skipped counts what is not read, by reason.
    """
    import datasets
    seen = set()
    val_files = files_in(args.val, seen, skipped)
    sources = files_in(args.text, seen, skipped)
    sources += [f'hub:{dataset}' for dataset in args.hub]
    tokenizer = choose_tokenizer(args)
    encoding = load_tokenizer(tokenizer)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    read = partial(read_texts, field=args.field, skipped=skipped,
                   cache=str(files['train'].with_name(CACHE)))
    train = read(sources or openwebtext_files())
    if val_files:
        val = read(val_files)
    else:
        n_held = 0.0005 * len(train)
        if args.name != 'openwebtext':
            train = cut(train)
            n_held = max(len(train) / 100, min(len(train) / 10, 10))
        n_held = max(1, round(n_held))
        order = np.random.default_rng(args.seed).permutation(len(train))
        val = train.select(np.sort(order[:n_held]))
        train = train.select(np.sort(order[n_held:]))
    warn_of_copies(train, val)
    facts = write_bins(files, {'train': train, 'val': val}, encoding)
    return {'tokenizer': tokenizer, **facts}


def write_toy(files: dict[str, Path], seed: int) -> dict:
    """Write the bins of the toy world and return the facts for meta.json, with the entropy."""
    from datasets import Dataset
    stories, nats = zip(*toy_stories(seed, TOY_TRAIN + TOY_VAL))
    tokenizer = words_tokenizer(stories)
    texts = {'train': Dataset.from_dict({'text': stories[:TOY_TRAIN]}),
             'val': Dataset.from_dict({'text': stories[TOY_TRAIN:]})}
    facts = write_bins(files, texts, load_tokenizer(tokenizer))
    tokens = facts['tokens']
    return {
        'tokenizer': tokenizer,
        **facts,
        'entropy_per_token': sum(nats) / sum(tokens.values()),
        'val_entropy_per_token': sum(nats[TOY_TRAIN:]) / tokens['val'],
        'entropy_note': 'nats, whole stories with their end-of-text; '
                        'exact, each has one derivation'}


def write_data(folder: Path, args: argparse.Namespace, skipped: Counter) -> dict:
    """Write the three files of data/NAME, each whole or not at all; return what meta.json holds.

    meta.json appears first. If a run is killed after that, its checksums do not match the old bins,
    so train.py refuses them.
    """
    with (atomic(folder / 'val.bin') as val,
          atomic(folder / 'train.bin') as train,
          atomic(folder / 'meta.json') as meta):
        files = {'train': train, 'val': val}
        if args.name == 'toy':
            facts = write_toy(files, args.seed)
        else:
            facts = write_corpus(files, args, skipped)
        facts['vocab_size'] = vocab_size(facts['tokenizer'])
        facts['dtype'] = 'uint16'
        meta.write_text(json.dumps(facts, indent=1), encoding='utf-8')
    return facts


# -----------------------------------------------------------------------------
# The program.


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; raises UserError for flags that cannot be combined."""
    parser = Parser(
        prog='prepare.py',
        description='Tokenize text: write data/NAME/train.bin, val.bin and meta.json.')
    files = {'nargs': '+', 'action': 'extend', 'metavar': 'FILE', 'default': []}
    add = parser.add_argument
    add('name', metavar='NAME', help='toy, openwebtext, or a name for your --text or --hub data')
    add('--text', help=f'text to prepare: {FORMATS}; a folder means all such files in it', **files)
    add('--hub', metavar='DATASET', nargs='+', action='extend', default=[],
        help='OWNER/DATASET[:CONFIG[:SPLIT]] on the Hugging Face Hub, such as '
             'roneneldan/TinyStories (default split: train)')
    add('--field', metavar='F', default='text', help='field or column that holds the text [text]')
    add('--val', help='files to hold out (default: 1%% of the documents; openwebtext: 0.05%%)',
        **files)
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        '--merges', type=number(int, 1, 50_000), metavar='N',
        help="keep only the first N merges of GPT-2's BPE; up to 16,384 need no download")
    vocabulary.add_argument(
        '--like', metavar='MODEL',
        help='use the tokenizer of the model to fine-tune: --like english, or a checkpoint, '
             'folder or Hub name, or your own tokenizer.json')
    add('--seed', type=number(int, 0), metavar='S', default=0,
        help='random seed for the toy world and the split [0]')
    add('--overwrite', action='store_true', help='replace the three files in data/NAME')
    flags = parser.parse_args(argv)
    if flags.name == 'toy' and (flags.text or flags.hub or flags.val or flags.like or flags.merges):
        parser.error('toy takes no --text, --hub, --val, --like or --merges')
    if flags.name not in ('toy', 'openwebtext') and not (flags.text or flags.hub):
        parser.error(f'NAME is {flags.name!r}; any name except toy and openwebtext needs '
                     '--text or --hub')
    return flags


def run(argv: list[str]) -> None:
    """Make data/NAME and print a summary; other files in the folder are left alone."""
    args = parse_args(argv)
    skipped = Counter()
    folder = data_folder(args.name)
    with locked_folder(folder):
        for name in ('train.bin', 'val.bin', 'meta.json'):
            if (folder / name).exists() and not args.overwrite:
                raise UserError(f'{folder / name} exists; add --overwrite to replace it, '
                                'or choose another NAME')
        remove_cache = partial(shutil.rmtree, folder / CACHE, ignore_errors=True)
        remove_cache()
        try:
            facts = write_data(folder, args, skipped)
        finally:
            remove_cache()
    train, val = facts['tokens'].values()
    print(printable(f'{folder}: {facts["documents"]:,} documents, {train:,} tokens to train on and '
                    f'{val:,} held out, {facts["vocab_size"]:,} ids; skipped: {counted(skipped)}'))


main = partial(run_cli, 'prepare.py', run)

if __name__ == '__main__':
    main()
