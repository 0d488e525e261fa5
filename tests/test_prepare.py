"""Claims about prepare.py: bins, held-out text, and what a failure leaves behind."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import tiktoken
from helpers import ROOT, error_of, lively, offline, posix, save, tar

from rucksack import prepare
from rucksack.data import read_bin, read_meta
from rucksack.tokenizer import ENGLISH, GPT2, load_tokenizer, words_tokenizer

LIKE = ['--like', 'english']  # a vocabulary that comes with the code
TEXTS = [
    'The nurse said that she\n\nhad a new  car.\n',
    'Żółć, naïve 日本語 <|endoftext|> 😀',
    'a' + ' ' * 10_000 + 'b',
    '\n'.join(f'line {i}   \n\n' for i in range(300)),
    '2020-01-01']  # not a date


pytestmark = pytest.mark.usefixtures('folder')


def texts_in(name: str, split: str) -> list[str]:
    """Decode the texts in a bin, each of which ends with the end-of-text id."""
    folder = Path('data', name)
    meta = read_meta(folder)
    encoding = load_tokenizer(meta['tokenizer'])
    ids = read_bin(folder / f'{split}.bin', meta)
    ends = np.flatnonzero(ids == encoding.eot_token)
    assert ends[-1] == len(ids) - 1
    return [encoding.decode(part[:-1].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def make(name: str, *argv: str) -> tuple[list[str], list[str]]:
    """Run prepare.py; return training and held-out texts; assert that nothing half-made stays."""
    folder = Path('data', name)
    prepare.main([name, *LIKE, *argv])
    train = texts_in(name, 'train')
    val = texts_in(name, 'val')
    assert read_meta(folder)['documents'] == len(train) + len(val)
    assert not [*folder.glob('.*'), *folder.glob('*.partial')]
    return train, val


def jsonl(texts: list, **fields) -> bytes:
    """Make a .jsonl of texts, with empty lines and other fields."""
    return ''.join(json.dumps({'text': text, **fields}) + '\n\n' for text in texts).encode()


ROWS = [None, *TEXTS, '', None]
PROSE = TEXTS[0].encode()
FILES = {  # four files with all texts, then four with at most one
    'a[1].JSONL': (
        jsonl(ROWS[:3], tag=None) + jsonl(ROWS[3:5], tag=3, more={'a': [1]}) + jsonl(ROWS[5:])),
    'b.jsonl.xz': lzma.compress(jsonl(ROWS, id='x')),
    'c.json.gz': gzip.compress(jsonl(ROWS), mtime=0),
    'd.parquet': pandas.DataFrame({'other': 0.5, 'text': ROWS}).to_parquet(),
    'e.txt': b'', 'f.txt': PROSE, 'g.md.gz': gzip.compress(PROSE, mtime=0), 'h': PROSE}


def test_text_takes_files_of_all_formats_together():
    """Texts stay exact, whatever other fields hold; null and '' are dropped; --val is held out."""
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    train, val = make('all', '--text', *FILES, '--val', 'h')
    assert train == 4 * TEXTS + 2 * [TEXTS[0]]
    assert val == [TEXTS[0]]


def test_hub_takes_datasets_with_config_and_split(monkeypatch):
    """--hub reads each dataset; --field says where the text of a row is."""
    offline(monkeypatch)
    monkeypatch.setattr('datasets.config.HF_DATASETS_CACHE', 'cache')
    folder = Path('owner/stories')  # a folder can stand in for a Hub repository
    folder.mkdir(parents=True)
    for name in ('train', 'test'):
        rows = [json.dumps({'id': i, 'body': f'{name} {i}.'}) for i in range(200)]
        (folder / f'{name}.jsonl').write_text('\n'.join(rows))
    datasets = ['owner/stories', 'owner/stories:default:test[:10%]', 'owner/stories::test[190:]']
    train, val = make('hub', '--hub', *datasets, '--field', 'body')
    tests = [*range(20), *range(190, 200)]
    expected = [f'train {i}.' for i in range(200)] + [f'test {i}.' for i in tests]
    assert sorted(train + val) == sorted(expected)


def published(monkeypatch, *names: str) -> None:
    """Let the Hub's OpenWebText have these files, each in the working directory."""
    monkeypatch.setattr('huggingface_hub.list_repo_files', lambda repo, repo_type: names)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda repo, name, repo_type: name)


@pytest.mark.parametrize('n, text', [(2, 'Parquet'), (1, 'tar')])
def test_openwebtext_is_parquet_only_if_whole(n, text, monkeypatch):
    """If one of two Parquet files is missing, the archives are read instead."""
    names = [f'{i}-of-00002.parquet' for i in ('00000', '00001')]
    for name in names:
        pandas.DataFrame({'text': ['Parquet'] * 9}).to_parquet(name)
    Path('00.tar').write_bytes(tar({f'{i}.txt': b'tar' for i in range(9)}))
    published(monkeypatch, *names[:n], '00.tar')
    train, _ = make('openwebtext')
    assert set(train) == {text}


def test_openwebtext_keeps_whole_documents(monkeypatch):
    """Documents are not cut, have one blank line at most in a row, and 0.05% are held out."""
    raw = [f'Story {i}' for i in range(3000)]
    raw[7] = 'word ' * 10_000 + 'end'
    raw[8] = '\n\nOne\r\n\r\n\r\n\r\nends.\n'
    stories = tar({f'{i}.txt': text.encode() for i, text in enumerate(raw)})
    raw[8] = 'One\n\nends.'
    Path('00.tar').write_bytes(tar({'a/0_data.xz': lzma.compress(stories)}))
    published(monkeypatch, '00.tar')
    train, val = make('openwebtext')
    assert len(val) == 2
    assert train == [text for text in raw if text not in val]


def test_copies_of_held_out_documents_are_counted(capsys):
    """A line counts the texts on both sides of the split, if there are any."""
    Path('val.txt').write_text('held')
    Path('a.jsonl').write_bytes(jsonl(['a', 'b']))
    Path('b.jsonl').write_bytes(jsonl(['held', 'a', 'b', 'held']))
    make('a', '--text', 'a.jsonl', '--val', 'val.txt')
    make('b', '--text', 'b.jsonl', '--val', 'val.txt')
    first, second = capsys.readouterr().out.split('data/a:')
    assert 'identical' not in first
    assert 'identical to held-out ones: 2\n' in second


def test_seed_alone_chooses_the_one_percent_that_is_held_out():
    """The seed chooses the held-out 1%; the rest keeps its order, and no document is lost."""
    texts = [f'{i} ' + 'word ' * (i % 60) for i in range(2000)]
    Path('a.jsonl').write_bytes(jsonl(texts))
    train, val = make('a', '--text', 'a.jsonl')
    _, other_val = make('b', '--text', 'a.jsonl', '--seed', '1')
    assert len(val) == 20
    assert set(val) <= set(texts)
    assert train == [text for text in texts if text not in val]
    assert other_val != val
    assert make('c', '--text', 'a.jsonl') == (train, val)


BOOK = '\n\n'.join(f'Paragraph {i} of a book. ' + 'It goes on. ' * 30 for i in range(300))


def test_long_documents_are_cut_among_short_ones():
    """Books become pieces of up to 20,000 characters that end with a paragraph."""
    articles = [f'Article {i}.' for i in range(400)]
    Path('a.jsonl').write_bytes(jsonl([BOOK, *articles]))
    train, val = make('a', '--text', 'a.jsonl')
    pieces = [text for text in train + val if text not in articles]
    *lengths, longest = sorted(len(piece) for piece in pieces)
    assert sum(lengths) + longest == len(BOOK)
    assert sum(piece.endswith('\n\n') for piece in pieces) == len(pieces) - 1
    assert lengths[1] > 19_000  # the last piece may be short
    assert longest <= 20_002


@pytest.mark.parametrize('unit, end, count', [
    ('one\ntwo', '\n\n', 900), ('word', ' ', 9000), ('x', '', 30_000)],
    ids=['paragraphs', 'words', 'letters'])
def test_a_lone_text_is_cut_where_it_hurts_least(unit, end, count):
    """A lone text becomes 100 pieces or more, cut after a paragraph or word; ten are held out."""
    text = end.join(f'{i} {unit}' if end else unit for i in range(count))
    Path('book.txt').write_text(text)
    train, val = make('book', '--text', 'book.txt')
    pieces = train + val
    assert 100 <= len(pieces) <= 2 * max(100, len(text) / 20_000)
    assert len(val) == 10
    assert max(len(piece) for piece in pieces) <= 20_002
    assert sum(piece.endswith(end) for piece in pieces) >= len(pieces) - 1
    assert sorted(''.join(pieces)) == sorted(text)


SENTENCES = ['An unhappy nurse.', "I'd  go, she'll stay.", *(text[:40] for text in TEXTS)]
VOCAB_BPE = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe'


def ids_of_sentences(*argv: str) -> list[int]:
    """Return the ids of SENTENCES in a bin that prepare.py writes."""
    Path('a.jsonl').write_bytes(jsonl(SENTENCES))
    Path('val.txt').write_text('held')
    prepare.main(['a', '--text', 'a.jsonl', '--val', 'val.txt', *argv])
    return np.fromfile('data/a/train.bin', '<u2').tolist()


def test_like_english_needs_no_download(monkeypatch):
    """The merges in meta.json make the ids, and end-of-text is the last of 16,641."""
    monkeypatch.delattr(tiktoken, 'get_encoding')
    ids = ids_of_sentences(*LIKE)
    meta = read_meta(Path('data/a'))
    assert meta['vocab_size'] == 16_641
    encoding = load_tokenizer(meta['tokenizer'])
    expected = [[*encoding.encode_ordinary(text), 16_640] for text in SENTENCES]
    assert ids == sum(expected, [])


def test_a_vocabulary_beyond_uint16_is_refused(capsys):
    """A tokenizer with more ids than a .bin can hold is refused before any text is read."""
    tokenizer = json.loads((ENGLISH / 'tokenizer.json').read_text(encoding='utf-8'))
    tokenizer['added_tokens'].append({'id': 1 << 16, 'content': '[PAD]', 'special': True})
    Path('big.json').write_text(json.dumps(tokenizer))
    Path('a.txt').write_text(BOOK)
    said = error_of(prepare, capsys, 'a', '--text', 'a.txt', '--like', 'big.json')
    assert '65,537' in said
    assert not Path('data').exists()


def test_without_like_the_ids_are_those_of_gpt2(gpt2):
    """Without --like, ids are GPT-2's, with end-of-text after each text."""
    expected = [[*gpt2.encode_ordinary(text), 50256] for text in SENTENCES]
    assert ids_of_sentences() == sum(expected, [])
    assert read_meta(Path('data/a'))['tokenizer'] == GPT2


def test_like_takes_the_tokenizer_of_a_model():
    """A model's tokenizer is stored in meta.json, and the texts come back whole from its ids."""
    tokenizer = words_tokenizer(['It goes on. of a'])
    n_vocab = load_tokenizer(tokenizer).n_vocab
    save('out/mine', lively(block_size=16, vocab_size=n_vocab).float(), tokenizer)
    Path('a.txt').write_text(BOOK)
    prepare.main(['a', '--text', 'a.txt', '--like', 'out/mine'])
    assert read_meta(Path('data/a'))['tokenizer'] == tokenizer
    texts = texts_in('a', 'train') + texts_in('a', 'val')
    assert sorted(''.join(texts)) == sorted(BOOK)


def contents(folder: str) -> dict[str, bytes]:
    """Read each file in a folder."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@pytest.mark.parametrize('argv, named', [
    (['--text', 'a.txt', '--seed', '1'], 'data/a'),
    (['--text', 'a.txt', 'bad.jsonl', '--overwrite'], 'bad.jsonl')], ids=['without', 'failing'])
def test_overwrite_alone_replaces_and_only_if_it_succeeds(argv, named, capsys):
    """Without --overwrite, or if prepare.py fails, every file in the folder stays as it was."""
    Path('a.txt').write_text(BOOK)
    Path('bad.jsonl').write_text('{"te')
    make('a', '--text', 'a.txt')
    before = contents('data/a')
    assert named in error_of(prepare, capsys, 'a', *LIKE, *argv)
    assert contents('data/a') == before


@posix
def test_overwrite_replaces_three_files_where_links_lead():
    """Links to a folder and a file stay links, and a person's own files there stay."""
    Path('a.txt').write_text(BOOK)
    Path('disk/old').mkdir(parents=True)
    Path('disk/old/mine').write_text('my own')
    Path('data').mkdir()
    Path('data/a').symlink_to('../disk/old')
    Path('disk/old/val.bin').symlink_to('../val_elsewhere')
    make('a', '--text', 'a.txt', '--overwrite')
    assert Path('data/a').is_symlink()
    assert Path('data/a/val.bin').is_symlink()
    assert sorted(os.listdir('disk')) == ['old', 'val_elsewhere']
    assert Path('disk/old/mine').read_text() == 'my own'
    assert sorted(os.listdir('disk/old')) == ['meta.json', 'mine', 'train.bin', 'val.bin']


def test_like_a_folder_needs_no_torch():
    """A run with --text and --like english, and --help, never import torch."""
    Path('a.txt').write_text(BOOK)
    Path('torch.py').write_text('raise SystemExit("torch was imported")')
    for argv in (['--help'], ['a', '--text', 'a.txt', '--like', 'english']):
        command = [sys.executable, ROOT / 'prepare.py', *argv]
        subprocess.run(command, check=True, env=os.environ | {'PYTHONPATH': os.getcwd()})
    assert len(texts_in('a', 'val')) == 10


@pytest.fixture
def halfway():
    """Start a prepare.py that makes data/own from a pipe with 3,000 documents; write 2,500."""
    os.mkfifo('a.jsonl')
    argv = [sys.executable, ROOT / 'prepare.py', 'own', *LIKE, '--text', 'a.jsonl']
    process = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with open('a.jsonl', 'wb') as pipe:
        pipe.write(jsonl([f'{i} {i * i} ' * 50 for i in range(2500)]))
        pipe.flush()
        process.pipe = pipe
        yield process
        process.kill()
        process.communicate()


@posix
@pytest.mark.slow
def test_a_second_prepare_gives_way(halfway, capsys):
    """A second prepare.py is refused in one line, and the first one finishes the data."""
    argv = ['own', *LIKE, '--text', 'b.txt', '--overwrite']
    assert 'data/own' in error_of(prepare, capsys, *argv)
    halfway.pipe.write(jsonl([f'{i}' for i in range(500)]))
    halfway.pipe.close()
    _, said = halfway.communicate(timeout=120)
    assert said == ''
    assert halfway.returncode == 0
    assert len(texts_in('own', 'train') + texts_in('own', 'val')) == 3000


@posix
@pytest.mark.slow
def test_a_killed_prepare_leaves_nothing_that_looks_complete(halfway):
    """No file has its final name; the next prepare.py makes the data and leaves no other files."""
    halfway.kill()
    halfway.communicate(timeout=120)
    assert not set(os.listdir('data/own')).intersection(['train.bin', 'val.bin', 'meta.json'])
    Path('b.txt').write_text(BOOK)
    make('own', '--text', 'b.txt')


@pytest.mark.parametrize('last, stays', [('train.bin', True), ('meta.json', False),
                                         ('val.bin', False)])
def test_overwrite_that_is_interrupted_is_found(last, stays, monkeypatch, capsys):
    """If train.bin cannot be replaced, all stays as it was; later, the checksums do not match."""
    Path('a.txt').write_text(BOOK)
    make('a', '--text', 'a.txt')
    before = contents('data/a')
    replace = os.replace

    def stopping(old, new):
        if new.name == last:
            raise OSError('stopped')
        replace(old, new)

    monkeypatch.setattr(os, 'replace', stopping)
    argv = ['a', *LIKE, '--text', 'a.txt', '--seed', '1', '--overwrite']
    assert 'stopped' in error_of(prepare, capsys, *argv)
    assert (contents('data/a') == before) == stays
    assert sorted(os.listdir('data/a')) == ['meta.json', 'train.bin', 'val.bin']
    if not stays:
        with pytest.raises(ValueError, match='meta.json'):
            for name in ('train', 'val'):
                read_bin(Path(f'data/a/{name}.bin'), read_meta(Path('data/a')))
