"""Tables 2 and 8: how likely a text is."""

import argparse
import json
import re
import tarfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.common import UserError, one_line, progress
from rucksack.data import read_bin, read_meta
from rucksack.table import Subject, Table
from senses import edited

LOGITS_AT_ONCE = 1 << 26  # of a batch: 256 MiB of float32
SOURCES = {  # benchmark -> name on the Hub, config (None: all), split, columns; its files; how to get them
    'LAMBADA': ('EleutherAI/lambada_openai', 'default', 'test', ['text'], r'^lambada.*\.jsonl$',
                'curl -O https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl'),
    'WikiText': ('EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test', ['page'],
                 r'wiki.*(test.*raw|raw.*test)', 'curl -LO https://huggingface.co/datasets/ggml-org/ci/'
                 'resolve/main/wikitext-2-raw-v1.zip, unzip it'),
    'BLiMP': ('nyu-mll/blimp', None, 'train', ['linguistics_term', 'UID', 'sentence_good', 'sentence_bad'],
              r'\.jsonl$|^blimp.*\.tar', 'git clone https://github.com/alexwarstadt/blimp')}
DETOKENIZE = [  # rules of the EleutherAI harness (wikitext, version 1), in order; one more never applies
    (r"s '", "s'"), (r' @([-,.])@ ', r'\1'), *((f' [{mark}] ', f'{mark} ') for mark in ':;.!?,'),
    (r'\(\s*([^)]*?)\s*\)', r'(\1)'), (r'\[\s*([^\]]*?)\s*\]', r'[\1]'), (r'{\s*([^}]*?)\s*}', r'{\1}'),
    (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"), ('= = = =', '===='), ('= = =', '==='),
    ('= =', '=='), (' ° ', '°'), (' \n', '\n'), ('\n ', '\n'), (' N ', ' 1 '), (" 's", "'s")]


@torch.no_grad()
def score(subject: Subject, pairs: list[tuple[list[int], list[int]]], what: str) -> tuple[Tensor, Tensor]:
    """For n pairs (context, continuation) of ids, neither empty: the log-probability of each continuation in
    nats (n,), and whether all its tokens are the likeliest (n,). Of a pair beyond block_size the end is read.
    """
    c, texts = subject.model.config, []
    for context, continuation in pairs:
        ids = torch.tensor((context + continuation)[-c.block_size - 1:])
        targets = ids[1:].clone()
        targets[:-len(continuation)] = -1
        texts.append((ids[:-1], targets))
    logp, greedy = torch.zeros(len(texts), dtype=torch.float64), torch.zeros(len(texts), dtype=torch.bool)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))  # so that a batch needs little padding
    size = max(1, min(1 << 14, LOGITS_AT_ONCE // c.vocab_size) // len(texts[order[0]][0]))
    for batch in progress([order[i:i + size] for i in range(0, len(order), size)], what):
        idx, targets = (pad_sequence([texts[i][part] for i in batch], True, -part).to(subject.device)
                        for part in (0, 1))  # (B, T) each, padded with 0 and with -1
        valid = targets != -1  # (B, T)
        with subject.autocast():
            C = subject.edit and edited(subject.model, idx, subject.edit)  # (B, T, k, d)
            logits = subject.model(idx, C=C)[valid][:, :c.n_vocab]  # (m, V)
        wanted = targets[valid]  # (m,)
        nats = F.cross_entropy(logits.float(), wanted, reduction='none')
        spread = torch.zeros(valid.shape, device=idx.device).masked_scatter(valid, nats)  # (B, T)
        logp[batch] = -spread.sum(1).double().cpu()
        greedy[batch] = (~valid).masked_scatter(valid, logits.argmax(-1) == wanted).all(1).cpu()
    return logp, greedy


def windows(ids: list[int], before: int, block_size: int, look_back: bool) -> list[tuple[list, list]]:
    """A text after the token `before`, as pairs (context, continuation) in which each token is scored once: a
    token and the block_size after it, and so on. With look_back the last pair has as much context as fits.
    """
    ids, pairs = [before, *ids], []
    for start in range(1, len(ids), block_size):
        end = min(start + block_size, len(ids))
        first = max(0, end - 1 - block_size) if look_back else start - 1
        pairs.append((ids[first:start], ids[start:end]))
    return pairs


def perplexity(logp: Tensor, n: int) -> float:
    """exp of minus the sum of log-probabilities, in nats, over n."""
    return (-logp.sum() / n).exp().item()


def held_out(subject: Subject, args: argparse.Namespace) -> tuple[list[int], Path]:
    """The ids in val.bin of the folder --data, or in the .bin that it is, and the path; without --data, or in
    eval.py all where that has none, those of the data that the model was trained on.
    """
    names = [args.data, subject.model.run.get('dataset')][:1 if args.data and args.table != 'all' else 2]
    paths = [parent / name for name in names if name for parent in (Path('data'), Path())]
    paths = [path if path.suffix == '.bin' else path / 'val.bin' for path in paths]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UserError(f'no held-out text for {subject.name} at {" or ".join(map(str, paths)) or "hand"}; '
                      'make some with prepare.py, or name a folder by --data')
    ids = read_bin(path.parent, path.stem, meta := read_meta(path.parent))
    if meta['tokenizer'] != subject.model.tokenizer or not len(ids):
        raise UserError(f'{path} is empty or of another vocabulary than {subject.name}; take other data')
    return ids.tolist(), path


def loss_of(s: Subject, ids: list[int]) -> float:
    """Perplexity in blocks of block_size tokens, each after the one token before it."""
    blocks = windows(ids, s.eot, s.model.config.block_size, look_back=False)
    return perplexity(score(s, blocks, f'loss, {s.name}')[0], len(ids))


def loss_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Tables 2 and 8, perplexity on held-out text: of the model and its baseline, or of the runs named."""
    texts, rows = [held_out(s, args) for s in subjects], []
    for s, (ids, _) in zip(subjects, texts):
        n, seen = s.model.n_params(), s.model.run.get('tokens')
        rows.append([str(s), s.model.config.n_sense or None, n['total'] / 1e6, n['contextualizer'] / 1e6,
                     seen and seen / 1e6, loss_of(s, ids), len(ids)])
    return Table('Loss (Tables 2 and 8) on all of ' + ', '.join(dict.fromkeys(str(p) for _, p in texts)), {
        '': '', 'senses': 'd', 'parameters, M': '.2f', 'contextual, M': '.2f', 'tokens seen, M': ',.1f',
        'perplexity': '.3f', 'on tokens': ','}, rows)


def benchmark(what: str, subject: Subject, args: argparse.Namespace) -> list[tuple]:
    """The columns of each row: of --data, a file or the first folder in it with such files, or of the Hub."""
    name, config, split, columns, pattern, command = SOURCES[what]
    files = [Path(args.data)] if args.data else []
    if files and (args.table == 'all' or not files[0].is_file()):
        files = [p for p in sorted([*files, *files[0].rglob('*')]) if re.search(pattern, p.name) and (
            p.suffix != '.jsonl' or columns[-1].encode() in p.open('rb').readline())]
    source = files[0] if files else args.data if args.data and args.table != 'all' else name
    if source == name and subject.is_toy:
        raise UserError(f'{what} is English, and {subject.name} knows the toy world alone')
    try:
        if source == name:
            import datasets
            configs = [config] if config else datasets.get_dataset_config_names(name)
            rows = [row for config in configs for row in datasets.load_dataset(name, config, split=split)]
        else:
            rows = [row for path in files if path.parent == files[0].parent for row in read(path)]
        if not rows or not all(str(row[column]).strip() for row in rows for column in columns):
            raise ValueError('there is none, or one that is empty')
        return [tuple(str(row[column]) for column in columns) for row in rows]
    except Exception as error:  # damaged archives, the Hub's client and its HTTP library raise a dozen kinds
        raise UserError(f'{what} cannot be read from {source} ({one_line(error)}); run {command} and name the'
                        ' file or a folder by --data')


def read(path: Path) -> list[dict]:
    """The rows of a benchmark's file: JSON lines, an archive of such files, or the raw text of WikiText."""
    if path.suffix == '.jsonl':
        lines = path.read_bytes().splitlines()
    elif '.tar' in path.suffixes:
        with tarfile.open(path) as tar:
            lines = [line for file in tar if file.name.endswith('.jsonl') for line in tar.extractfile(file)]
    else:
        pages = re.split(r'\n(?=[ \t]*= (?!=).* =[ \t]*$)', path.read_text('utf-8-sig'), flags=re.M)
        return [{'page': page} for page in pages if page.lstrip().startswith('= ')]  # " = Title = "
    return [json.loads(line) for line in lines if line.strip()]


def lambada_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, LAMBADA in OpenAI's variant: the last word of a passage, all its tokens, after all others."""
    texts, rows = [text.strip().rpartition(' ') for text, in benchmark('LAMBADA', subjects[0], args)], []
    for s in subjects:
        pairs = [(s.encode(context) or [s.eot], s.encode(f' {word}')) for context, _, word in texts]
        logp, greedy = score(s, pairs, f'LAMBADA, {s.name}')
        rows.append([str(s), perplexity(logp, len(texts)), 100 * greedy.double().mean().item()])
    return Table(f'LAMBADA (Table 2): the last word of {len(texts):,} passages', {
        '': '', 'perplexity': '.1f', 'accuracy %': '.1f'}, rows)


def wikitext_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, WikiText as in the EleutherAI harness: detokenized pages, words of the pages as they were."""
    pages, rows = [page for page, in benchmark('WikiText', subjects[0], args)], []
    words = sum(len(re.split(r'\s+', page)) for page in pages)
    for pattern, replacement in DETOKENIZE:
        pages = [re.sub(pattern, replacement, page) for page in pages]
    for s in subjects:
        texts, size = [s.encode(page) for page in pages], s.model.config.block_size
        pairs = [pair for ids in texts for pair in windows(ids, s.eot, size, look_back=True)]
        logp = score(s, pairs, f'WikiText, {s.name}')[0]
        rows.append([str(s), perplexity(logp, words), perplexity(logp, sum(map(len, texts)))])
    return Table(f'WikiText (Table 2): {len(pages)} pages of {words:,} words', {
        '': '', 'perplexity per word': '.1f', 'per token': '.1f'}, rows)


def blimp_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 2, BLiMP: how often the good sentence is likelier than the bad one, from the end-of-text on."""
    rows, paradigms, columns = benchmark('BLiMP', subjects[0], args), {}, []
    for i, row in enumerate(rows):
        paradigms.setdefault(row[:2], []).append(i)  # (phenomenon, paradigm) -> its rows
    for s in subjects:
        pairs = [([s.eot], s.encode(text)) for row in rows for text in row[2:]]  # good, bad, good ..
        logp, _ = score(s, pairs, f'BLiMP, {s.name}')
        right = 100 * (logp[0::2] > logp[1::2]).double()
        columns.append({key: right[places].mean().item() for key, places in paradigms.items()})
    groups = {label: [key for key in paradigms if key[0] == label] for label, _ in sorted(paradigms)}
    groups['mean of all'] = paradigms
    table = [[f'{label} ({len(keys)})', *(sum(column[key] for key in keys) / len(keys) for column in columns)]
             for label, keys in groups.items()]
    return Table(f'BLiMP (Table 2): % of {len(rows):,} pairs whose good sentence is likelier, means over (n) '
                 'paradigms', {'': '', **{str(s): '.1f' for s in subjects}}, table)
