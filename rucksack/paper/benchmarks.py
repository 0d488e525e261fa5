"""The benchmarks of Table 2: LAMBADA, WikiText and BLiMP, from files or from the Hub."""

import json
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pandas

from rucksack.cli import quiet_hub
from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel


@dataclass(frozen=True)
class Benchmark:
    """Where to find the rows of a benchmark."""

    title: str
    hub_name: str
    hub_config: str | None  # None: all configs
    split: str
    columns: list[str]
    pattern: str            # regular expression for the names of its files
    command: str            # how to fetch them


LAMBADA = Benchmark(
    'LAMBADA', 'EleutherAI/lambada_openai', 'default', 'test', ['text'], r'^lambada_test\.jsonl$',
    'curl -O https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl')
WIKITEXT = Benchmark(
    'WikiText', 'EleutherAI/wikitext_document_level', 'wikitext-2-raw-v1', 'test', ['page'],
    r'wiki.*(test.*raw|raw.*test)',
    'curl -LO https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip, '
    'unzip it')
BLIMP = Benchmark(
    'BLiMP', 'nyu-mll/blimp', None, 'train',
    ['linguistics_term', 'UID', 'sentence_good', 'sentence_bad'], r'\.jsonl$|^blimp.*\.tar',
    'git clone https://github.com/alexwarstadt/blimp')


def rows_of(benchmark: Benchmark, loaded: LoadedModel, data: str | None) -> pandas.DataFrame:
    """Read the columns of a benchmark from a file or a folder of its files; None means the Hub."""
    if data is None and loaded.is_toy:
        raise UserError(f'{benchmark.title} is English, and {loaded.name} '
                        'knows only the toy world; choose an English model with --from')
    hint = f'run {benchmark.command} and give the file or a folder with --data'
    with user_errors(f'{benchmark.title} in {data or benchmark.hub_name}', hint):
        rows = rows_of_hub(benchmark) if data is None else rows_in(Path(data), benchmark)
        if not rows:
            raise ValueError('it has no rows')
        for n, row in enumerate(rows, 1):
            for name in benchmark.columns:
                if not isinstance(row[name], str) or not row[name].strip():
                    raise ValueError(f'row {n} has no text in {name}')
        return pandas.DataFrame(rows)[benchmark.columns]


def rows_of_hub(benchmark: Benchmark) -> list[dict]:
    """Read the rows of all configs of a benchmark on the Hugging Face Hub."""
    import datasets
    quiet_hub(benchmark.hub_name)
    configs = [benchmark.hub_config]
    if benchmark.hub_config is None:
        configs = datasets.get_dataset_config_names(benchmark.hub_name)
    rows = []
    for config in configs:
        rows.extend(datasets.load_dataset(benchmark.hub_name, config, split=benchmark.split))
    return rows


def rows_in(path: Path, benchmark: Benchmark) -> list[dict]:
    """Read the rows of a file, or of a benchmark's files in the first folder that has any."""
    files = [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob('*')) if belongs_to(benchmark, file)]
        in_folder = [file for file in found if file.parent == found[0].parent]
        unpacked = [file for file in in_folder if '.tar' not in file.suffixes]
        files = unpacked or in_folder
    return [row for file in files for row in rows_of_file(file)]


def belongs_to(benchmark: Benchmark, file: Path) -> bool:
    """Tell whether a file has a benchmark's name and, in line 1 of a .jsonl, its last column."""
    if not file.is_file() or not re.search(benchmark.pattern, file.name):
        return False
    if file.suffix != '.jsonl':
        return True
    with file.open('rb') as lines:
        return benchmark.columns[-1].encode() in lines.readline()


def rows_of_file(path: Path) -> list[dict]:
    """Read the rows of a file: JSON lines, a .tar of them, or the raw text of WikiText."""
    if '.tar' in path.suffixes:
        lines = []
        with tarfile.open(path) as tar:
            for member in tar:
                if re.search(r'(^|/)[^./][^/]*\.jsonl$', member.name):  # macOS adds ._NAME.jsonl
                    lines += tar.extractfile(member)
    elif path.suffix == '.jsonl':
        lines = path.read_text('utf-8-sig').split('\n')
    else:
        title = r'\n(?=[ \t]*= (?!=).* =[ \t]*$)'  # " = Title = "
        pages = re.split(title, path.read_text('utf-8-sig'), flags=re.MULTILINE)
        return [{'page': page} for page in pages if page.lstrip().startswith('= ')]
    return [json.loads(line) for line in lines if line.strip()]
