"""Turn text into tokens: write data/NAME/train.bin, val.bin and meta.json for train.py.

    python prepare.py toy                                  the toy world, a grammar; no download
    python prepare.py openwebtext                          the paper's corpus, from the Hub
    python prepare.py NAME --text FILE... [--val FILE...]  your .jsonl, .parquet, .txt or .md
    python prepare.py NAME --hub wikimedia/wikipedia:20231101.simple     any text dataset on the Hub
    python prepare.py NAME --text FILE --like english      with the tokenizer of a model or a .json

A .bin file holds only token ids, as little-endian uint16: no vocabulary here has more than 65,536
ids. An end-of-text id follows each document: one object of a .jsonl (field "text"), one row of a
.parquet (column "text"), or a whole .txt or .md file.

Without --val, documents over 20,000 characters are cut at paragraphs into pieces, which then count
as documents. If there are fewer than 100, the pieces are smaller. 1% of the documents are held out,
but at least ten, or a tenth if there are fewer than 100. OpenWebText is not cut; 0.05% is held out.
"""

import hashlib
import json
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import compress
from tempfile import TemporaryFile
from typing import BinaryIO

import numpy as np
from tiktoken import Encoding

from rucksack import documents
from rucksack.cli import Parser, number, progress, run_cli
from rucksack.data import BIN_DTYPE, data_folder, sha256_of_start
from rucksack.errors import UserError
from rucksack.files import atomic, locked_folder
from rucksack.tokenizer import GPT2, encode_all, load_tokenizer, words_tokenizer


def parse_args(argv: list[str]) -> Namespace:
    """Parse the command line; raises UserError for flags that cannot be combined."""
    parser = Parser(
        'prepare.py',
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter)
    several = {'nargs': '+', 'action': 'extend', 'default': []}
    add = parser.add_argument
    add('name', help='toy, openwebtext, or a name for your --text or --hub data')
    add('--text', **several, help=f'folders, or files: {documents.FORMATS}')
    add('--hub', **several,
        help='OWNER/DATASET[:CONFIG[:SPLIT]] on the Hugging Face Hub (default split: train)')
    add('--field', default='text', help='field or column that holds the text [text]')
    add('--val', **several, help='files or folders to hold out')
    add('--like',
        help="the tokenizer to use: english (16,384 of GPT-2's merges; no download), a checkpoint, "
             "a folder, a Hub name, or a .json [GPT-2's]")
    add('--seed', type=number(int, 0), default=0, help='for the toy and the split [0]')
    add('--overwrite', action='store_true', help='replace the three files in data/NAME')
    args = parser.parse_args(argv)
    sources = args.text + args.hub
    if args.name == 'toy' and (sources or args.val or args.like):
        parser.error('toy takes no --text, --hub, --val or --like')
    if args.name.endswith('.'):
        parser.error(f'{args.name!r} ends in a dot, which Windows would drop; choose another name')
    if args.name not in ('toy', 'openwebtext') and not sources:
        parser.error(f'{args.name!r} needs --text or --hub; only toy and openwebtext do not')
    return args


def write_ids(file: BinaryIO, texts: Iterable[str], encoding: Encoding) -> list[int]:
    """Append the ids of texts to a file, with end-of-text after each; return sizes in bytes."""
    sizes = []
    for ids in encode_all(encoding, progress(texts, 'encoding')):
        ids.append(encoding.eot_token)
        size = file.write(np.array(ids, BIN_DTYPE).tobytes())
        sizes.append(size)
    return sizes


def read_ids(file: BinaryIO, sizes: list[int]) -> Iterator[bytes]:
    """Yield the ids of each document that write_ids wrote."""
    file.seek(0)
    return map(file.read, sizes)


def warn_of_copies(file: BinaryIO, sizes: list[int], is_held: np.ndarray) -> None:
    """Print how many documents in train are identical to one that is held out."""
    hashes = np.array(list(map(hash, read_ids(file, sizes))))
    n_copies = np.isin(hashes[~is_held], hashes[is_held]).sum()
    if n_copies:
        print(f'training documents identical to held-out ones: {n_copies:,}')


def write_bins(bins: dict, file: BinaryIO, sizes: list[int], is_held: np.ndarray) -> dict:
    """Copy the documents in file to val.bin where is_held, else to train.bin; return facts."""
    if is_held.all() or not is_held.any():
        raise UserError('too little text to hold some out; add more text, or use --val FILE')
    facts = {
        'documents': len(sizes),
        'tokens': {},
        'sha256': {},
        'sha256_of_start': {}}
    for name, is_chosen in {'train': ~is_held, 'val': is_held}.items():
        with open(bins[name], 'wb') as opened:
            opened.writelines(compress(read_ids(file, sizes), is_chosen))
        ids = np.memmap(bins[name], BIN_DTYPE, mode='r')
        facts['tokens'][name] = len(ids)
        facts['sha256'][name] = hashlib.sha256(ids).hexdigest()
        facts['sha256_of_start'][name] = sha256_of_start(ids)
        del ids  # Windows removes no file that is mapped
    return facts


def write_toy(bins: dict, file: BinaryIO, seed: int) -> dict:
    """Write the bins of the toy world, and return facts; no model has a loss below the entropy."""
    from rucksack import toy
    stories, nats = zip(*toy.toy_stories(seed, toy.N_TRAIN + toy.N_VAL))
    tokenizer = words_tokenizer(stories)
    sizes = write_ids(file, stories, load_tokenizer(tokenizer))
    is_held = np.arange(len(stories)) >= toy.N_TRAIN
    facts = write_bins(bins, file, sizes, is_held)
    entropy = sum(nats[toy.N_TRAIN:]) / facts['tokens']['val']
    return {'tokenizer': tokenizer, 'val_entropy_per_token': entropy, **facts}


def write_corpus(bins: dict, file: BinaryIO, args: Namespace) -> dict:
    """Write the bins of a corpus, and return the facts for meta.json."""
    seen = set()  # so that a file in both --text and --val is held out
    val = documents.read_all(args.val, [], args.field, seen)
    texts = documents.read_all(args.text, args.hub, args.field, seen)
    if not (args.text or args.hub):
        texts = documents.read_openwebtext()
    if not (args.val or args.name == 'openwebtext'):
        texts = documents.cut(texts)
    tokenizer = GPT2
    if args.like:
        from rucksack.hub.find import tokenizer_of
        tokenizer = tokenizer_of(args.like)
    encoding = load_tokenizer(tokenizer)
    if encoding.n_vocab > 1 << 16:
        raise UserError(f'{args.like} has {encoding.n_vocab:,} ids; a .bin holds at most 65,536')
    sizes = write_ids(file, texts, encoding)
    is_held = documents.held_out(len(sizes), args.name, args.seed)
    if args.val:
        n_train = len(sizes)
        sizes += write_ids(file, val, encoding)
        is_held = np.arange(len(sizes)) >= n_train
    warn_of_copies(file, sizes, is_held)
    return {'tokenizer': tokenizer, **write_bins(bins, file, sizes, is_held)}


def run(argv: list[str]) -> None:
    """Make the three files of data/NAME and print a summary; other files there stay."""
    args = parse_args(argv)
    folder = data_folder(args.name)
    with locked_folder(folder):
        for name in ('train.bin', 'val.bin', 'meta.json'):
            if (folder / name).exists() and not args.overwrite:
                raise UserError(f'{folder / name} exists; add --overwrite, or choose another NAME')
        with (atomic(folder / 'val.bin') as val,  # the last to appear
              atomic(folder / 'meta.json') as meta,
              atomic(folder / 'train.bin') as train,
              TemporaryFile(dir=folder) as file):
            bins = {'train': train, 'val': val}
            if args.name == 'toy':
                facts = write_toy(bins, file, args.seed)
            else:
                facts = write_corpus(bins, file, args)
            facts['vocab_size'] = load_tokenizer(facts['tokenizer']).n_vocab
            meta.write_text(json.dumps(facts, indent=1), encoding='utf-8')
    n_train, n_val = facts['tokens'].values()
    print(f'{folder}: {facts["documents"]:,} documents, {n_train:,} tokens to train on and '
          f'{n_val:,} held out, {facts["vocab_size"]:,} ids')


main = partial(run_cli, 'prepare.py', run)

if __name__ == '__main__':
    main()
