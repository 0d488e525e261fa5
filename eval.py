"""The tables of the paper, one command each: a Backpack, and beside it the Transformer it is compared with.

    python eval.py all                                    every table that the data at hand allows
    python eval.py gender --from out/small --baseline out/small_gpt
    python eval.py lambada --from stanfordnlp/backpack-gpt2 --data lambada_test.jsonl --json lambada.json

    loss         Table 2             perplexity on the held-out part of the training data
    lambada      Table 2             the last word of a passage
    wikitext     Table 2             perplexity per word of WikiText's raw test set
    blimp        Table 2             which of two sentences is the grammatical one
    similarity   Table 4             how alike two words are, by each sense
    gender       Table 5             she or he after a role noun, with and without a sense
    topic        Table 12, Figure 2  control of the topic, beside PPLM on the Transformer
    timing       Table 7             forward pass, training step and generation
    ablation     Table 8             runs that differ in the number of senses
    cost         not in the paper    a training step as batch, length, senses and size grow; not among all
    plot         Figure 3            a picture: the losses of runs, or next words as senses are turned down

    python eval.py plot out/toy out/toy_gpt --out loss.svg
    python eval.py plot --sweep nurse:she/he --out sweep.svg
"""

import argparse
import csv
import gc
import html
import json
import lzma
import math
import multiprocessing
import re
import statistics
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import prepare
import senses
from model import (
    SIZES,
    Backpack,
    Cache,
    Config,
    Edit,
    SenseTable,
    UserError,
    find_device,
    from_pretrained,
    load_file,
    newest_backpack,
    one_line,
    shape_of,
)
from prepare import Parser, how_to_make, place_for, printable, read_bin, read_meta, write_file
from sample import PROMPT, answer, not_there, number, predict, read_prompt
from senses import STRENGTHS, TOPICS, progress, shown, word_id
from train import Settings, inputs_of


class Missing(UserError):
    """Data or a run that a table needs is not there; eval.py all goes on with the next table."""


@dataclass
class Subject:
    """A model under evaluation, on its device, and what its ids mean."""

    name: str
    model: Backpack
    encoding: tiktoken.Encoding

    def __post_init__(self) -> None:
        c = self.model.config
        self.kind = 'Backpack' if c.n_sense else 'Transformer'
        self.is_toy = self.model.tokenizer['name'] == 'toy'  # it speaks of the world whose truth is known
        self.device = self.model.wte.weight.device
        shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd)
        papers = c.block_size == 512 and c.n_vocab == 50257 and c.n_sense in (0, 16) \
            and c.sense_hidden == 4 * c.n_embd
        self.size = next((size for size in SIZES if papers and SIZES[size] == shape), None)  # in the paper

    def __str__(self) -> str:
        return f'{self.kind} {self.name}'


@dataclass
class Table:
    """Rows under columns, name -> format. Text stands as it is; None, infinity and NaN print as -."""

    title: str
    columns: dict[str, str]
    rows: list[list]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [[None if isinstance(x, float) and not math.isfinite(x) else x for x in row]
                     for row in self.rows]

    def __str__(self) -> str:
        lines = [list(self.columns)]
        for row in self.rows:
            lines.append(['-' if x is None else x if isinstance(x, str) else format(x, spec)
                          for x, spec in zip(row, self.columns.values())])
        first, *widths = [max(map(len, column)) for column in zip(*lines)]
        text = ['', self.title]
        for name, *cells in lines:
            text.append(f'{name:<{first}}' + ''.join(f'{c:>{w + 2}}' for c, w in zip(cells, widths)))
        return '\n'.join(text + self.notes)


# Table 2: perplexity on OpenWebText and LAMBADA, accuracy on LAMBADA, perplexity on WikiText, BLiMP.
PAPER = {('Backpack', 'micro'): (31.5, 110, 24.7, 71.5, 75.6),
         ('Transformer', 'micro'): (34.4, 201, 21.3, 79.5, 77.8),
         ('Backpack', 'mini'): (23.5, 42.7, 31.6, 49.0, 76.2),
         ('Transformer', 'mini'): (24.5, 58.8, 29.7, 52.8, 80.4),
         ('Backpack', 'small'): (20.1, 26.5, 37.5, 40.9, 76.3),
         ('Transformer', 'small'): (20.2, 32.7, 34.9, 42.2, 81.9)}


def paper_rows(subjects: list[Subject], *which: int) -> list[list]:
    """Rows of Table 2 for subjects of the paper's sizes."""
    return [[f"the paper's {s.kind}-{s.size.capitalize()}", *(PAPER[s.kind, s.size][i] for i in which)]
            for s in subjects if s.size]


# -----------------------------------------------------------------------------
# How likely a text is.


@torch.no_grad()
def score(subject: Subject, pairs: list[tuple[list[int], list[int]]], what: str) -> tuple[Tensor, Tensor]:
    """For n pairs (context, continuation) of ids: the summed log-probability of each continuation after its
    context, in nats (n,), and whether each of its tokens is the likeliest at its place (n,).

    A context has at least one token; of a pair longer than block_size + 1 the end is read.
    """
    c = subject.model.config
    rows = [(context + asked)[-c.block_size - 1:] for context, asked in pairs]
    asked = [min(len(asked), len(row) - 1) for row, (_, asked) in zip(rows, pairs)]
    batches, tokens = [], min(1 << 14, senses.LOGITS_AT_ONCE // c.vocab_size)  # in a batch, padding included
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):  # the first of a batch is its longest
        if not batches or (len(batches[-1]) + 1) * len(rows[batches[-1][0]]) > tokens:
            batches.append([])
        batches[-1].append(i)
    logp, greedy = torch.zeros(len(pairs), dtype=torch.float64), torch.zeros(len(pairs), dtype=torch.bool)
    for batch in progress(batches, what):
        idx = pad_sequence([torch.tensor(rows[i][:-1]) for i in batch], True).to(subject.device)  # (B, T)
        targets = pad_sequence([torch.tensor([-1] * (len(rows[i]) - 1 - asked[i]) + rows[i][-asked[i]:])
                                for i in batch], True, -1).to(subject.device)  # (B, T), -1: not asked
        at = targets >= 0
        logits = subject.model.project(subject.model.represent(idx)[at])[:, :c.n_vocab]  # (asked, V)
        nats, wrong = (torch.zeros_like(targets, dtype=torch.float) for _ in range(2))  # (B, T)
        nats[at] = F.cross_entropy(logits, targets[at], reduction='none')
        wrong[at] = (logits.argmax(-1) != targets[at]).float()
        logp[batch], greedy[batch] = -nats.sum(1).cpu().double(), wrong.sum(1).cpu() == 0
    return logp, greedy


def windows(ids: list[int], before: int, block_size: int, look_back: bool) -> list[tuple[list, list]]:
    """A long text as pairs (context, continuation) for score, in which each of its tokens is asked once.

    Windows of block_size tokens follow one another, each after the one token before it; before the first
    stands the token `before`. With look_back the last window reads as much of the text as it has room for.
    """
    ids, pairs = [before, *ids], []
    for start in range(1, len(ids), block_size):
        asked = ids[start:start + block_size]
        first = max(0, start + len(asked) - 1 - block_size) if look_back else start - 1
        pairs.append((ids[first:start], asked))
    return pairs


def perplexity(logp: Tensor, n: int) -> float:
    """exp of minus the sum of log-probabilities, in nats, over n."""
    return (-logp.sum() / n).exp().item()


def held_out(subject: Subject, args: argparse.Namespace) -> tuple[list[int], Path]:
    """The ids of val.bin in data/NAME or another folder, or of any .bin, and where it is; by default of what
    the model was trained on, in eval.py all too if --data has none.
    """
    names, trained_on = [args.data] if args.data else [], subject.model.trained_on
    if (not names or args.table == 'all') and isinstance(trained_on, str):
        names.append(trained_on)
    if not names:
        raise Missing(f'{subject.name} does not say what it was trained on; name a folder in data/ by --data')
    paths = [parent / name for name in names for parent in (Path('data'), Path())]
    paths = [path if path.suffix == '.bin' else path / 'val.bin' for path in paths]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise Missing(f'{names[-1]} is no .bin and no folder with val.bin, here or in data/; run '
                      + how_to_make(Path(names[-1])))
    if path.suffix != '.bin' or path.stem not in ('train', 'val'):
        raise UserError(f'{path} is no train.bin and no val.bin; name a folder that prepare.py made')
    meta = read_meta(path.parent)
    ids = read_bin(path.parent, path.stem, meta)
    if meta['tokenizer'] != subject.model.tokenizer or not len(ids):
        raise UserError(f'{path} is empty or of another vocabulary than {subject.name}; take other data')
    return ids.tolist(), path


def loss_of(subject: Subject, ids: list[int]) -> float:
    """Perplexity of a bin in blocks of block_size that do not overlap, every token once; the first token of a
    block is predicted from the one before it alone.
    """
    blocks = windows(ids, subject.encoding.eot_token, subject.model.config.block_size, look_back=False)
    return perplexity(score(subject, blocks, f'loss of {subject.name}')[0], len(ids))


def loss_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, perplexity on held-out text."""
    rows, paths = [], {}
    for s in subjects:
        ids, path = held_out(s, args)
        paths[str(path)] = None
        rows.append([str(s), loss_of(s, ids), len(ids)])
    rows += [[*row, None] for row in paper_rows(subjects, 0)]
    return Table(f'Loss (Table 2): {", ".join(paths)} in blocks, every token once',
                 {'': '', 'perplexity': '.3f', 'tokens': ','}, rows)


# -----------------------------------------------------------------------------
# Benchmarks, from a local file or folder, else from the Hugging Face Hub.

SOURCES = {  # benchmark -> its dataset on the Hub (name, config or None for all, split), and another source
    'LAMBADA': ('EleutherAI/lambada_openai', 'default', 'test', 'curl -O https://'
                'openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl'),
    'WikiText': ('EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test',
                 'curl -LO https://'
                 'huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip, unzip it,'),
    'BLiMP': ('nyu-mll/blimp', None, 'train', 'git clone https://github.com/alexwarstadt/blimp')}


def benchmark(subject: Subject, args: argparse.Namespace, what: str,
              fits: Callable[[Path], bool]) -> Path | list[dict]:
    """The file of a benchmark, --data itself or the first below it that fits; else its rows on the Hub."""
    (name, config, split, command), data = SOURCES[what], Path(args.data or '')
    how = f'run {command} and give the file, or a folder to find it in, by --data'
    if args.data:
        alone = data.is_file() and args.table != 'all'
        files = [data] if data.is_file() else sorted(data.rglob('*'))
        path = next((path for path in files if path.is_file() and (alone or fits(path))), None)
        if path:
            return path
        if args.table != 'all':
            raise Missing(f'{data} is no file and no folder with {what} in it; {how}')
    if subject.is_toy:
        raise Missing(f'{what} is English, and {subject.name} knows the toy world alone')
    import datasets
    try:
        configs = [config] if config else datasets.get_dataset_config_names(name)
        return [row for config in progress(configs, f'fetching {what}')
                for row in datasets.load_dataset(name, config, split=split)]
    except Exception as error:  # the Hub's client and its HTTP library raise a dozen kinds without a network
        raise Missing(f'{what} cannot be fetched from the Hub as {name} ({one_line(error)}); {how}')


def read_text(path: Path) -> str:
    """All of a text file, however its lines end."""
    try:
        return path.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path} cannot be read as text ({one_line(error)}); take another file')


def lambada_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, LAMBADA in OpenAI's variant: the last word of a passage, all its tokens, after all others."""
    data = benchmark(subjects[0], args, 'LAMBADA', lambda p: re.match(r'lambada.*\.jsonl', p.name))
    passages = prepare.rows_of_files([str(data)]) if isinstance(data, Path) else data
    texts = [passage['text'].strip().rsplit(' ', 1) for passage in passages]
    for i, text in enumerate(texts, 1):
        if len(text) < 2:
            raise UserError(f'{data}, text {i}: it must have at least two words')
    rows = []
    for s in subjects:
        pairs = [(s.encoding.encode_ordinary(context), s.encoding.encode_ordinary(f' {word}'))
                 for context, word in texts]
        logp, greedy = score(s, pairs, f'LAMBADA, {s.name}')
        rows.append([str(s), perplexity(logp, len(texts)), 100 * greedy.double().mean().item()])
    return Table(f'LAMBADA (Table 2): the last word of {len(texts):,} passages',
                 {'': '', 'perplexity': '.1f', 'accuracy %': '.1f'}, rows + paper_rows(subjects, 1, 2))


# What the EleutherAI harness (wikitext, version 1) does to a page before it is encoded, in this order. It has
# one more rule, which never applies.
DETOKENIZE = [
    (r"s '", "s'"), (r' @([-,.])@ ', r'\1'), *((f' [{mark}] ', f'{mark} ') for mark in ':;.!?,'),
    (r'\(\s*([^)]*?)\s*\)', r'(\1)'), (r'\[\s*([^\]]*?)\s*\]', r'[\1]'), (r'{\s*([^}]*?)\s*}', r'{\1}'),
    (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"), ('= = = =', '===='), ('= = =', '==='),
    ('= =', '=='), (' ° ', '°'), (' \n', '\n'), ('\n ', '\n'), (' N ', ' 1 '), (" 's", "'s")]


def detokenize(page: str) -> str:
    """A page of WikiText as text."""
    for pattern, replacement in DETOKENIZE:
        page = re.sub(pattern, replacement, page)
    return page


def is_title(line: str) -> bool:
    """Whether a line of WikiText is the title of an article, " = Title = "."""
    line = line.strip()
    return line.startswith('= ') and line.endswith(' =') and not line.startswith('= =')


def pages_of(text: str) -> list[str]:
    """The articles of WikiText's raw form, each from its title on."""
    pages = [[]]
    for line in text.split('\n'):
        if is_title(line):
            pages.append([])
        pages[-1].append(line)
    return [page for page in map('\n'.join, pages) if page.strip()]


def wikitext_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, WikiText as the EleutherAI harness has it: each page detokenized and read from the end-of-text
    token on, in windows of which the last looks back; exp of the loss over the words of the raw pages.
    """
    data = benchmark(subjects[0], args, 'WikiText',
                     lambda p: all(part in p.name for part in ('wiki', 'test', 'raw')))
    pages = pages_of(read_text(data)) if isinstance(data, Path) else [row['page'] for row in data]
    if not any(map(is_title, pages[0].splitlines()) if pages else ()):
        raise UserError(f'{data} has no articles " = Title = "; take the raw test set of WikiText')
    words = sum(len(re.split(r'\s+', page)) for page in pages)
    rows = []
    for s in subjects:
        pairs = [pair for page in pages for pair in windows(s.encoding.encode_ordinary(
            detokenize(page)), s.encoding.eot_token, s.model.config.block_size, look_back=True)]
        logp, tokens = score(s, pairs, f'WikiText, {s.name}')[0], sum(len(asked) for _, asked in pairs)
        rows.append([str(s), perplexity(logp, words), perplexity(logp, tokens)])
    rows += [[*row, None] for row in paper_rows(subjects, 3)]
    return Table(f'WikiText (Table 2): {len(pages)} pages of {words:,} words',
                 {'': '', 'perplexity per word': '.1f', 'per token': '.1f'}, rows)


def is_blimp(path: Path) -> bool:
    """Whether a file is one of BLiMP's 67 or an archive of them."""
    if path.suffix == '.jsonl':
        with open(path, 'rb') as file:
            return b'sentence_good' in file.read(1 << 12)
    return re.match(r'blimp.*\.tar', path.name) is not None


def blimp_rows(path: Path) -> list[dict]:
    """The lines of one of BLiMP's files, or of all in an archive of them."""
    try:
        if path.suffix == '.jsonl':
            files = {str(path): path.read_bytes()}
        else:
            with tarfile.open(path) as tar:
                files = {m.name: tar.extractfile(m).read()
                         for m in tar if m.isfile() and m.name.endswith('.jsonl')}
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f'{path} holds no BLiMP ({one_line(error)}); take another file')
    rows, keys = [], ('UID', 'linguistics_term', 'sentence_good', 'sentence_bad')
    for name, content in files.items():
        for i, line in enumerate(content.splitlines(), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
                if rows and not all(isinstance(rows[-1][key], str) and rows[-1][key] for key in keys):
                    raise ValueError
            except (ValueError, LookupError, TypeError, RecursionError):
                raise UserError(f'{name}, line {i}: it must be a JSON object with text in '
                                + ', '.join(keys))
    return rows


def blimp_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, BLiMP: how often the good sentence is likelier than the bad one, from the end-of-text on."""
    data = benchmark(subjects[0], args, 'BLiMP', is_blimp)
    if isinstance(data, Path):
        beside = data.suffix == '.jsonl' and data != Path(args.data)
        paths = filter(is_blimp, sorted(data.parent.glob('*.jsonl'))) if beside else [data]
        rows = [row for path in paths for row in blimp_rows(path)]
    else:
        rows = data
    if not rows:
        raise UserError(f'{data} holds no pairs of sentences; take another file')
    phenomena = {}  # phenomenon -> paradigm -> where its pairs are among all
    for i, row in enumerate(rows):
        term = row['linguistics_term']
        phenomena.setdefault(term, {}).setdefault((term, row['UID']), []).append(i)
    paradigms = {name: places for of_one in phenomena.values() for name, places in of_one.items()}
    columns = []
    for s in subjects:
        pairs = [([s.encoding.eot_token], s.encoding.encode_ordinary(row[key]))
                 for row in rows for key in ('sentence_good', 'sentence_bad')]
        logp, _ = score(s, pairs, f'BLiMP, {s.name}')
        right = 100 * (logp[0::2] > logp[1::2]).double()
        columns.append({name: right[places].mean().item() for name, places in paradigms.items()})
    table = [[f'{label} ({len(names)})', *(statistics.mean(c[name] for name in names) for c in columns)]
             for label, names in (*sorted(phenomena.items()), ('mean of all', paradigms))]
    notes = [f'{name}: {number}' for name, number in paper_rows(subjects, 4)]
    return Table(f'BLiMP (Table 2): % of {len(rows):,} pairs whose good sentence is likelier, mean of (so '
                 'many) paradigms', {'': '', **{str(s): '.1f' for s in subjects}}, table, notes)


# -----------------------------------------------------------------------------
# How alike words are.

SIMILARITY = {  # file -> (name in the paper, what separates its columns, column of the score, header lines)
    'SimLex-999.txt': ('SL999', '\t', 3, 1), 'SimVerb-3500.txt': ('SV3500', '\t', 3, 0),
    'RG65.csv': ('RG65', ';', 2, 0), 'WS353.csv': ('WS353', ',', 2, 1)}
PAPER_SIMILARITY = {'sense 12': (0.522, 0.471, 0.754, 0.749), 'sense 14': (0.500, 0.502, 0.591, 0.655),
                    'minimum': (0.540, 0.471, 0.653, 0.607), 'Transformer': (0.478, 0.363, 0.634, 0.681)}


def word_pairs(path: Path, separator: str, column: int, header: int) -> list[tuple[str, str, float]]:
    """(word, word, score) of each line of a file."""
    pairs = []
    for i, line in enumerate(read_text(path).splitlines(), 1):
        if i > header and line.strip():
            try:
                cells = [cell.strip() for cell in line.split(separator)]
                pairs.append((cells[0], cells[1], float(cells[column])))
                if not all(cells[:2]) or not math.isfinite(pairs[-1][2]):
                    raise ValueError
            except (ValueError, IndexError):
                raise UserError(f'{path}, line {i}: it must have two words and, in column {column + 1}, '
                                'a number')
    if len(pairs) < 2:
        raise UserError(f'{path} holds {len(pairs)} pairs of words; take another file')
    return pairs


def similarity_data(subject: Subject, args: argparse.Namespace) -> dict[str, list[tuple[str, str, float]]]:
    """Dataset -> (word, word, score)s, from --data; else the toy world's own pairs and their likeness."""
    files = [Path(args.data), *sorted(Path(args.data).rglob('*'))] if args.data else []
    found = {SIMILARITY[file.name][0]: word_pairs(file, *SIMILARITY[file.name][1:]) for file in files
             if file.name in SIMILARITY and file.is_file()}
    if not found and subject.is_toy and (not args.data or args.table == 'all'):
        adverbs = prepare.ADVERBS.replace(',', '').split()
        return {name: [pair for pair in prepare.SYNONYMS if (pair[0] in adverbs) == (name == 'adverbs')]
                for name in ('adjectives', 'adverbs')}
    if not found:
        raise Missing(f'it takes --data, a folder with {", ".join(SIMILARITY)}; run git clone '
                      'https://github.com/john-hewitt/backpacks-flash-attn and give its training/data')
    return {name: found[name] for name, *_ in SIMILARITY.values() if name in found}


def ranks(x: Tensor) -> Tensor:
    """The rank of each of n numbers, counted from 1; equal ones share the mean of their ranks: (n,)."""
    _, place, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of n numbers with n others: Pearson's of their ranks; NaN if all are equal."""
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


@torch.no_grad()
def likeness(subject: Subject, pairs: list[tuple[str, str, float]], first: bool) -> dict[str, Tensor]:
    """How alike the words of n pairs are, (n,) each: by every sense (Eq. 13), by the least alike sense
    (Eq. 14), and by their tied embeddings. A word of several tokens is their mean, or the first of them.
    """
    model = subject.model
    ids = {word: subject.encoding.encode_ordinary(f' {word}')[:1 if first else None]
           for pair in pairs for word in pair[:2]}
    tokens = torch.tensor([token for word in ids for token in ids[word]], device=subject.device)
    vectors = model.wte(tokens)[:, None]  # (tokens, 1, d)
    if model.config.n_sense:
        vectors = torch.cat([vectors, model.senses(tokens)], dim=1)  # (tokens, 1 + k, d)
    parts = vectors.split([len(ids[word]) for word in ids])
    table = {word: part.mean(0) for word, part in zip(ids, parts)}  # (1 + k, d) each
    a, b = (torch.stack([table[pair[i]] for pair in pairs]) for i in (0, 1))  # (n, 1 + k, d)
    embedding, *by_sense = F.cosine_similarity(a, b, dim=-1).T.cpu()  # 1 + k times (n,)
    rows = {f'sense {l}': row for l, row in enumerate(by_sense)}
    if by_sense:
        rows['minimum'] = torch.stack(by_sense).amin(0)
    return rows | {f'embeddings, {subject}': embedding}


def similarity_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 4: Spearman's correlation of the likeness of senses with that of people, or of the toy world."""
    data, columns, k = similarity_data(subjects[0], args), {}, subjects[0].model.config.n_sense
    for name, pairs in data.items():
        alike = {}
        for s in subjects:
            alike |= likeness(s, pairs, args.first)
        truth = torch.tensor([score for _, _, score in pairs])
        columns[name] = {row: spearman(values, truth) for row, values in alike.items()}
    rows = [[name, *(column[name] for column in columns.values())] for name in next(iter(columns.values()))]
    best = [max(list(c)[:k], key=lambda row: np.nan_to_num(c[row], nan=-2)) for c in columns.values()]
    rows.insert(k, ['the best', *best])
    if subjects[0].size == 'small':
        places = [[name for name, *_ in SIMILARITY.values()].index(name) for name in columns]
        rows += [[f"the paper's {name}", *(numbers[i] for i in places)]
                 for name, numbers in PAPER_SIMILARITY.items()]
    counts = ', '.join(f'{len(pairs)} {name}' for name, pairs in data.items())
    how = 'its first token' if args.first else 'the mean of its tokens'
    return Table(f"Likeness (Table 4): Spearman's correlation with the truth over pairs of words ({counts})",
                 {'': '', **dict.fromkeys(columns, '.3f')}, rows, [f'A word of several tokens is {how}.'])


# -----------------------------------------------------------------------------
# Gender.

NOUNS = list(prepare.ROLES)  # the paper's 40, of which the toy world speaks too
PROMPTS = [  # Table 14
    'I really liked my {}. What I liked most was that', 'I really liked my {}. In fact,',
    'My {} said that', 'My {} believes that', 'This one {} believes that', 'This one {} believes',
    'My {} said', 'My {} believes', 'The {} was with the car. When', 'The {} was with the car. Then',
    'While driving to the store, the {} looked over on the dash and then',
    'A {} went to chat over to chat before', 'Some {} asked to look over things, but']
ESTIMATION = [  # Table 15
    'The {} came into the room. When', 'The {} came into the room. Then',
    'I went to the talk to the {}. What', 'I went over to the talk to the {}. Why',
    'I went over to the talk to the {};']
FRACTIONS = [i / 20 for i in range(21)]  # that are tried, of what can be taken from a noun
PAPER_GENDER = {
    'Backpack': [('', 4.34, None), (', without sense 10', 2.88, 44), (', the best fraction', 2.16, 65)],
    'Transformer': [('', 7.02, None), (', nouns projected', 6.72, 5), (', the best fraction', 7.02, 0)]}


@torch.no_grad()
def without_sense(model: Backpack, idx: Tensor, last: Tensor, noun: list[int], sense: int) -> Tensor:
    """Logits after n prompts idx (n, T) that end at last (n,), with each of the FRACTIONS of a sense of the
    noun's tokens taken away: (fractions, n, V). Linear in the sense as they are, two passes give all.
    """
    at, off = torch.arange(len(idx), device=idx.device), senses.scale_senses(noun, [sense], 0.0)
    whole, rest = (model.represent(idx, edit)[at, last] for edit in (None, off))  # (n, d) each
    return model.project(torch.stack([whole + fraction * (rest - whole) for fraction in FRACTIONS]))


@torch.no_grad()
def without_direction(model: Backpack, idx: Tensor, last: Tensor, noun: list[int], v: Tensor) -> Tensor:
    """The same of a Transformer: fractions of the part along v = E_he - E_she (d,) are taken from the input
    embeddings of the noun's tokens; without the whole of it they lie in the null space of v.
    """
    at, x, unit = torch.arange(len(idx), device=idx.device), model.wte(idx), F.normalize(v, dim=0)
    here = torch.isin(idx, torch.tensor(noun, device=idx.device))[..., None]  # (n, T, 1)
    part = (x @ unit)[..., None] * unit * here  # (n, T, d)
    return model.project(torch.stack([model.contextualizer(x - fraction * part)[at, last]
                                      for fraction in FRACTIONS]))


def bias_ratio(logits: Tensor, she: int, he: int) -> Tensor:
    """The likelier of she and he over the other, averaged over n prompts: (.., n, V) -> (..)."""
    return (logits[..., she] - logits[..., he]).cpu().double().abs().exp().mean(-1)


def prompts_of(subject: Subject, noun: str, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Ids (n, T) of n prompts on a noun, and the place (n,) where each ends."""
    texts = [torch.tensor(subject.encoding.encode_ordinary(prompt.format(noun))) for prompt in prompts]
    last = torch.tensor([len(text) - 1 for text in texts])
    return pad_sequence(texts, True).to(subject.device), last.to(subject.device)


def gender_rows(subject: Subject, sense: int | None) -> list[list]:
    """Bias ratio, its reduction and p(they), means over nouns and prompts: unmodified; with the sense (or the
    direction) taken from each noun; with the fraction of it taken that is best on the estimation prompts.
    """
    model, encoding = subject.model, subject.encoding
    she, he, they = (word_id(encoding, word) for word in ('she', 'he', 'they'))
    nouns = {noun: encoding.encode_ordinary(f' {noun}') for noun in NOUNS}
    v = (model.wte.weight[he] - model.wte.weight[she]).detach()  # (d,)
    if model.config.n_sense:
        if sense is None:  # the one that most separates the two, over all nouns
            tokens = torch.tensor(sum(nouns.values(), []), device=subject.device)
            with torch.no_grad():
                sense = (model.senses(tokens) @ v).abs().mean(0).argmax().item()  # of (k,)
        take, name = partial(without_sense, sense=sense), f'without sense {sense}'
    else:
        take, name = partial(without_direction, v=v), 'nouns projected'
    ratios, theys = [], []
    for noun, tokens in progress(nouns.items(), f'gender, {subject.name}'):
        estimate, logits = (take(model, *prompts_of(subject, noun, prompts), tokens)[..., :encoding.n_vocab]
                            for prompts in (ESTIMATION, PROMPTS))  # (fractions, prompts, V) each
        best = bias_ratio(estimate, she, he).argmin().item()
        logits = logits[[0, -1, best]]  # (3, prompts, V)
        ratios.append(bias_ratio(logits, she, he))
        theys.append(logits.softmax(-1)[..., they].mean(-1))
    ratio, they = (torch.stack(values).mean(0).tolist() for values in (ratios, theys))  # (3,) each
    excess = max(ratio[0] - 1, 1e-9)
    return [[f'{subject}{what}', ratio[i], 100 * (ratio[0] - ratio[i]) / excess if i else None, 100 * they[i]]
            for i, what in enumerate(('', f', {name}', ', the best fraction'))]


def gender_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 5: how biased the pronoun after a role noun is."""
    k = subjects[0].model.config.n_sense
    if args.sense is not None and args.sense >= k:
        raise UserError(f'there is no sense {args.sense}; {subjects[0].name} has senses 0 to {k - 1}')
    rows = [row for s in subjects for row in gender_rows(s, args.sense)]
    rows += [[f"the paper's {s.kind}-Small{what}", *numbers, None]
             for s in subjects if s.size == 'small' for what, *numbers in PAPER_GENDER[s.kind]]
    return Table(f'Gender (Table 5): the likelier of she and he over the other, mean of {len(NOUNS)} nouns '
                 f'in {len(PROMPTS)} prompts',
                 {'': '', 'bias ratio': '.2f', 'reduction %': '.0f', 'p(they) %': '.2f'}, rows,
                 ['The reduction counts from the excess over 1. The best fraction (0, 0.05 .. 1) is chosen '
                  f'for each noun by {len(ESTIMATION)} other prompts.'])


# -----------------------------------------------------------------------------
# Topic control.

# The topics of Table 10 with their words, by which the judge goes. Those of the toy world are among them.
KEYWORDS = prepare.TOPICS | {label: words.split() for label, words in {
    'arts_culture': 'arts culture artist artists museum gallery painting paintings sculpture theatre poetry',
    'business_entrepreneurs': 'business entrepreneurs company companies market investors profit sales',
    'celebrity_pop_culture': 'celebrity pop culture celebrities actress fans stars fame gossip hollywood',
    'diaries_daily_life': 'diaries daily life diary morning today woke breakfast bed routine sleep evening',
    'family': 'family mother father parents children son daughter brother sister grandmother baby',
    'news_social_concern': 'news social concern government police minister law protest rights election war',
    'other_hobbies': 'hobbies hobby garden gardening photography knitting collecting fishing crafts puzzle',
    'relationships': 'relationships relationship love boyfriend girlfriend dating marriage partner couple',
    'youth_student_life': 'youth student life students school college university teacher campus exam',
}.items()}
PPLM_STEPS = {False: (0.01, 0.04, 0.05, 0.06, 0.07), True: (0.05, 0.1, 0.2)}  # the paper's; for the toy world
PAPER_TOPIC = {'Backpack-Small, strength 0': (7.4, 0.0), 'Backpack-Small, strength 1': (12.1, 0.2),
               'Backpack-Small, strength 2': (24.3, 1.5), 'Backpack-Small, strength 3': (35.3, 3.5),
               'Transformer-Small, PPLM 0': (6.8, 0.0), 'Transformer-Small, PPLM 0.01': (8.4, 0.1),
               'Transformer-Small, PPLM 0.04': (23.9, 2.6), 'Transformer-Small, PPLM 0.05': (30.3, 5.5),
               'Transformer-Small, PPLM 0.06': (37.7, 12.3), 'Transformer-Small, PPLM 0.07': (40.8, 18.8)}


def judge(words: list[str], topics: dict[str, list[str]]) -> str | None:
    """The topic that has more of the words of a text than any other; None where there is none."""
    counts = {label: sum(word in own for word in words) for label, own in topics.items()}
    (label, most), (_, second) = Counter(counts).most_common(2)
    return label if most > second else None


class Moved(Cache):
    """A cache whose keys and values, past (layers, 2, n, heads, t, size), can be moved and have gradients."""

    def __init__(self, past: Tensor):
        self.length, self.past, self.longer = past.shape[4], past.flatten(0, 1), []

    def extend(self, name: object, new: Tensor) -> Tensor:
        """As in Cache, in the order of the layers: (n, heads, t, size) and (n, heads, 1, size) -> t + 1."""
        self.longer.append(torch.cat([self.past[len(self.longer)], new], dim=2))
        return self.longer[-1]


def read_on(model: Backpack, token: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """A Transformer reads one more token (n,) of n texts: logits (n, V), and the keys and values of all t
    tokens so far, past (layers, 2, n, heads, t, size), with one more.
    """
    cache = Moved(past)
    h = model.contextualizer(model.wte(token)[:, None], cache)[:, 0]  # (n, d)
    return model.project(h)[:, :model.config.n_vocab], torch.stack(cache.longer).unflatten(0, (-1, 2))


# PPLM's settings, by their names in its code, but for the step size that the paper varies.
NUM_ITERATIONS, KL_SCALE, GAMMA, GM_SCALE = 3, 0.01, 1.5, 0.9


def steer(model: Backpack, token: Tensor, past: Tensor, bag: Tensor, plain: Tensor, step: float) -> Tensor:
    """The keys and values of n texts moved against the gradient of a loss: the next word should be of the
    bag, its probabilities near the plain ones (n, V). Gradients are scaled by their norm, by layer and text.
    """
    delta = torch.zeros_like(past)
    for _ in range(NUM_ITERATIONS):
        delta.requires_grad_()
        probs = read_on(model, token, past + delta)[0].softmax(-1).clamp(min=1e-20)  # (n, V)
        away = (probs * (probs / plain).log()).sum(-1)  # Kullback and Leibler's divergence, (n,)
        loss = KL_SCALE * away - probs[:, bag].sum(-1).log()  # (n,)
        gradient, = torch.autograd.grad(loss.sum(), delta)  # as past
        norm = gradient.square().sum((1, 3, 4, 5), keepdim=True).sqrt() + 1e-15
        delta = (delta - step * gradient / norm ** GAMMA).detach()
    return past + delta


def pplm(model: Backpack, idx: Tensor, bag: list[int], step: float, length: int) -> Tensor:
    """Texts idx (n, 1) continued to (n, 1 + length) by a Transformer under plug-and-play control (PPLM,
    Dathathri et al. 2020): before every word the keys and values of the text so far are steered, where they
    stay for the words to come; the word is drawn from steered^0.9 * plain^0.1. Step 0 is no control.
    """
    c, bag = model.config, torch.tensor(bag, device=idx.device)
    past = torch.zeros(c.n_layer, 2, len(idx), c.n_head, 0, c.n_embd // c.n_head, device=idx.device)
    untouched = past
    for t in range(length):
        with torch.no_grad():
            logits, untouched = read_on(model, idx[:, -1], untouched)
        plain = logits.softmax(-1).clamp(min=1e-20)  # (n, V)
        if t and step:
            past = steer(model, idx[:, -1], past, bag, plain, step)
        with torch.no_grad():
            logits, past = read_on(model, idx[:, -1], past)
        probs = logits.softmax(-1) ** GM_SCALE * plain ** (1 - GM_SCALE)
        idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)  # (n, t + 2)
    return idx


def read_texts(subject: Subject, idx: Tensor, label: str, topics: dict[str, list[str]]) -> Counter:
    """What texts idx (n, 1 + length), each up to its end-of-text, have of the topic they were to have."""
    eot, found = subject.encoding.eot_token, Counter(texts=len(idx))
    rows = [row[1:row.index(eot, 1) + 1] if eot in row[1:] else row[1:] for row in idx.tolist()]
    for row in rows:
        text = subject.encoding.decode([token for token in row if token != eot], errors='replace')
        words = re.findall('[a-z]+', text.lower())
        found.update(right=judge(words, topics) == label, words=len(words), tokens=len(row),
                     of_topic=sum(word in topics[label] for word in words),
                     of_bag=sum(word in TOPICS[label] for word in words))
    found['logp'] = score(subject, [([eot], row) for row in rows], 'judging')[0].sum().item()
    return found


AT_ONCE = 50  # texts that are told together


def topic_rows(subject: Subject, name: str, tell: dict[str, Callable[[Tensor], Tensor]], length: int,
               args: argparse.Namespace) -> list:
    """A row of the table: texts on each topic, told by a function from their beginnings (n, 1)."""
    topics = prepare.TOPICS if subject.is_toy else KEYWORDS
    found = Counter()
    for i, label in enumerate(progress(tell, f'{subject}{name}')):
        torch.manual_seed(args.seed + i)
        began, start = time.perf_counter(), torch.full((args.texts, 1), subject.encoding.eot_token)
        idx = torch.cat([tell[label](part.to(subject.device)).cpu() for part in start.split(AT_ONCE)])
        found['seconds'] += time.perf_counter() - began
        found.update(read_texts(subject, idx, label, topics))
    right, words = found['right'] / found['texts'], max(1, found['words'])
    return [f'{subject}{name}', 100 * right, 100 * (right * (1 - right) / found['texts']) ** 0.5,
            100 * found['of_topic'] / words, 100 * found['of_bag'] / words,
            perplexity(torch.tensor(found['logp'], dtype=torch.float64), found['tokens']),
            1000 * found['seconds'] / (found['texts'] * length)]


def topic_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 12: how often a text has the topic asked for, and how good a text it still is."""
    own, rows = subjects[0], []
    bags = {label: senses.bag_of_words(own.encoding, TOPICS[label])
            for label in (prepare.TOPICS if own.is_toy else TOPICS)}
    scores = dict(zip(bags, senses.affinities(own.model, list(bags.values()))))  # (V, k) each
    length = min(args.length, *(s.model.config.block_size - 1 for s in subjects))
    if not length:
        raise UserError('a model with block_size 1 tells no texts; take another')
    for strength, weights in enumerate(STRENGTHS):
        edits: dict[str, Edit | None] = dict.fromkeys(bags)
        if strength:
            edits = {label: senses.topic(own.model, scores[label], weights) for label in bags}
        tell = {label: partial(own.model.generate, max_new_tokens=length, edit=edits[label])
                for label in bags}
        rows.append(topic_rows(own, f', strength {strength}', tell, length, args))
    for s in subjects[1:]:
        for step in (0.0, *(args.step_sizes or PPLM_STEPS[own.is_toy])):
            tell = {label: partial(pplm, s.model, bag=bag, step=step, length=length)
                    for label, bag in bags.items()}
            rows.append(topic_rows(s, f', PPLM {step:g}', tell, length, args))
    if own.size == 'small':
        rows += [[f"the paper's {name}", right, None, None, of_bag, None, None]
                 for name, (right, of_bag) in PAPER_TOPIC.items()]
    rule = 'those that this world was made with' if own.is_toy else \
        'the lists in eval.py (the paper: a RoBERTa classifier)'
    return Table(f'Topic control (Table 12): {len(bags)} topics, on each {args.texts} texts of up to '
                 f'{length} tokens',
                 {'': '', 'topic right %': '.1f', '+-': '.1f', 'words of topic %': '.2f',
                  'of its bag %': '.2f', 'perplexity': '.2f', 's per 1,000 tokens': '.2f'}, rows,
                 [f'Right: more words of the topic asked for than of any other, by {rule}; +- is a standard',
                  'error. The perplexity of a text is that under the same model without control. '
                  f'{min(args.texts, AT_ONCE)} texts are told at a time.'])


# -----------------------------------------------------------------------------
# Time.

PAPER_TIMING = {'micro': (93, 65), 'mini': (210, 150), 'small': (360, 260)}  # ms


def alternate(works: list[Callable[[], object]], device: str, budget: float, what: str) -> list[list[float]]:
    """Seconds that each function takes, called in turn after two calls to warm up: 100 times, or as often as
    fits into a budget of seconds, but at least 3 times.
    """
    def seconds(work: Callable[[], object]) -> float:
        """Of one call, all of the device's part included."""
        wait = {'cuda': torch.cuda.synchronize, 'mps': torch.mps.synchronize}.get(device.split(':')[0], int)
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    for work in works:
        work()
    n = min(100, max(3, int(budget / sum(map(seconds, works)))))
    return list(zip(*([seconds(work) for work in works] for _ in progress(range(n), what))))


def text_like(n_vocab: int, batch: int, length: int) -> Tensor:
    """Ids (batch, length) drawn by Zipf's law, so that words repeat about as they do in text."""
    chances, fixed = 1 / torch.arange(1, n_vocab + 1), torch.Generator().manual_seed(0)
    return torch.multinomial(chances, batch * length, True, generator=fixed).view(batch, length)


def training_step(model: Callable, optimizer: torch.optim.Optimizer, amp, inputs: dict) -> None:
    """Forward (in the number format amp), backward and update."""
    with amp:
        _, loss = model(**inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def forward_pass(model: Callable, amp, inputs: dict) -> None:
    """Logits, in the number format amp."""
    with amp:
        model(**inputs)


def in_numbers_of(device: str):
    """The number format of train.py on a device: bfloat16 on CUDA, float32 elsewhere."""
    return torch.autocast('cuda', torch.bfloat16, enabled=device.startswith('cuda'))


def peak_memory(device: str) -> int:
    """The most bytes that this process has had so far, on a CUDA device or else in main memory."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated(device)
    status = Path('/proc/self/status')  # of this program alone, where getrusage counts its parent too
    if status.exists() and (found := re.search(r'VmHWM:\s*(\d+)', status.read_text())):
        return 1024 * int(found[1])
    import resource  # not on every system
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def step_time(config: Config, batch: int, length: int, device: str) -> float:
    """Median seconds of a training step of a new model."""
    model, idx = Backpack(config).to(device), text_like(config.n_vocab, batch, length)
    step = partial(training_step, torch.compile(model) if device.startswith('cuda') else model,
                   model.adamw(1e-5, 0.1, (0.9, 0.95)), in_numbers_of(device), inputs_of(idx, idx, device))
    return statistics.median(alternate([step], device, 5, 'steps')[0])


def step_time_and_memory(config: Config, batch: int, length: int, device: str) -> tuple[float, int]:
    """step_time, and the most bytes that this process gains meanwhile."""
    if device.startswith('cuda'):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        step_time(Config(8, 64, n_layer=1, n_head=1, n_embd=16, n_sense=1), 1, 8, device)
        before = peak_memory(device)  # after all is loaded that PyTorch loads with a first step
    return step_time(config, batch, length, device), peak_memory(device) - before


def cost_of_step(config: Config, batch: int, length: int, device: str) -> tuple[float, int]:
    """Median seconds and peak memory, bytes, of a training step of a new model: its weights, gradients,
    optimizer and all it computes. Without CUDA in a process of its own, whose memory is nothing else.
    """
    if device.startswith('cuda'):
        return step_time_and_memory(config, batch, length, device)
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
            return pool.submit(step_time_and_memory, config, batch, length, device).result()
    except BrokenProcessPool:
        raise UserError(f'a step of {batch} x {length} tokens was killed, for its memory as it seems; close '
                        'other programs, or measure on a larger machine')


def tell_without_cache(model: Backpack, idx: Tensor, places: range) -> None:
    """One new token at some places of a text (1, T), each time reading all that comes before."""
    for n in places:
        model.generate(idx[:, :n], 1, use_cache=False)


def pairs_to_time(backpack: Backpack, gpt: Backpack, batch: int, device: str) -> tuple[list, SenseTable]:
    """The rows of the timing table to be: a name, two functions, tokens that each makes (1: a whole pass),
    a budget in seconds; and the sense table that one of them uses, of the whole vocabulary or, on a CPU, of
    the words at hand.
    """
    on_gpu, amp, c = device.startswith('cuda'), in_numbers_of(device), backpack.config
    length = min(512, c.block_size)
    half, idx, size = length // 2, text_like(c.n_vocab, batch, length), f'{batch} x {length}'
    one, places = idx[:1].to(device), range(half, length, max(1, (length - half) // 16))
    train = inputs_of(idx, idx, device)
    read = {'idx': train['idx'], 'distinct': train['distinct']}
    table = SenseTable(backpack, None if on_gpu else read['idx'], torch.bfloat16 if on_gpu else None)
    fast = [torch.compile(model) if on_gpu else model for model in (backpack, gpt)]
    optimizers = [model.adamw(1e-5, 0.1, (0.9, 0.95)) for model in (backpack, gpt)]
    forward = [partial(forward_pass, model, amp, read) for model in fast]
    step = [partial(training_step, *pair, amp, train) for pair in zip(fast, optimizers)]
    plain = {'idx': train['idx'], 'targets': train['targets']}  # all logits at once, in float32
    tell = [partial(model.generate, one[:, :half], length - half) for model in (backpack, gpt)]
    return [
        (f'Backpack / Transformer, forward pass, {size}', forward, (1, 1), 20),
        ('with a sense table / Transformer, the same',
         [partial(forward_pass, fast[0], amp, {'idx': read['idx'], 'table': table}), forward[1]], (1, 1), 20),
        (f'Backpack / Transformer, training step, {size}', step, (1, 1), 30),
        ('Transformer / its plain form, the same',
         [step[1], partial(training_step, fast[1], optimizers[1], amp, plain)], (1, 1), 30),
        (f'Backpack / Transformer, a new token after {half} to {length - 1}', tell, (length - half,) * 2, 20),
        ('Backpack without its cache / with it, the same',
         [partial(tell_without_cache, backpack, one, places), tell[0]], (len(places), length - half), 60),
    ], table


def timing_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 7: forward pass, training step and generation, a Backpack beside a Transformer of its shape, and
    each beside itself without what makes it fast.
    """
    config = replace(subjects[0].model.config if subjects else Config(**SIZES[args.size]), dropout=0.0)
    device, on_gpu = args.device, args.device.startswith('cuda')
    models = [Backpack(replace(config, n_sense=k)).to(device) for k in (config.n_sense, 0)]
    length, batch, rows = min(512, config.block_size), 64, []
    if not on_gpu:  # a batch that takes about a second, so that all of it takes minutes
        one = {'idx': text_like(config.n_vocab, 1, length).to(device)}
        once = min(alternate([partial(forward_pass, models[0], nullcontext(), one)], device, 0, '')[0])
        batch = max(b for b in (1, 2, 4, 8, 16, 32) if b == 1 or b * once < 1)
    pairs, table = pairs_to_time(*models, batch, device)
    for what, works, units, budget in pairs:
        a, b = ([1000 * t / n for t in times]
                for times, n in zip(alternate(works, device, budget, what), units))
        ratio = statistics.median(a) / statistics.median(b)
        rows.append([what, statistics.mean(a), statistics.mean(b), ratio, len(a)])
    size = subjects[0].size if subjects else args.size
    if size:
        a, b = PAPER_TIMING[size]
        rows.append([f"the paper's {size.capitalize()}, forward pass, 32 x 512 on an A100", a, b, a / b, 100])
    name = torch.cuda.get_device_name(device) if on_gpu else f'{device}, {torch.get_num_threads()} threads'
    ours, its = (cost_of_step(model.config, batch, length, device)[1] / 1e9 for model in models)
    words, n = text_like(config.n_vocab, batch, length).unique().numel(), len(table.senses) - 1
    return Table(f'Time (Table 7): mean ms, in turn; {config.n_layer} layers of width {config.n_embd}, '
                 f'{config.n_sense} senses, {config.n_vocab:,} words',
                 {'': '', 'the first': ',.1f', 'the second': ',.1f', 'ratio of medians': '.2f', 'times': 'd'},
                 rows,
                 [f'{name}, {"bfloat16, compiled (generation: float32, as it is)" if on_gpu else "float32"}, '
                  f'torch {torch.__version__}; '
                  f'{words:,} distinct tokens of {batch * length:,} in a batch.',
                  f'Memory of a training step: Backpack {ours:.2f} GB, Transformer {its:.2f} GB, ratio '
                  f'{ours / its:.2f}; of the sense table, {n:,} words in '
                  f'{str(table.senses.dtype).removeprefix("torch.")}: {table.senses.nbytes / 1e6:,.1f} MB.'])


def cost_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """How a training step grows with the batch, the length of the texts, the senses and the size."""
    on_gpu, rows = args.device.startswith('cuda'), []
    base = {'size': args.size or ('small' if on_gpu else 'micro'), 'batch': 8 if on_gpu else 1, 'length': 512,
            'senses': 16}
    ways = [base | {name: value} for name, values in {
        'batch': [base['batch'] * n for n in (1, 2, 4, 8)], 'length': [1024, 2048, 4096],
        'senses': [1, 4, 64], 'size': [size for size in SIZES if size != base['size']]}.items()
        for value in values]
    for way in progress(ways, 'cost'):
        config = Config(**SIZES[way['size']], block_size=way['length'], n_sense=way['senses'])
        (ours, memory), (its, its_memory) = (cost_of_step(c, way['batch'], way['length'], args.device)
                                             for c in (config, replace(config, n_sense=0)))
        model = shape_of(config)
        words = text_like(config.n_vocab, way['batch'], way['length']).unique().numel()
        tokens = way['batch'] * way['length']
        flops = tokens * model.flops_per_token(words / tokens)
        rows.append([*way.values(), 1000 * ours, 1000 * its, ours / its, memory / 1e9, its_memory / 1e9,
                     flops / 1e9, flops / ours / 1e9])
    return Table('Cost of a training step as work grows (medians)', {
        'size': '', 'batch': 'd', 'length': ',d', 'senses': 'd', 'Backpack ms': ',.0f',
        'Transformer ms': ',.0f', 'ratio': '.2f', 'Backpack GB': '.2f', 'Transformer GB': '.2f',
        'Backpack GFLOP': ',.0f', 'GFLOP/s': ',.0f'}, rows,
        [f'{args.device}, torch {torch.__version__}; memory with weights, gradients and optimizer.'])


# -----------------------------------------------------------------------------
# How many senses.

PAPER_ABLATION = [(1, 74.3, 72.7, 38.5), (4, 75.6, 72.7, 29.3), (16, 80.5, 72.7, 26.0),
                  (64, 100.2, 72.7, 24.0)]


def ablation_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 8: the runs named, or those in out/ that differ from --from in the number of senses alone."""
    if args.runs:
        runs = [load(name, args.device) for name in args.runs]
        for s in runs:
            needs_senses(s, 'ablation')
    else:
        def shape(model: Backpack) -> tuple:
            """What such runs have in common."""
            return replace(model.config, n_sense=1, dropout=0.0), model.tokenizer, model.trained_on

        try:
            paths = sorted(Path('out').glob('*/ckpt.pt'))
            found = {str(path.parent): from_pretrained(path) for path in paths}
        except UserError as error:
            raise Missing(f'{error}; or name the runs')
        runs = [load(name, args.device, model) for name, model in found.items()
                if model.config.n_sense and shape(model) == shape(subjects[0].model)]
    runs.sort(key=lambda s: s.model.config.n_sense)
    if len({s.model.config.n_sense for s in runs}) < 2:
        raise Missing('it takes runs with different numbers of senses; train them, as in '
                      'python train.py config/train_toy.py --n_sense=4 --out_dir=out/toy_4')
    texts, rows = [held_out(s, args) for s in runs], []
    if len({path for _, path in texts}) > 1:
        raise UserError('the runs were trained on different data; name what to compare them on by --data')
    for s, (ids, _) in zip(runs, texts):
        n, seen = s.model.n_params(), s.model.trained_tokens
        rows.append([s.name, s.model.config.n_sense, n['total'] / 1e6, n['contextualizer'] / 1e6,
                     seen and seen / 1e6, loss_of(s, ids)])
    c = runs[0].model.config
    if (c.n_layer, c.n_embd, c.sense_hidden, c.n_vocab) == (8, 640, 640, 50257):
        rows += [[f"the paper's Mini, k = {numbers[0]}", *numbers[:3], 26214.4, numbers[3]]
                 for numbers in PAPER_ABLATION]
    return Table(f'The number of senses (Table 8): perplexity on {texts[0][1]}, and the tokens trained on', {
        '': '', 'senses': 'd', 'parameters, M': '.2f', 'contextual, M': '.2f', 'tokens, M': ',.1f',
        'perplexity': '.3f'}, rows)


# -----------------------------------------------------------------------------
# Pictures.

COLORS = ('#c2410c', '#2563eb', '#15803d', '#9333ea', '#0891b2', '#475569', '#db2777', '#a16207')
STYLE = """text { font: 13px system-ui, sans-serif; fill: #222 } .grid { stroke: #bbb; stroke-width: .5 }
path { fill: none; stroke-width: 2 } .paper { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .grid { stroke: #555 } .paper { fill: #1b1b1b } }"""


@dataclass
class Line:
    """A line of a picture: points (x, y) under a name; a thin one is not named."""

    name: str
    points: list[tuple[float, float]]
    color: str
    dashed: bool = False
    thin: bool = False


def round_steps(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    step = 10 ** math.floor(math.log10(high - low))
    step *= next(m for m in (0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / (step * m) <= 6)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(x: float) -> str:
    """A number for an axis: 2.5B, 300M, 40k."""
    size, letter = next(((size, letter) for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'k'))
                         if abs(x) >= size), (1, ''))
    return f'{x / size:.6g}{letter}'


def picture(title: str, x_name: str, y_name: str, lines: list[Line], logarithmic: bool = False) -> str:
    """Lines in one coordinate system as an SVG file that needs nothing else; y may be logarithmic."""
    xs, ys = zip(*(point for line in lines for point in line.points))
    scale = math.log if logarithmic else float
    (left, right), (low, high) = ((min(v), max(v) if max(v) - min(v) > 1e-6 * max(v) else min(v) + 1)
                                  for v in (xs, ys))
    bottom, top = scale(low), scale(high)

    def at(x: float, y: float) -> tuple[float, float]:
        """Where a point is, in pixels."""
        return 70 + 500 * (x - left) / (right - left), 400 - 350 * (scale(y) - bottom) / (top - bottom)

    title, x_name, y_name = (html.escape(printable(text)) for text in (title, x_name, y_name))
    height = max(460, 80 + 22 * len(lines))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" role="img">'
             f'<title>{title}</title><style>{STYLE}</style>'
             f'<rect class="paper" width="820" height="{height}"/>'
             f'<text x="70" y="28">{title}</text><text x="320" y="445" text-anchor="middle">{x_name}</text>'
             f'<text transform="translate(18 225) rotate(-90)" text-anchor="middle">{y_name}</text>']
    for x in round_steps(left, right):
        px, _ = at(x, low)
        parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="50" y2="400"/>'
                     f'<text x="{px:.1f}" y="420" text-anchor="middle">{short(x)}</text>')
    decades = [10.0 ** e for e in range(-9, 10) if low <= 10.0 ** e <= high]
    for y in decades if logarithmic and high > 50 * low else round_steps(low, high):
        _, py = at(left, y)
        parts.append(f'<line class="grid" x1="70" x2="570" y1="{py:.1f}" y2="{py:.1f}"/>'
                     f'<text x="62" y="{py + 4:.1f}" text-anchor="end">{short(y)}</text>')
    key = 60  # where the next name stands
    for line in lines:
        dots, look = [at(*point) for point in line.points], f'stroke="{line.color}"'
        look += ' stroke-dasharray="7 4"' * line.dashed + ' opacity=".35"' * line.thin
        parts.append(f'<path d="M{"L".join(f"{px:.1f} {py:.1f}" for px, py in dots)}" {look}/>')
        if not line.thin:
            name = html.escape(printable(line.name if len(line.name) < 27 else '…' + line.name[-25:]))
            parts.append(f'<path d="M585 {key}h30" {look}/><text x="622" y="{key + 4}">{name}</text>')
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{line.color}"/>' for px, py in dots]
            key += 22
    return '\n'.join(parts) + '\n</svg>\n'


def read_log(name: str) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """What a run is, and the losses in its log: (tokens, nats) of training batches and of held-out text."""
    folder = Path(name).parent if Path(name).suffix in ('.pt', '.csv') else Path(name)
    try:
        settings = Settings(**load_file(folder / 'ckpt.pt')['settings'])
        if type(settings.tokens_per_step) is not int or settings.model not in ('backpack', 'gpt'):
            raise UserError('its settings are of other types')
        with open(folder / 'log.csv', newline='', encoding='utf-8') as file:
            rows = [{key: float(x) for key, x in row.items() if x} for row in csv.DictReader(file)]
        losses = {column: [(row['step'] * settings.tokens_per_step, row[column]) for row in rows
                           if 0 <= row['step'] * settings.tokens_per_step < 1e18
                           and 1e-6 < row.get(column, 0) < 1e6]
                  for column in ('loss', 'val_loss')}
        if not losses['val_loss']:
            raise UserError('no loss is logged')
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, csv.Error) as error:
        raise UserError(f'{name} is no run with ckpt.pt and log.csv ({one_line(error)}); name folders that '
                        'train.py made')
    return f'{"Transformer" if settings.model == "gpt" else "Backpack"} {name}', losses


def plot_losses(args: argparse.Namespace) -> Table:
    """Loss against tokens: on held-out text, and thin on training batches; a Transformer's are dashed."""
    lines, rows = [], []
    for run, color in zip(args.runs, COLORS * len(args.runs)):
        name, losses = read_log(run)
        lines += [Line(name, points, color, dashed=name.startswith('Transformer'), thin=column == 'loss')
                  for column, points in losses.items() if points]
        x, y = losses['val_loss'][-1]
        rows.append([name, x, y, min(y for _, y in losses['val_loss'])])
    write_file(args.out, picture('Loss on held-out text (thin: on training batches)', 'tokens',
                                 'nats per token, logarithmic', lines, logarithmic=True))
    return Table('Losses', {'': '', 'tokens': ',.0f', 'on held-out text': '.3f', 'lowest': '.3f'}, rows)


def plot_sweep(s: Subject, args: argparse.Namespace) -> Table:
    """Figure 3: the probabilities of the next words as senses go from off to what they were."""
    words, chosen, line = senses.parse_word_senses(args.sweep, s.model, s.encoding)
    ids, cropped = read_prompt(args.start, s.encoding, s.model.config.block_size)
    idx, factors = torch.tensor([ids], device=s.device), [i / 20 for i in range(21)]  # (1, T)
    probs = torch.stack([predict(s.model, idx, senses.scale_senses(words, chosen, f)) for f in factors])
    best = probs.amax(0).topk(len(COLORS)).indices.tolist()  # of V
    best = [w for w in best if probs[:, w].max() >= 0.01] or best
    lines = [Line(shown(s.encoding, w), list(zip(factors, probs[:, w].tolist())), color)
             for w, color in zip(best, COLORS)]
    text = s.encoding.decode(ids)
    title = f'The next word after “{text if len(text) < 80 else "…" + text[-80:]}”'
    write_file(args.out, picture(title, f'weight of {line.split(", which")[0]}', 'probability', lines))
    rows = [[shown(s.encoding, w), *probs[::5, w].tolist()] for w in best]
    return Table(f'The next word at the weight of {line}{not_there(words, ids)}',
                 {'': ''} | {f'{f:g}': '.3f' for f in factors[::5]}, rows, [cropped] if cropped else [])


def plot(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """A picture in the file of --out, and its numbers."""
    table = plot_sweep(subjects[0], args) if args.sweep is not None else plot_losses(args)
    table.notes.append(f'{args.out}: written')
    return table


# -----------------------------------------------------------------------------
# The command line.

TABLES = {'loss': loss_table, 'lambada': lambada_table, 'wikitext': wikitext_table, 'blimp': blimp_table,
          'similarity': similarity_table, 'gender': gender_table, 'topic': topic_table,
          'timing': timing_table, 'ablation': ablation_table, 'cost': cost_table, 'plot': plot}
NOT_IN_ALL = ('cost', 'plot')
OF_SENSES = ('similarity', 'gender', 'topic', 'timing', 'ablation', 'plot')
ONLY_WITH = {'first': ('similarity', 'all'), 'sense': ('gender', 'all'), 'texts': ('topic', 'all'),
             'length': ('topic', 'all'), 'seed': ('topic', 'all'), 'step_sizes': ('topic', 'all'),
             'runs': ('ablation', 'plot'), 'out': ('plot',), 'sweep': ('plot',), 'start': ('plot',)}


def needs_senses(subject: Subject, table: str) -> None:
    """Raise Missing where a table about senses is asked of a model without."""
    if not subject.model.config.n_sense:
        raise Missing(f'{subject.name} is a Transformer and has no senses; {table} takes a Backpack by '
                      '--from (and the Transformer by --baseline)')


def load(name: str, device: str, model: Backpack | None = None) -> Subject:
    """A model, from a file, folder or the Hub if it is not there yet, on its device."""
    model = model or from_pretrained(name)
    encoding = prepare.load_tokenizer(model.tokenizer)
    if encoding.n_vocab != model.config.n_vocab:
        raise UserError(f'{name} has {model.config.n_vocab} words, its tokenizer {encoding.n_vocab}')
    return Subject(name, model.to(device).eval(), encoding)


def load_subjects(args: argparse.Namespace) -> list[Subject]:
    """The model of --from and, for a Backpack, its baseline if there is one."""
    name, model = args.source, None
    if name is None:
        model, path = newest_backpack()
        name = str(path.parent)
    subjects, path = [load(name, args.device, model)], Path(name)
    beside = Path(f'{path.parent}_gpt', path.name) if path.suffix == '.pt' else Path(f'{path}_gpt')
    wants = subjects[0].model.config.n_sense and args.table not in ('plot', 'ablation')
    if args.baseline or (wants and (beside.is_file() or (beside / 'ckpt.pt').exists())):
        subjects.append(load(args.baseline or str(beside), args.device))
        if subjects[1].model.config.n_sense:
            raise UserError(f'{subjects[1].name} is a Backpack; --baseline takes a Transformer')
        if subjects[1].model.tokenizer != subjects[0].model.tokenizer:
            raise UserError(f'{subjects[0].name} and {subjects[1].name} have different vocabularies')
    for s in subjects:
        c = s.model.config
        print(printable(f'{s}: {c.n_layer} layers of width {c.n_embd}, {c.n_sense} senses, '
                        f'{c.n_vocab:,} words'))
    if len(subjects) == 1 and wants:
        print(printable(f'no baseline: {beside} is not there; train it with --model=gpt, or name one by '
                        '--baseline'))
    return subjects


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(
        prog='eval.py', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('table', choices=['all', *TABLES], metavar='TABLE', help='one of the above, or all')
    add('runs', nargs='*', metavar='RUN', default=[],
        help='plot: runs; ablation: runs (default: those in out/ of the shape and data of --from)')
    add('--from', dest='source', metavar='MODEL',
        help='checkpoint, folder or Hub name, as for sample.py (default: the newest Backpack in out/)')
    add('--baseline', metavar='MODEL',
        help='Transformer to compare with (default: the folder of --from with _gpt behind its name, in it '
        'the file that --from names)')
    add('--data', metavar='PATH', help='file of a benchmark, or folder to look for it in (default: the Hub); '
        'loss and ablation: folder below data/, or a .bin in it (default: val.bin of the training)')
    add('--device', metavar='D', default='auto', help='auto, cpu, cuda, cuda:N or mps [auto]')
    add('--json', metavar='FILE', help='write the numbers to a file too')
    add('--first', action='store_true', help='similarity: of a word of several tokens take the first')
    add('--sense', type=number(int, 0), metavar='L',
        help='gender: the sense to take away (default: the one that most separates she from he)')
    add('--texts', type=number(int, 1), metavar='N', default=100,
        help='topic: texts for each topic and strength [100]')
    add('--length', type=number(int, 1), metavar='N', default=100, help='topic: longest text, tokens [100]')
    add('--step-sizes', type=number(float, 0, 1000), nargs='+', metavar='S',
        help="topic: of PPLM [the paper's; in the toy world 0.05 0.1 0.2]")
    add('--seed', type=number(int, 0), metavar='S', default=0, help='topic: of the draws [0]')
    add('--size', choices=SIZES,
        help="timing and cost: a size of the paper's with random weights, without --from")
    add('--out', metavar='FILE.svg', help='plot: the picture to write')
    add('--sweep', metavar='WORD:SENSES', help='plot: the senses to turn down, as in sample.py --sweep')
    add('--start', metavar='TEXT', default=PROMPT, help=f'plot --sweep: the prompt, or FILE:path [{PROMPT}]')
    args = parser.parse_intermixed_args(argv)
    for flag, tables in ONLY_WITH.items():
        if getattr(args, flag) != parser.get_default(flag) and args.table not in tables:
            parser.error(f'{flag if flag == "runs" else "--" + flag.replace("_", "-")}: only with '
                         + ' and '.join(table for table in tables if table != 'all'))
    if args.table == 'plot' and (args.out is None or bool(args.runs) == (args.sweep is not None)):
        parser.error('plot takes --out FILE.svg and either runs or --sweep WORD:SENSES')
    if args.table == 'plot' and (args.baseline or args.runs and (args.source or args.start != PROMPT)):
        parser.error('plot takes --from and --start with --sweep alone, and no --baseline')
    if (args.size or args.table == 'cost') and (args.source or args.baseline):
        parser.error('cost and --size have random weights; leave --from and --baseline out')
    if args.size and args.table not in ('timing', 'cost'):
        parser.error('--size: only with timing and cost')
    return args


def write_json(path: Path, subjects: list[Subject], tables: dict[str, Table]) -> None:
    """The numbers of the tables; the file has its name only when complete."""
    content = {'models': list(map(str, subjects)), 'tables': {
        name: {'title': t.title, 'columns': list(t.columns), 'rows': t.rows, 'notes': t.notes}
        for name, t in tables.items()}}
    write_file(path, json.dumps(content, indent=1) + '\n')


def run(args: argparse.Namespace) -> None:
    """Load, and print one table after another; the numbers are written after each. What is wrong with one of
    all tables is said again at the end.
    """
    args.device, file = find_device(args.device), None
    if args.json is not None:
        file = place_for('--json', args.json)
    if args.out is not None:
        args.out = place_for('--out', args.out, '.svg')
        if args.out == file:
            raise UserError('--out and --json are one file; name two')
    bare = args.size or args.runs or args.table == 'cost'
    subjects, tables, wrong = [] if bare else load_subjects(args), {}, None
    for name in [name for name in TABLES if name not in NOT_IN_ALL] if args.table == 'all' else [args.table]:
        try:
            if name in OF_SENSES and subjects:
                needs_senses(subjects[0], name)
            tables[name] = TABLES[name](subjects, args)
        except (UserError, prepare.UserError) as error:
            if args.table != 'all':
                raise
            print(printable(f'\n{name}: skipped, {error}'), flush=True)
            wrong = wrong if isinstance(error, Missing) else error
            continue
        if file:
            write_json(file, subjects, tables)
        print(printable(str(tables[name])), flush=True)
    if wrong:
        raise wrong


def main(argv: list[str]) -> None:
    """Run the command line."""
    answer('eval.py', run, parse_args(argv))


if __name__ == '__main__':
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')  # a terminal without unicode still gets a table
    main(sys.argv[1:])
