"""The benchmarks of Table 2: LAMBADA, WikiText and BLiMP, from files or from the Hub."""

import json
import math
import re
from pathlib import Path

import pandas

from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import score, score_and_price, windows

WHERE = 'rucksack eval --help says where to find it'


def find_files(data: str, *names: str) -> list[Path]:
    """Find the files with these names (or globs) in a folder; a file stands for itself."""
    path = Path(data)
    if not path.is_dir():
        return [path]
    files = [file for name in names for file in sorted(path.rglob(name))]
    if not files:
        raise UserError(f'{data} has no {" or ".join(names)}; {WHERE}')
    return files


def read_rows(file: Path) -> list[dict]:
    """Read the rows of a .jsonl file, or the pages of the raw text of WikiText."""
    text = file.read_text('utf-8-sig')
    if file.suffix == '.jsonl':
        return [
            json.loads(line)
            for line in text.split('\n')
            if line.strip()]
    begins = r'\n(?=[ \t]*= (?!=).* =[ \t]*$)'  # " = Title = "
    pages = re.split(begins, text, flags=re.MULTILINE)
    return [
        {'page': page}
        for page in pages
        if page.lstrip().startswith('= ')]


def rows_of_hub(name: str, config: str | None, split: str) -> list[dict]:
    """Read the rows of a benchmark on the Hugging Face Hub; config None means all configs."""
    import datasets  # slow to import
    configs = [config] if config else datasets.get_dataset_config_names(name)
    return [
        row
        for one in configs
        for row in datasets.load_dataset(name, one, split=split)]


def rows_of(loaded: LoadedModel, data: str | None, pattern: str, columns: list[str],
            *hub: str | None) -> pandas.DataFrame:
    """Read the columns of a benchmark from files named like pattern or, without data, the Hub.

    Raises UserError if a row has no text in one of the columns.
    """
    if data is None and loaded.is_toy:
        raise UserError(f'{hub[0]} is English, and {loaded.name} knows only the toy world; choose '
                        'an English model with --from')
    with user_errors(data or hub[0], WHERE):
        if data is None:
            rows = rows_of_hub(*hub)
        else:
            rows = [row for file in find_files(data, pattern) for row in read_rows(file)]
        rows = [row for row in rows if columns[0] in row]
        texts = pandas.DataFrame(rows)[columns].fillna('')
        is_blank = texts.map(str.strip).eq('').any(axis=1)
        if is_blank.any():
            raise ValueError(f'row {is_blank.argmax() + 1} has no text')
    return texts


# -----------------------------------------------------------------------------
# LAMBADA.


def lambada_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """LAMBADA (Table 2), OpenAI's variant: all tokens of the last word of a passage.

    Perplexity is of the last word, given the passage. Accuracy is how often all its tokens are the
    likeliest.
    """
    rows = rows_of(loaded, data, 'lambada_test.jsonl', ['text'],
                   'EleutherAI/lambada_openai', 'default', 'test')
    pairs = []
    for text in rows['text']:
        context, _, word = text.strip().rpartition(' ')
        context_ids = loaded.encode(context) or [loaded.eot]
        pairs.append((context_ids, loaded.encode(f' {word}')))
    scores = score_and_price(loaded, pairs, 'LAMBADA')
    is_right = (scores.likeliest == scores.targets).all(1)  # (passages,)
    return [{
        'passages': len(pairs),
        'perplexity': scores.perplexity(len(pairs)),
        'accuracy %': 100 * is_right.double().mean().item()}]


# -----------------------------------------------------------------------------
# WikiText.

# Pattern -> replacement, in this order, from EleutherAI's harness (version 1). The harness has one
# more rule, which never applies.
DETOKENIZE = {
    "s '": "s'",
    ' @([-,.])@ ': r'\1',
    ' : ': ': ',
    ' ; ': '; ',
    r' \. ': '. ',
    ' ! ': '! ',
    r' \? ': '? ',
    ' , ': ', ',
    r'\(\s*([^)]*?)\s*\)': r'(\1)',
    r'\[\s*([^\]]*?)\s*\]': r'[\1]',
    r'{\s*([^}]*?)\s*}': r'{\1}',
    r'"\s*([^"]*?)\s*"': r'"\1"',
    r"'\s*([^']*?)\s*'": r"'\1'",
    '= = = =': '====',
    '= = =': '===',
    '= =': '==',
    ' ° ': '°',
    ' \n': '\n',
    '\n ': '\n',
    ' N ': ' 1 ',
    " 's": "'s",
}


def detokenized(page: str) -> str:
    """Undo the tokenization of a page of WikiText."""
    for pattern, replacement in DETOKENIZE.items():
        page = re.sub(pattern, replacement, page)
    return page


def wikitext_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """WikiText (Table 2), as EleutherAI's harness scores it.

    The model reads detokenized pages. Per word and bits per byte: comparable between tokenizers
    (they count words and bytes of the original pages). Per token: comparable only within one
    tokenizer.
    """
    rows = rows_of(loaded, data, 'wiki.test.raw', ['page'],
                   'EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test')
    pages = rows['page']
    pairs = []
    for page in pages:
        ids = loaded.encode(detokenized(page))
        pairs += windows(ids, loaded.eot, loaded.config.block_size, look_back=True)
    scores = score_and_price(loaded, pairs, 'WikiText')
    n_words = sum(len(re.split(r'\s+', page)) for page in pages)
    n_bytes = sum(len(page.encode()) for page in pages)
    return [{
        'pages': len(pages),
        'perplexity per word': scores.perplexity(n_words),
        'per token': scores.perplexity(),
        'bits per byte': math.log2(scores.perplexity(n_bytes))}]


# -----------------------------------------------------------------------------
# BLiMP.

def blimp_rows(loaded: LoadedModel, data: str | None) -> list[dict]:
    """BLiMP (Table 2): % of pairs whose good sentence is likelier than the bad one.

    Each sentence is read after an end-of-text. The value is a mean over paradigms.
    """
    items = rows_of(loaded, data, '*.jsonl', ['UID', 'sentence_good', 'sentence_bad'],
                    'nyu-mll/blimp', None, 'train')
    items = items.drop_duplicates()  # of a folder with a sample beside the whole
    sentences = [*items['sentence_good'], *items['sentence_bad']]
    pairs = [
        ([loaded.eot], loaded.encode(sentence))
        for sentence in sentences]
    loaded.needs_length(max(len(ids) for _, ids in pairs), 'a sentence has')
    good, bad = score(loaded, pairs, 'BLiMP').logp.chunk(2)
    items['% right'] = 100.0 * (good > bad).numpy()
    paradigms = items.groupby('UID')['% right'].mean()
    return [{'paradigms': len(paradigms), '% right': paradigms.mean()}]
