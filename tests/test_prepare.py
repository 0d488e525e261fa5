"""Claims about prepare.py: bins, held-out text, and what a failure leaves behind."""

import errno
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import regex
import tiktoken
from helpers import ROOT, error_of, lively, offline, save, tar
from tiktoken.load import read_file_cached
from tiktoken_ext.openai_public import r50k_pat_str

from rucksack import prepare
from rucksack.data import read_bin, read_meta
from rucksack.documents import openwebtext_files
from rucksack.tokenizer import CHARACTER_OF, GPT2, gpt2_tokenizer, load_tokenizer, words_tokenizer

MERGES = ['--merges', '300']  # a vocabulary that comes with the code
TEXTS = [
    'The nurse said that she\n\nhad a new  car.\n',
    'Żółć, naïve 日本語 <|endoftext|> 😀',
    'a' + ' ' * 1_000_000 + 'b',
    '\n'.join(f'line {i}   \n\n' for i in range(300)),
    '2020-01-01']  # not a date


@pytest.fixture(autouse=True)
def no_network(folder, monkeypatch):
    """Give each test an empty working directory and no network."""
    offline(monkeypatch)


@pytest.fixture
def gpt2():
    """Load GPT-2's encoding, or skip the test if it is not available."""
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as error:  # tiktoken and requests raise errors of their own
        pytest.skip(f'no GPT-2 vocabulary: {error}')


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
    prepare.main([name, *MERGES, *argv])
    train = texts_in(name, 'train')
    val = texts_in(name, 'val')
    assert read_meta(folder)['documents'] == len(train) + len(val)
    assert not [*folder.glob('.*'), *folder.glob('*.partial')]
    return train, val


def jsonl(texts: list, **fields) -> bytes:
    """Make a .jsonl of texts, with empty lines and other fields."""
    return ''.join(json.dumps({'text': text, **fields}) + '\n\n' for text in texts).encode()


ROWS = [None, *TEXTS, '', None]
JSON = json.dumps([{'text': text} for text in ROWS]).encode()
PARQUET = pandas.DataFrame({'other': 0.5, 'text': ROWS}).to_parquet()
PROSE = TEXTS[0].encode()
STRIPPED = [text.strip() for text in TEXTS[:3]]
TAR = tar({f'{i}.txt': text.encode() for i, text in enumerate(STRIPPED)})
FILES = {  # the content of a file, and the texts in it
    'a[1].JSONL': (jsonl(ROWS, id=3), TEXTS),
    'b.jsonl.xz': (lzma.compress(jsonl(ROWS, id='x')), TEXTS),
    'c.json.gz': (gzip.compress(JSON, mtime=0), TEXTS),
    'd.parquet': (PARQUET, TEXTS),
    'e.parquet.xz': (lzma.compress(PARQUET), TEXTS),
    'f.txt': (PROSE, [TEXTS[0]]),
    'g.md.gz': (gzip.compress(PROSE, mtime=0), [TEXTS[0]]),
    'h': (PROSE, [TEXTS[0]]),
    'i.tar': (TAR, STRIPPED),
    'j.tar.gz': (gzip.compress(TAR, mtime=0), STRIPPED)}


def test_text_takes_files_of_all_formats_together():
    """Texts stay exact and in order; null and '' are dropped; a file in --val is not trained on."""
    for name, (content, _) in FILES.items():
        Path(name).write_bytes(content)
    Path('empty.txt').touch()
    train, val = make('all', '--text', *FILES, 'empty.txt', '--val', 'h')
    assert train == [text for name, (_, texts) in FILES.items() if name != 'h' for text in texts]
    assert val == [TEXTS[0]]


@pytest.mark.parametrize('splits, read', [
    ([''], ['A story']), ([':default:test'], ['A test']), (['', '::test'], ['A story', 'A test'])])
def test_hub_takes_datasets_with_config_and_split(splits, read, monkeypatch):
    """--hub reads each dataset; --field says where the text of a row is."""
    monkeypatch.setattr('datasets.config.HF_DATASETS_CACHE', 'cache')
    folder = Path('owner/stories')  # a folder can stand in for a Hub repository
    folder.mkdir(parents=True)
    for name, body in (('train', 'A story'), ('test', 'A test')):
        rows = [json.dumps({'id': i, 'body': f'{body} {i}.'}) for i in range(200)]
        (folder / f'{name}.jsonl').write_text('\n'.join(rows))
    datasets = [f'owner/stories{split}' for split in splits]
    train, val = make('hub', '--hub', *datasets, '--field', 'body')
    assert sorted(train + val) == sorted(f'{text} {i}.' for text in read for i in range(200))


@pytest.mark.parametrize('n, kind', [(2, 'parquet'), (1, 'tar')])
def test_openwebtext_is_parquet_only_if_whole(n, kind, monkeypatch):
    """If one of two Parquet files is missing, the archives are read instead."""
    names = [*(f'{i:05d}-of-00002.parquet' for i in range(n)), '00.tar']
    monkeypatch.setattr('huggingface_hub.list_repo_files', lambda repo, repo_type: names)
    monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda repo, name, repo_type: name)
    assert {name.rpartition('.')[2] for name in openwebtext_files()} == {kind}


def test_archives_of_openwebtext_are_read_as_published():
    """Tars of .xz tars give whole documents, with double newlines at most; 0.05% are held out."""
    raw = [f'\n\n Story {i}\n\n\n\nends.\n\nReally\n' for i in range(3000)]
    raw[7] = 'word ' * 10_000
    members = {}
    for first in (0, 1000, 2000):
        inner = {f'{i}.txt': raw[i].encode() for i in range(first, first + 1000)}
        members[f'{first}_data.xz'] = lzma.compress(tar(inner))
    Path('00.tar').write_bytes(tar(members))
    train, val = make('openwebtext', '--text', '00.tar')
    assert len(val) == 2
    expected = [f'Story {i}\n\nends.\n\nReally' for i in range(3000)]
    expected[7] = raw[7].strip()
    assert train == [text for text in expected if text not in val]


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


def test_copies_of_held_out_documents_are_counted(capsys):
    """A line counts the texts on both sides of the split, if there are any."""
    texts = [f'{i}' for i in range(20)]
    Path('a.jsonl').write_bytes(jsonl(texts))
    Path('b.jsonl').write_bytes(jsonl([*texts, 'held']))
    for name in ('a', 'b'):
        Path('val.jsonl').write_bytes(jsonl(['held']))
        make(name, '--text', f'{name}.jsonl', '--val', 'val.jsonl')
    first, second = capsys.readouterr().out.split('data/a:')
    assert 'identical' not in first
    assert 'identical to held-out ones: 1\n' in second


def test_a_full_disk_is_not_the_fault_of_the_text(monkeypatch, capsys):
    """The error on a full disk names the folder that cannot be written."""
    def write(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    Path('a.txt').write_text(BOOK)
    monkeypatch.setattr('datasets.arrow_writer.ArrowWriter.write', write)
    line = error_of(prepare, capsys, 'a', *MERGES, '--text', 'a.txt')
    assert 'data/a' in line
    assert 'a.txt' not in line
    assert os.listdir() == ['a.txt']


BOOK = '\n\n'.join(f'Paragraph {i} of a book. ' + 'It goes on. ' * 30 for i in range(300))


def test_long_documents_are_cut_among_short_ones():
    """Books become pieces of up to 20,000 characters that end with a paragraph."""
    articles = [f'Article {i}.' for i in range(400)]
    Path('a.jsonl').write_bytes(jsonl([BOOK, *articles, BOOK.upper()]))
    train, val = make('a', '--text', 'a.jsonl')
    pieces = [text for text in train + val if text not in articles]
    lengths = sorted(len(piece) for piece in pieces)
    end_of_paragraph = [piece for piece in pieces if piece.endswith('\n\n')]
    assert len(train + val) == len(pieces) + len(articles)
    assert sum(lengths) == 2 * len(BOOK)
    assert len(end_of_paragraph) == len(pieces) - 2  # all but the last of each book
    assert lengths[2] > 19_000  # the last of each book may be short
    assert lengths[-1] <= 20_002


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


def by_hand(text: str, merges: list[str]) -> list[int]:
    """Encode a text as merges define it: each word on its own, the earliest merge first."""
    vocabulary = [*CHARACTER_OF.values(), *(merge.replace(' ', '') for merge in merges)]
    ids = []
    for word in regex.findall(r50k_pat_str, text):
        parts = [CHARACTER_OF[byte] for byte in word.encode()]
        for merge in merges:
            pair = merge.split(' ')
            i = 0
            while i < len(parts) - 1:
                if parts[i:i + 2] == pair:
                    parts[i:i + 2] = [''.join(pair)]
                i += 1
        ids += [vocabulary.index(part) for part in parts]
    return ids


def ids_of_sentences(*argv: str) -> list[int]:
    """Return the ids of SENTENCES in a bin that prepare.py writes."""
    Path('a.jsonl').write_bytes(jsonl(SENTENCES))
    Path('val.txt').write_text('held')
    prepare.main(['a', '--text', 'a.jsonl', '--val', 'val.txt', *argv])
    return np.fromfile('data/a/train.bin', '<u2').tolist()


@pytest.mark.parametrize('n', [300, 16_384])
def test_merges_up_to_16384_need_no_download(n, monkeypatch):
    """The merges in meta.json make the ids, and end-of-text is the last of 257 + N."""
    monkeypatch.delattr(tiktoken, 'get_encoding')
    ids = ids_of_sentences('--merges', str(n))
    meta = read_meta(Path('data/a'))
    merges = meta['tokenizer']['merges']
    assert len(merges) == n
    assert meta['vocab_size'] == 257 + n
    expected = [[*by_hand(text, merges), 256 + n] for text in SENTENCES]
    assert ids == sum(expected, [])


@pytest.mark.parametrize('n', [16_384, 49_999])
def test_merges_are_the_first_of_gpt2(n, gpt2):
    """The bundled merges, and those cut from GPT-2's, match vocab.bpe."""
    lines = read_file_cached(VOCAB_BPE).decode().split('\n')
    first_merges = lines[1:1 + n]  # after the version
    assert gpt2_tokenizer(n) == {'name': 'gpt2', 'merges': first_merges}


def test_all_merges_are_gpt2():
    """With all 50,000 merges, the tokenizer is called GPT-2's, as that of an export is."""
    assert gpt2_tokenizer(50_000) == gpt2_tokenizer(None)


def test_a_vocabulary_beyond_uint16_is_refused(monkeypatch, capsys):
    """A tokenizer with more ids than a .bin can hold is refused before any text is read."""
    monkeypatch.setattr(prepare, 'LARGEST_VOCAB', 16_640)
    Path('a.txt').write_text(BOOK)
    said = error_of(prepare, capsys, 'a', '--text', 'a.txt', '--like', 'english')
    assert '16,641' in said
    assert not Path('data').exists()


def test_without_merges_the_ids_are_those_of_gpt2(gpt2):
    """Without --merges, ids are GPT-2's, with end-of-text after each text."""
    expected = [[*gpt2.encode_ordinary(text), 50256] for text in SENTENCES]
    assert ids_of_sentences() == sum(expected, [])
    assert read_meta(Path('data/a'))['tokenizer'] == GPT2


@pytest.mark.parametrize('tokenizer', [gpt2_tokenizer(40), words_tokenizer(['It goes on. of a'])],
                         ids=['merges', 'words'])
def test_like_takes_the_tokenizer_of_a_model(tokenizer):
    """A model's tokenizer is stored in meta.json, and the texts come back whole from its ids."""
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
    assert named in error_of(prepare, capsys, 'a', *MERGES, *argv)
    assert contents('data/a') == before
    assert os.listdir('data') == ['a']


def test_overwrite_replaces_three_files_and_touches_no_other():
    """The user's own text, cache or model in the folder stays."""
    folder = Path('data/a')
    (folder / 'cache').mkdir(parents=True)
    mine = ['a.txt', 'notes.md', 'cache/mine', 'meta.json.txt']
    for name in mine:
        (folder / name).write_text(BOOK)
    _, old_val = make('a', '--text', 'data/a/a.txt')
    _, new_val = make('a', '--text', 'data/a/a.txt', '--seed', '1', '--overwrite')
    assert new_val != old_val
    for name in mine:
        assert (folder / name).read_text() == BOOK, name


def test_overwrite_goes_where_links_lead():
    """Links to a folder and a file stay links, and other files there stay."""
    Path('a.txt').write_text(BOOK)
    Path('disk/old').mkdir(parents=True)
    Path('disk/old/mine').touch()
    Path('data').mkdir()
    Path('data/a').symlink_to('../disk/old')
    Path('disk/old/val.bin').symlink_to('../val_elsewhere')
    make('a', '--text', 'a.txt', '--overwrite')
    assert Path('data/a').is_symlink()
    assert Path('data/a/val.bin').is_symlink()
    assert sorted(os.listdir('disk')) == ['old', 'val_elsewhere']
    assert sorted(os.listdir('disk/old')) == ['meta.json', 'mine', 'train.bin', 'val.bin']


@pytest.fixture
def halfway():
    """Start a prepare.py that makes data/own from 3,000 documents; pause it while encoding."""
    texts = [f'{i} {i * i} {i ** 3} ' * 500 for i in range(3000)]
    Path('a.jsonl').write_bytes(jsonl(texts))
    argv = [sys.executable, ROOT / 'prepare.py', 'own', *MERGES, '--text', 'a.jsonl']
    process = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not any(path.stat().st_size for path in Path('data/own').glob('train.bin.partial')):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_second_prepare_gives_way(halfway, capsys):
    """A second prepare.py is refused in one line, and the first one finishes the data."""
    argv = ['own', *MERGES, '--text', 'a.jsonl', '--overwrite']
    assert 'data/own' in error_of(prepare, capsys, *argv)
    assert not Path('data/own/meta.json').exists()
    halfway.send_signal(signal.SIGCONT)
    _, said = halfway.communicate(timeout=120)
    assert said == ''
    assert halfway.returncode == 0
    assert len(texts_in('own', 'train') + texts_in('own', 'val')) == 3000
    assert os.listdir('data') == ['own']


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(halfway):
    """After Ctrl-C, prepare.py prints one line and exits with the code of an interrupt."""
    halfway.send_signal(signal.SIGINT)
    halfway.send_signal(signal.SIGCONT)
    _, said = halfway.communicate(timeout=120)
    assert halfway.returncode == 130
    assert said.count('\n') == 1
    assert not Path('data').exists()


@pytest.mark.slow
def test_a_killed_prepare_leaves_nothing_that_looks_complete(halfway):
    """No file has its final name; the next prepare.py makes the data and leaves no other files."""
    halfway.kill()
    halfway.communicate(timeout=120)
    assert not set(os.listdir('data/own')).intersection(['train.bin', 'val.bin', 'meta.json'])
    train, val = make('own', '--text', 'a.jsonl')
    assert len(train + val) == 3000


@pytest.mark.parametrize('last', ['train.bin', 'val.bin'])
def test_overwrite_that_is_interrupted_is_found(last, monkeypatch, capsys):
    """If a file never gets its final name, the checksums in meta.json do not match the bins."""
    Path('a.txt').write_text(BOOK)
    make('a', '--text', 'a.txt')
    replace = os.replace

    def stopping(old, new):
        if new.name == last:
            raise OSError('stopped')
        replace(old, new)

    monkeypatch.setattr(os, 'replace', stopping)
    argv = ['a', *MERGES, '--text', 'a.txt', '--seed', '1', '--overwrite']
    assert 'stopped' in error_of(prepare, capsys, *argv)
    folder = Path('data/a')
    assert sorted(os.listdir(folder)) == ['meta.json', 'train.bin', 'val.bin']
    with pytest.raises(ValueError, match='meta.json'):
        read_bin(folder / 'val.bin', read_meta(folder))
