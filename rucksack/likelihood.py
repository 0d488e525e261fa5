"""Table 2 and Table 8: how likely a text is."""

import argparse
import json
import lzma
import re
import statistics
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import prepare
import senses
from model import Backpack
from rucksack.common import UserError, one_line, progress
from rucksack.published import from_pretrained
from rucksack.table import Missing, Subject, Table, held_out, load, needs_senses, read_text

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
