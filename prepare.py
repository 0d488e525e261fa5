"""Text in, tokens out: data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py toy                                   a small world whose truth is known; no download
    python prepare.py openwebtext --num-proc 16             the paper's corpus, from the Hugging Face Hub
    python prepare.py NAME --text FILE... [--val FILE...]   your own .jsonl, .parquet, .tar or text files

A bin is nothing but token ids, little-endian uint16 (uint32 for more than 65,536 words); every document ends
with the end-of-text id. Documents are the lines of a .jsonl (field "text"), the rows of a .parquet (column
"text"), the .txt files in a .tar, and any other file as a whole; plain, .gz or .xz.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tarfile
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path

import numpy as np

from rucksack.common import Parser, UserError, drop_unwritable_output, fail, sync
from rucksack.data import GPT2, load_tokenizer, open_bin, pieces_of, read_meta, token_dtype, verify
from rucksack.toy import toy_stories, toy_tokenizer

FORMATS = 'give UTF-8 text, .jsonl, .parquet or a .tar of .txt, plain, .gz or .xz'


def open_file(path: str):
    """A file for reading bytes, unpacked on the way where its name ends in .gz or .xz."""
    return {'.gz': gzip.open, '.xz': lzma.open}.get(Path(path).suffix.lower(), open)(path, 'rb')


def rows_of_text(path: str) -> Iterator[tuple[str, bool]]:
    """A file that is one document."""
    held = ''
    with io.TextIOWrapper(open_file(path), encoding='utf-8', newline='') as stream:
        for piece in pieces_of(stream):
            if '\0' in piece:
                raise UserError(f'{path} is not text, it holds zero bytes; {FORMATS}')
            if held:
                yield held, False
            held = piece
    yield held, True


def rows_of_jsonl(path: str) -> Iterator[tuple[str, bool]]:
    """The field "text" of each line of a .jsonl; null is an empty document, an empty line is none."""
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)['text'] or ''
                text.encode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f'{path}, line {number}: it must be a JSON object with a string "text"')
            yield text, True


def rows_of_parquet(path: str) -> Iterator[tuple[str, bool]]:
    """The column "text" of a .parquet; null is an empty document."""
    import pyarrow
    import pyarrow.parquet
    try:
        with open_file(path) as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=100, columns=['text']):
                for text in batch['text'].cast(pyarrow.large_string()).to_pylist():
                    yield text or '', True
    except (pyarrow.ArrowException, LookupError):
        raise UserError(f'{path} is no .parquet with a column "text" of strings')


class TarHeader(tarfile.TarInfo):
    """A header in a tar; tarfile takes a damaged one for the end of the archive, here it is an error."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str):
        """The header in 512 bytes."""
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(f'damaged tar: {error}')


def rows_of_tar(path: str, file=None) -> Iterator[tuple[str, bool]]:
    """The .txt documents in a tar, and in .xz tars inside it, as OpenWebText has them; streamed.

    Three or more newlines become two and the ends are stripped, as in the published dataset.
    """
    with tarfile.open(fileobj=file or open_file(path), mode='r|', tarinfo=TarHeader) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith('.txt'):
                text = tar.extractfile(member).read().decode('utf-8')
                yield re.sub(r'\n{3,}', '\n\n', text).strip(), True
            elif member.isfile() and member.name.endswith('.xz'):
                yield from rows_of_tar(path, lzma.open(tar.extractfile(member)))


READERS = {'.jsonl': rows_of_jsonl, '.json': rows_of_jsonl, '.parquet': rows_of_parquet, '.tar': rows_of_tar}


def rows_of_files(paths: list[str]) -> Iterator[dict]:
    """Rows of all files, each read by its extension; one that cannot be read is a UserError that names it."""
    for path in paths:
        suffixes = [s.lower() for s in Path(path).suffixes if s.lower() not in ('.gz', '.xz')]
        reader = READERS.get(suffixes[-1] if suffixes else '', rows_of_text)
        empty = True
        try:
            for text, end in reader(path):
                empty = False
                yield {'text': text, 'end': end}
        except UnicodeDecodeError as error:
            raise UserError(f'{path} is not text ({error.reason}); {FORMATS}')
        except (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, OSError) as error:
            raise UserError(f'{path} cannot be read ({error or "it ends too early"}); {FORMATS}')
        if empty:
            raise UserError(f'{path} holds no documents; {FORMATS}')


def read_corpus(files: list[str], cache: Path, num_proc: int):
    """A datasets.Dataset with the rows of all files, kept on disk below cache."""
    import datasets
    features = datasets.Features(text=datasets.Value('large_string'), end=datasets.Value('bool'))
    try:
        return datasets.Dataset.from_generator(
            rows_of_files, features, cache_dir=str(cache), gen_kwargs={'paths': files},
            writer_batch_size=1000, num_proc=min(num_proc, len(files)))
    except Exception as error:  # datasets wraps it; from another process it comes as the text of a traceback
        text = ''.join(traceback.format_exception(error))
        for kind, pattern in ((UserError, r'UserError: (.*)'), (OSError, r'Error: (\[Errno .*)')):
            if found := re.findall(pattern, text):
                raise kind(found[-1])
        raise


def openwebtext_files(subsets: int | None) -> list[str]:
    """Local copies of the files of Skylion007/openwebtext, downloaded or from the Hub's cache.

    datasets 4 and later refuse its loading script. So: its Parquet files if the repository has them whole,
    else, or for some subsets only, its own archives.
    """
    import huggingface_hub
    huggingface_hub.utils.logging.set_verbosity_error()  # no lines about retries
    repo = {'repo_id': 'Skylion007/openwebtext', 'repo_type': 'dataset'}
    try:
        names = huggingface_hub.HfApi().list_repo_files(**repo)
        shards = [(n, m[1]) for n in sorted(names) if (m := re.search(r'-of-(\d+)\.parquet$', n))]
        if subsets or not shards or len(shards) != int(shards[0][1]):
            chosen = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(subsets or 21)]
        else:
            chosen = [name for name, _ in shards]
        return [huggingface_hub.hf_hub_download(filename=name, **repo) for name in chosen]
    except Exception as error:  # the Hub's client and its HTTP library raise a dozen kinds without a network
        raise UserError(f'OpenWebText could not be fetched ({type(error).__name__}); connect, or give '
                        'its archives by path: python prepare.py openwebtext --text urlsf_subset*.tar')


# -----------------------------------------------------------------------------
# Encoding and writing.


Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids of some rows in one array; lengths, ends of rows


def encode_rows(texts: list[str], ends: list[bool], tokenizer: dict) -> Encoded:
    """Rows as tokens, end-of-text after the last row of a document; an empty document has none."""
    encoding, ids = load_tokenizer(tokenizer), []
    for text, end in zip(texts, ends):
        row = encoding.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary, but without a list
        ids.append(np.append(row, np.uint32(encoding.eot_token)) if end and len(row) else row)
    lengths = np.array([len(row) for row in ids], dtype=np.int32)
    return np.concatenate(ids).astype(token_dtype(encoding.n_vocab)), lengths, np.array(ends)


def batches_of(rows) -> Iterator[tuple[list[str], list[bool]]]:
    """The texts and ends of a datasets.Dataset, about a million characters at a time.

    Its files are read, not mapped into memory, where all that was read would count as used.
    """
    import pyarrow
    texts, ends, size = [], [], 0
    for file in rows.cache_files:
        with pyarrow.OSFile(file['filename']) as stream:
            for table in pyarrow.ipc.open_stream(stream):
                for text, end in zip(table['text'].to_pylist(), table['end'].to_pylist()):
                    texts.append(text)
                    ends.append(end)
                    size += 1 + len(text)
                    if size > 1 << 20:
                        yield texts, ends
                        texts, ends, size = [], [], 0
    if texts:
        yield texts, ends


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def follow(leader: int) -> None:
    """Make this process go on when Ctrl-C is pressed, and end when the one that it works for has ended."""
    parent = os.getppid()  # the leader, or what the leader has processes started by

    def watch() -> None:
        """Wait for the end of the leader."""
        while os.getppid() == parent and is_alive(leader):
            time.sleep(1)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader cleans up, then ends the others
    threading.Thread(target=watch, daemon=True).start()


def encode_corpus(rows, tokenizer: dict, num_proc: int) -> Iterator[Encoded]:
    """The rows (text, end) of a corpus, encoded in num_proc processes with few in memory at a time."""
    from datasets.utils import tqdm
    waiting = deque()
    pool = ProcessPoolExecutor(num_proc, initializer=follow, initargs=(os.getpid(),))
    try:
        with pool, tqdm(total=len(rows), desc='Encoding', unit=' rows') as bar:
            for batch in chain(batches_of(rows), [None] * 4 * num_proc):  # None: no more, but some to take
                waiting.append(batch and pool.submit(encode_rows, *batch, tokenizer))
                if len(waiting) > 4 * num_proc and (first := waiting.popleft()):
                    yield first.result()
                    bar.update(len(first.result()[1]))
    except BrokenProcessPool:
        raise UserError('a process that encodes was killed, for its memory as it seems; take a smaller '
                        '--num-proc')


def hold_out(lengths: np.ndarray, ends: np.ndarray, seed: int, documents: float, tokens: float) -> np.ndarray:
    """How many tokens at the end of each row are held out for validation, so that both shares are reached.

    Whole documents in a seeded random order; where the last is far too large (a lone book), only its end.
    """
    document = np.cumsum(ends) - ends  # of each row
    sizes = np.bincount(document, weights=lengths).astype(np.int64)  # of each document
    order = np.random.default_rng(seed).permutation(len(sizes))
    so_far = np.cumsum(sizes[order])
    target = max(1, round(tokens * so_far[-1]))
    n = max(math.ceil(documents * len(sizes)), int(np.searchsorted(so_far, target)) + 1)
    held = np.zeros(len(sizes), dtype=np.int64)
    held[order[:n]] = sizes[order[:n]]
    if n == len(sizes) or (tokens and so_far[n - 1] > 2 * target):
        held[order[n - 1]] = max(1, target - (so_far[n - 1] - sizes[order[n - 1]]))
    behind = np.cumsum(sizes)[document] - np.cumsum(lengths)  # tokens of the document that come after a row
    return np.clip(held[document] - behind, 0, lengths)


def split_rows(ids: np.ndarray, lengths: np.ndarray, held: np.ndarray, eot: int) -> list[np.ndarray]:
    """The ids of rows as [training, held-out] ids; a document cut in two gets an end-of-text at the cut."""
    place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each id in its row
    out = place >= np.repeat(lengths - held, lengths)
    cuts = np.flatnonzero(~out[:-1] & out[1:] & (ids[:-1] != eot)) + 1
    return [np.insert(ids, cuts, eot)[~np.insert(out, cuts, False)], ids[out]]


def write_bins(folder: Path, parts: Iterator[list[np.ndarray]]) -> dict:
    """Append pairs [training, held-out] ids to train.bin and val.bin; their counts and checksums."""
    facts = {'tokens': {'train': 0, 'val': 0}, 'sha256': {'train': hashlib.sha256(), 'val': hashlib.sha256()}}
    with open(folder / 'train.bin', 'wb') as train, open(folder / 'val.bin', 'wb') as val:
        for part in parts:
            for name, file, ids in zip(('train', 'val'), (train, val), part):
                data = ids.astype(ids.dtype.newbyteorder('<')).tobytes()
                file.write(data)
                facts['sha256'][name].update(data)
                facts['tokens'][name] += len(ids)
    return {**facts, 'sha256': {name: digest.hexdigest() for name, digest in facts['sha256'].items()}}


def write_corpus(folder: Path, args: argparse.Namespace) -> dict:
    """Bins of text files; facts for meta.json.

    OpenWebText holds out 0.0005 of its documents, as published; any other corpus about 1% of its tokens too.
    """
    from datasets.utils import tqdm
    eot, cache = load_tokenizer(GPT2).eot_token, folder / 'cache'
    files = args.text or openwebtext_files(args.subsets)
    rows, facts, dtype = read_corpus(files, cache, args.num_proc), [], token_dtype(eot + 1)
    with open(cache / 'ids', 'wb') as file:  # in the order of the text, until it is known which are held out
        for ids, *fact in encode_corpus(rows, GPT2, args.num_proc):
            ids.tofile(file)
            facts.append(fact)
    if not sum(lengths.sum() for lengths, _ in facts):
        raise UserError(f'{", ".join(files)}: there is no text in it')
    lengths, ends = (np.concatenate(column) for column in zip(*facts))
    held, val = np.zeros_like(lengths), ()
    if args.val:
        val_rows = read_corpus(args.val, cache / 'val', args.num_proc)
        val = encode_corpus(val_rows, GPT2, args.num_proc)
    else:
        held = hold_out(lengths, ends, args.seed, 0.0005, 0.0 if args.name == 'openwebtext' else 0.01)

    def parts() -> Iterator[list[np.ndarray]]:
        """[training, held-out] ids of some rows at a time."""
        with open(cache / 'ids', 'rb') as file, tqdm(total=len(lengths), desc='Writing', unit=' rows') as bar:
            for i in range(0, len(lengths), 200):
                n = lengths[i:i + 200]
                yield split_rows(np.fromfile(file, dtype, n.sum()), n, held[i:i + 200], eot)
                bar.update(len(n))
        for ids, _, _ in val:
            yield [ids[:0], ids]

    documents = int(np.count_nonzero(ends & (lengths > 0)))  # an empty one has no tokens
    return {'tokenizer': GPT2, 'documents': documents, **write_bins(folder, parts())}


def write_toy(folder: Path, seed: int, n_train: int = 60_000, n_val: int = 4_000) -> dict:
    """Bins of the toy world; facts for meta.json, among them its own entropy, which no model can beat."""
    stories = toy_stories(seed, n_train + n_val)
    tokenizer = toy_tokenizer([text for text, _ in stories])
    encoding = load_tokenizer(tokenizer)
    rows = [encoding.encode_ordinary(text) + [encoding.eot_token] for text, _ in stories]
    rows = rows[:n_train], rows[n_train:]
    parts = [np.fromiter(chain.from_iterable(part), dtype='uint16') for part in rows]
    nats = [surprisal for _, surprisal in stories]
    return {'tokenizer': tokenizer, 'documents': len(stories),
            'entropy_per_token': sum(nats) / sum(map(len, parts)),
            'val_entropy_per_token': sum(nats[n_train:]) / len(parts[1]),
            'entropy_note': 'nats, whole stories with their end-of-text; exact, each has one derivation',
            **write_bins(folder, iter([parts]))}


# -----------------------------------------------------------------------------
# The command line.


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(
        prog='prepare.py', description='Write data/NAME/train.bin, val.bin and meta.json.',
        usage='prepare.py NAME [--text FILE ...] [--val FILE ...] [--subsets N] [--num-proc N] [--seed S] '
              '[--overwrite]\n       prepare.py NAME --check')
    add = parser.add_argument
    add('name', metavar='NAME', help='toy, openwebtext, or a name for the files of --text')
    add('--text', nargs='+', action='extend', metavar='FILE', default=[],
        help='.jsonl (field "text"), .parquet (column "text"), .tar of .txt, or text (one document a file)')
    add('--val', nargs='+', action='extend', metavar='FILE', default=[],
        help='files to validate on (default: documents with about 1%% of the tokens are held out)')
    add('--subsets', type=int, metavar='N', help='only the first N of the 21 archives of openwebtext')
    add('--num-proc', type=int, metavar='N', default=os.cpu_count(), help='processes (default: all cores)')
    add('--seed', type=int, metavar='S', default=0, help='of the toy world and of the split')
    add('--overwrite', action='store_true', help='replace data/NAME')
    add('--check', action='store_true', help='make nothing; compare the bins with their checksums')
    args = parser.parse_args(argv)
    if not re.fullmatch(r'\w[\w.-]*', args.name):
        parser.error(f'NAME is {args.name!r}; it takes letters, digits, _, - and .')
    if args.name == 'toy' and (args.text or args.val):
        parser.error('toy makes its own text; give your files another NAME')
    if args.check:
        return args
    if args.name not in ('toy', 'openwebtext') and not args.text:
        parser.error(f'NAME is {args.name!r}; without --text FILE it can be toy or openwebtext')
    if args.subsets is not None and (args.name != 'openwebtext' or args.text or not 1 <= args.subsets <= 21):
        parser.error('--subsets takes 1 to 21, and goes with openwebtext alone')
    if args.num_proc < 1 or args.seed < 0:
        parser.error(f'--num-proc is {args.num_proc} and --seed {args.seed}; they take at least 1 and 0')
    for path in args.text + args.val:
        if not os.path.isfile(path):
            parser.error(f'{path} is not a file')
    return args


def command_of(args: argparse.Namespace) -> dict:
    """What the bins depend on: the same command on the same files makes the same."""
    files = [[os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns] for f in args.text + args.val]
    rest = {'val': len(args.val), 'subsets': args.subsets, 'seed': args.seed}
    return {'name': args.name, 'files': files, **rest}


def is_made_by(folder: Path, args: argparse.Namespace) -> bool:
    """Whether a folder is complete and was made by this command."""
    try:
        meta = read_meta(folder)
        for name in ('train', 'val'):
            open_bin(folder, name, meta)
        return meta.get('command') == command_of(args)
    except UserError:
        return False


def is_there(folder: Path, args: argparse.Namespace) -> bool:
    """Whether a folder is what this command would make, and may stay; UserError where it is another."""
    if not os.path.lexists(folder) or args.overwrite:
        return False
    if not is_made_by(folder, args):
        raise UserError(f'{folder} exists and was made otherwise; add --overwrite, or take another NAME')
    print(f'{folder} is complete, by its sizes, and was made by this command; --check compares checksums, '
          '--overwrite makes it again')
    return True


def unfinished_folder(name: str) -> Path:
    """A new folder in data/ to make NAME in. Those of processes that were killed on this machine go away."""
    prefix = f'.{name}.partial-{socket.gethostname()}-'
    for left in Path('data').glob('.*'):
        owner = re.fullmatch(re.escape(prefix) + r'(\d+)-\w+', left.name)
        if owner and not is_alive(int(owner[1])):
            clear_away(left, Path('data') / name)
    folder = Path('data', f'{prefix}{os.getpid()}-{secrets.token_hex(4)}')
    folder.mkdir(parents=True)
    return folder


def clear_away(partial: Path, folder: Path) -> None:
    """Remove an unfinished folder. What it was about to replace comes back if nothing has taken its place."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            (partial / 'replaced').rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # data/, if nothing else is in it


def prepare(args: argparse.Namespace) -> None:
    """Make data/NAME in a folder of its own, which gets that name when complete and goes away when not."""
    folder = Path('data') / args.name
    if is_there(folder, args):
        return
    partial = unfinished_folder(args.name)
    try:
        facts = write_toy(partial, args.seed) if args.name == 'toy' else write_corpus(partial, args)
        for name, n in facts['tokens'].items():
            if not n:
                raise UserError(f'there is no text for {name}.bin in {", ".join(args.text + args.val)}')
        shutil.rmtree(partial / 'cache', ignore_errors=True)
        facts['vocab_size'] = load_tokenizer(facts['tokenizer']).n_vocab
        facts |= {'dtype': token_dtype(facts['vocab_size']), 'command': command_of(args)}
        (partial / 'meta.json').write_text(json.dumps(facts, indent=1), encoding='utf-8')
        for name in ('train.bin', 'val.bin', 'meta.json', '.'):
            sync(partial / name)  # all of it is on the disk before it has its name
        if is_there(folder, args):  # another process has made it meanwhile
            return
        if args.overwrite and os.path.lexists(folder):
            folder.rename(partial / 'replaced')
        partial.rename(folder)
        sync(folder.parent)
        shutil.rmtree(folder / 'replaced', ignore_errors=True)
    finally:
        clear_away(partial, folder)
    try:
        report(folder, facts, whole_web=args.name == 'openwebtext' and not args.subsets and not args.text)
        print(end='', flush=True)
    except OSError:  # nobody reads it, but all is done
        drop_unwritable_output()


def report(folder: Path, facts: dict, whole_web: bool) -> None:
    """Print what was made."""
    n = facts['tokens']
    print(f'{folder}: {facts["documents"]:,} documents, {n["train"]:,} tokens to train on and {n["val"]:,} '
          f'held out, {facts["vocab_size"]:,} words')
    if 'entropy_per_token' in facts:
        print(f'The entropy of this world is {facts["entropy_per_token"]:.4f} nats per token.')
    if whole_web and (facts['documents'], n['train'] + n['val']) != (8_013_769, 9_040_017_095):
        print('The known OpenWebText has 8,013,769 documents and 9,040,017,095 tokens: this is another.')


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        verify(Path('data') / args.name) if args.check else prepare(args)
    except UserError as error:
        fail('prepare.py', str(error))
    except OSError as error:
        fail('prepare.py', f'stopped, data/{args.name} is as it was: {error}', 1)


FIRST, INTERRUPTED = os.getpid(), []


def stop(signum: int, frame) -> None:
    """On Ctrl-C the processes that read and encode go on until the first one, which cleans up, ends them."""
    if os.getpid() == FIRST:
        INTERRUPTED.append(signum)
        raise KeyboardInterrupt


if __name__ == '__main__':
    signal.signal(signal.SIGINT, stop)
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')
    try:
        main(sys.argv[1:])
    except BaseException:
        if not INTERRUPTED:
            raise
        sys.exit(130)  # whatever the interruption became on its way through datasets
