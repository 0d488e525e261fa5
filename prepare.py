"""Text in, tokens out: data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py toy                                   a small world whose truth is known; no download
    python prepare.py openwebtext --num-proc 16             the paper's corpus, from the Hugging Face Hub
    python prepare.py NAME --text FILE... [--val FILE...]   your own .jsonl, .parquet, .tar, .txt or .md files
    python prepare.py NAME --hub wikimedia/wikipedia:20231101.simple      any text of the Hub

A bin is nothing but token ids, little-endian uint16, as no vocabulary here has over 65,536, an end-of-text id
after each document: an object of a .jsonl (field "text"), a row of a .parquet (column "text"), a .txt in a
.tar, a whole .txt or .md. Without --val, documents over 20,000 characters (fewer, if there are less than 100
documents) are cut at paragraphs into pieces, which then count as documents.
"""

import argparse
import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from rucksack.common import Parser, UserError, lock_folder, number, one_line, run_cli, sync
from rucksack.data import DATA_NAME, encode, gpt2_tokenizer, load_tokenizer, read_bin, read_meta
from rucksack.toy import toy_stories, toy_tokenizer

BUILDERS = {'.jsonl': 'json', '.json': 'json', '.parquet': 'parquet', '.tar': 'tar', '.txt': 'text',
            '.md': 'text', '.tokens': 'text', '.raw': 'text', '': 'text'}
FORMATS = '.jsonl, .json, .parquet, .tar, or prose as .txt, .md or without an extension; plain, .gz or .xz'


def builder_of(path: str) -> str | None:
    """Name the reader of a file, by its extension; None if there is none."""
    return BUILDERS.get(Path(re.sub(r'\.[gx]z$', '', path.lower())).suffix)


def rows_of_tar(path: str, file=None) -> Iterator[dict]:
    """Yield the .txt in a tar and in the .xz tars inside it, with OpenWebText's published white space."""
    with tarfile.open(path, 'r|*', file) as tar:
        for member in tar:
            if member.name.endswith('.txt'):
                yield {'text': re.sub(r'\n{3,}', '\n\n', tar.extractfile(member).read().decode()).strip()}
            elif member.name.endswith('.xz'):
                yield from rows_of_tar(path, tar.extractfile(member))


def read_rows(source: str, field: str, cache: dict):
    """Read the documents of a file, or of hub:DATASET: a datasets.Dataset of one column, text, on disk."""
    import datasets
    builder, give = builder_of(source), FORMATS
    try:
        if source.startswith('hub:'):
            name, config, split = (source.split(':') + ['', ''])[1:4]
            give = 'OWNER/DATASET[:CONFIG[:SPLIT]]'
            rows = datasets.load_dataset(name, config or None, split=split or 'train', **cache)
        elif builder == 'tar':
            return datasets.Dataset.from_generator(rows_of_tar, gen_kwargs={'path': source}, **cache)
        else:
            file = datasets.DownloadManager(download_config=datasets.DownloadConfig(**cache)).extract(source)
            how, field = ({'sample_by': 'document'}, 'text') if builder == 'text' else ({}, field)
            rows = datasets.load_dataset(builder, data_files=glob.escape(file), split='train', **how, **cache)
        rows.data.validate(full=True)  # UTF-8 too, which not every builder checks
    except Exception as error:
        cause = error.__cause__ or error  # errors of the system, as of a full disk, are not about the file
        raise cause if getattr(cause, 'errno', 0) else UserError(f'{source}: {one_line(cause)}; give {give}')
    if getattr(rows.features.get(field), 'dtype', None) not in ('string', 'large_string', 'null'):
        there = ', '.join(rows.column_names)
        raise UserError(f'{source} has no field or column "{field}" of strings; name one by --field: {there}')
    rows = rows.select_columns(field)
    return rows if field == 'text' else rows.rename_column(field, 'text')


def openwebtext_files() -> list[str]:
    """Download OpenWebText, or find it in the Hub's cache: its Parquet files if all, else its archives."""
    import huggingface_hub as hub
    repo = 'Skylion007/openwebtext'
    try:
        names = sorted(file.rfilename for file in hub.HfApi().dataset_info(repo).siblings)
        names = [name for name in names if name.endswith('.parquet')]
        if not any(name.endswith(f'-of-{len(names):05d}.parquet') for name in names):
            names = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(21)]
        return [hub.hf_hub_download(repo, name, repo_type='dataset') for name in names]
    except Exception as error:  # the Hub's client and its HTTP library raise a dozen kinds without a network
        raise UserError(f'OpenWebText cannot be fetched ({one_line(error)}); connect, or use --text FILE...')


def end_with_parent(_) -> None:
    """Leave Ctrl-C to the parent, and end when it ends, rather than go on and keep the lock on its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    getattr(ctypes.CDLL(None), 'prctl', max)(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux


def cut_rows(rows: dict, size: int) -> dict:
    """Cut documents into pieces of up to size characters, at paragraphs, lines or words."""
    cut = re.compile('|'.join(f'.{{0,{size}}}{end}' for end in r'\Z \n\s*\n \n \s .'.split()), re.DOTALL)
    return {'text': [piece for text in rows['text'] for piece in cut.findall(text or '')]}


def encode_row(row: dict, encoding: Encoding) -> dict:
    """Encode a document: its ids, end-of-text included, and their number; an empty one has none."""
    ids = encode(encoding, row['text'] or '')
    return {'ids': ids + [encoding.eot_token] if ids else [], 'n': len(ids) + bool(ids)}


def write_bins(folder: Path, batches: Iterator[tuple[np.ndarray, np.ndarray]]) -> dict:
    """Write (ids, whether each is held out) to train.bin and val.bin; their counts and checksums."""
    tokens, sums = {'train': 0, 'val': 0}, {'train': hashlib.sha256(), 'val': hashlib.sha256()}
    with open(folder / 'train.bin', 'wb') as train, open(folder / 'val.bin', 'wb') as val:
        for ids, held in batches:
            for name, file, part in (('train', train, ids[~held]), ('val', val, ids[held])):
                file.write(data := part.astype(part.dtype.newbyteorder('<')).tobytes())
                sums[name].update(data)
                tokens[name] += len(part)
    return {'tokens': tokens, 'sha256': {name: digest.hexdigest() for name, digest in sums.items()}}


def write_corpus(folder: Path, args: argparse.Namespace) -> dict:
    """Write the bins of text files; return the facts for meta.json."""
    encoding = load_tokenizer(tokenizer := gpt2_tokenizer(args.merges))
    import datasets
    from multiprocess.util import register_after_fork
    register_after_fork(args, end_with_parent)  # called in the processes of datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    sys.stderr.isatty() or datasets.disable_progress_bars()
    sources, cache = args.sources or openwebtext_files(), {'cache_dir': str(folder / 'cache')}
    parts = [read_rows(source, args.field, cache) for source in sources + args.val]
    if any(part.features != parts[0].features for part in parts):
        parts = [part.cast(datasets.Features(text=datasets.Value('large_string'))) for part in parts]
    rows, workers = datasets.concatenate_datasets(parts), None if args.num_proc == 1 else args.num_proc
    if args.name != 'openwebtext' and not args.val:  # to hold out text of all kinds
        size = max(100, sum(len(text or '') for text in rows['text']) // 100) if len(rows) < 100 else 20_000
        rows = rows.map(cut_rows, batched=True, batch_size=100, fn_kwargs={'size': min(size, 20_000)},
                        num_proc=workers, desc='Cutting')
    features = datasets.Features(ids=datasets.List(datasets.Value('uint16')), n=datasets.Value('int64'))
    rows = rows.map(encode_row, features=features, remove_columns='text', writer_batch_size=100,
                    fn_kwargs={'encoding': encoding}, num_proc=workers, desc='Encoding')
    n, order = np.array(rows['n'][:]), np.arange(len(rows))
    filled, share = np.flatnonzero(n), 0.0005 if args.name == 'openwebtext' else 0.01
    chosen = np.random.default_rng(args.seed).permutation(filled)[:max(1, round(share * len(filled)))]
    held = order >= sum(map(len, parts[:len(sources)])) if args.val else np.isin(order, chosen)
    batches = ((batch['ids'].combine_chunks().flatten().to_numpy(), np.repeat(held[i:i + 100], n[i:i + 100]))
               for i, batch in zip(order[::100], rows.with_format('arrow').iter(100)))
    return {'tokenizer': tokenizer, 'documents': len(filled), **write_bins(folder, batches)}


def write_toy(folder: Path, seed: int, n_train: int = 60_000, n_val: int = 4_000) -> dict:
    """Write the bins of the toy world; return the facts for meta.json, its entropy among them."""
    texts, nats = zip(*toy_stories(seed, n_train + n_val))
    tokenizer = toy_tokenizer(texts)
    encoding = load_tokenizer(tokenizer)
    rows = [encoding.encode_ordinary(text) + [encoding.eot_token] for text in texts]
    ids, n = np.concatenate(rows).astype('uint16'), sum(map(len, rows[:n_train]))
    return {'tokenizer': tokenizer, 'documents': len(texts), 'entropy_per_token': sum(nats) / len(ids),
            'val_entropy_per_token': sum(nats[n_train:]) / (len(ids) - n),
            'entropy_note': 'nats, whole stories with their end-of-text; exact, each has one derivation',
            **write_bins(folder, [(ids, np.arange(len(ids)) >= n)])}


def files_in(path: str) -> list[str]:
    """The file itself, or the files below a folder that can be read."""
    below = sorted(Path(path).rglob('[!.]*')) if os.path.isdir(path) else []
    return [str(file) for file in below if file.is_file() and builder_of(str(file))] or [path]


def command_of(args: argparse.Namespace) -> dict:
    """What the bins depend on: the same command on the same files makes the same."""
    files = [[os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns] for f in args.text + args.val]
    given = {'hub': args.hub, 'merges': args.merges, 'field': args.field * (args.field != 'text')}
    return dict(name=args.name, files=files, val=len(args.val), subsets=None, seed=args.seed) | {
        option: value for option, value in given.items() if value}


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Make data/NAME in a locked folder beside it that gets this name when complete; print what was made."""
    partial = folder.with_name(f'.{folder.name}.partial')
    partial.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(partial, busy := f'another prepare.py is making {folder}; wait for it')
    if not os.path.samestat(os.fstat(lock), os.stat(partial)):  # that one has renamed it since
        raise UserError(busy)
    try:
        shutil.rmtree(partial / 'cache', ignore_errors=True)  # of a run that was killed
        facts = write_toy(partial, args.seed) if args.name == 'toy' else write_corpus(partial, args)
        if not all(facts['tokens'].values()):
            raise UserError(f'{", ".join(args.sources + args.val)}: too little text; give more, or --val')
        n_vocab = load_tokenizer(facts['tokenizer']).n_vocab
        facts |= {'vocab_size': n_vocab, 'dtype': 'uint16', 'command': command_of(args)}
        (partial / 'meta.json').write_text(json.dumps(facts, indent=1), encoding='utf-8')
        shutil.rmtree(partial / 'cache', ignore_errors=True)
        for name in ('train.bin', 'val.bin', 'meta.json', '.'):
            sync(partial / name)
        if os.path.lexists(folder) and args.overwrite:
            folder.rename(partial / 'cache')
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error
    shutil.rmtree(folder / 'cache', ignore_errors=True)  # what was replaced
    n, (train, val) = facts['documents'], facts['tokens'].values()
    print(f'{folder}: {n:,} documents, {train:,} tokens to train on and {val:,} held out, {n_vocab:,} ids')
    if 'entropy_per_token' in facts:
        print(f'The entropy of this world is {facts["entropy_per_token"]:.4f} nats per token.')


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(prog='prepare.py', description='Write data/NAME/train.bin, val.bin and meta.json.')
    add, files = parser.add_argument, {'nargs': '+', 'action': 'extend', 'metavar': 'FILE', 'default': []}
    add('name', metavar='NAME', help='toy, openwebtext, or a name for the files of --text')
    add('--text', help=f'{FORMATS}; a folder is its files', **files)
    add('--hub', metavar='DATASET', help='OWNER/DATASET[:CONFIG[:SPLIT]] on the Hugging Face Hub, as '
        'roneneldan/TinyStories (default split: train)')
    add('--field', metavar='F', default='text', help='field or column of the text [text]')
    add('--val', help='held-out text (default: 1%% of the documents, 0.05%% of openwebtext)', **files)
    add('--merges', type=number(int, 1, 50_000), metavar='N', help="cut GPT-2's BPE after its first N merges")
    add('--num-proc', type=number(int, 1), metavar='N', default=os.cpu_count(), help='(default: all cores)')
    add('--seed', type=number(int, 0), metavar='S', default=0, help='of the toy world and of the split')
    add('--overwrite', action='store_true', help='replace data/NAME')
    args = parser.parse_args(argv)
    if not re.fullmatch(DATA_NAME, args.name) or '/' in args.name:
        parser.error(f'NAME is {args.name!r}; it takes letters, digits, _, - and .')
    args.text, args.val = (sum(map(files_in, paths), []) for paths in (args.text, args.val))
    args.sources = args.text + [f'hub:{args.hub}'] * bool(args.hub)
    if args.name != 'openwebtext' and (args.name == 'toy') == bool(args.sources):
        parser.error(f'NAME is {args.name!r}; toy takes no text, any other but openwebtext --text or --hub')
    if other := [path for path in args.text + args.val if not os.path.isfile(path) or not builder_of(path)]:
        parser.error(f'{other[0]} is not a file, or not one of those it reads: {FORMATS}')
    return args


def run(argv: list[str]) -> None:
    """Make data/NAME, unless it is there."""
    args = parse_args(argv)
    folder = Path('data', args.name)
    if args.overwrite or not os.path.lexists(folder):
        return prepare(folder, args)
    if read_meta(folder).get('command') != command_of(args):
        raise UserError(f'{folder} exists and was made otherwise; add --overwrite, or take another NAME')
    for name in ('train', 'val'):
        read_bin(folder, name, read_meta(folder), checksum=True)
    print(f'{folder} was made by this command, its checksums are right; --overwrite makes it again')


main = partial(run_cli, 'prepare.py', run)

if __name__ == '__main__':
    main(sys.argv[1:])
