"""Claims about prepare.py: what goes into the bins, what is refused, what a failure leaves behind."""

import gzip
import io
import json
import lzma
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import regex
import tiktoken
from conftest import ROOT, error_of

import prepare
from rucksack import data
from rucksack.common import UserError

TEXTS = ['The nurse said that she\n\nhad a new  car.\n', 'Żółć, naïve 日本語 <|endoftext|> 😀',
         'a' + ' ' * 1_000_000 + 'b', '\n'.join(f'line {i}   \n\n' for i in range(300))]


@pytest.fixture
def gpt2(tmp_path, monkeypatch):
    """An empty working directory; a skip where GPT-2's vocabulary cannot be had."""
    monkeypatch.chdir(tmp_path)
    try:
        data.load_tokenizer(data.GPT2)
    except UserError as error:
        pytest.skip(str(error))


def make(name: str, *argv: str) -> tuple[list[str], list[str]]:
    """Run prepare.py: the texts to train on and those held out, each with the end-of-text id at its end."""
    prepare.main([name, *argv])
    folder, texts = Path('data', name), []
    meta = data.read_meta(folder)
    encoding = data.load_tokenizer(meta['tokenizer'])
    for split in ('train', 'val'):
        ids = data.read_bin(folder, split, meta, checksum=True)
        ends = np.flatnonzero(ids == encoding.eot_token)
        assert ends[-1] == len(ids) - 1
        texts.append([encoding.decode(part[:-1].tolist()) for part in np.split(ids, ends[:-1] + 1)])
    assert meta['documents'] == sum(map(len, texts)) and not list(Path('data').glob('.*'))
    assert sorted(os.listdir(folder)) == ['meta.json', 'train.bin', 'val.bin']
    return texts[0], texts[1]


def jsonl(texts: list, **fields) -> bytes:
    """A .jsonl of texts, with empty lines and other fields."""
    return ''.join(json.dumps({'text': text, **fields}) + '\n\n' for text in texts).encode()


def parquet(texts: list, column: str = 'text') -> bytes:
    """A .parquet of texts, as large strings, with another column."""
    columns, file = {'other': [0.5] * len(texts), column: pyarrow.array(texts, 'large_string')}, io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    """A tar of files."""
    with tarfile.open(fileobj=(file := io.BytesIO()), mode='w') as archive:
        for name, content in members.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def test_decoded_bins_are_the_texts_whatever_the_format(gpt2):
    """Each format, plain and packed, gives the texts letter for letter, a million spaces too; all do in one
    command, in their order, though other columns differ. Empty documents, as of null, have no tokens."""
    rows, clean, prose = [None, *TEXTS, '', None], [text.strip() for text in TEXTS], TEXTS[1].encode()
    packed = tar({f'{i}.txt': text.encode() for i, text in enumerate(clean[:3])})
    files = {'a[1].JSONL': jsonl(rows, id=3), 'b.jsonl.xz': lzma.compress(jsonl(rows, id='x')),
             'c.json.gz': gzip.compress(json.dumps([{'text': text} for text in rows]).encode()),
             'd.parquet': parquet(rows), 'e.parquet.xz': lzma.compress(parquet(rows)), 'f.txt': prose,
             'g.md.gz': gzip.compress(prose), 'h': prose, 'i.tar': packed, 'j.tar.gz': gzip.compress(packed)}
    expected = [TEXTS] * 5 + [TEXTS[1:2]] * 3 + [clean[:3]] * 2
    for (name, content), texts in zip(files.items(), expected):
        Path(name).write_bytes(content)
        assert make(name[0], '--text', name, '--val', 'a[1].JSONL', '--num-proc', '1') == (texts, TEXTS)
    for path, content in (('null.jsonl', jsonl([None])), ('empty.txt', b'')):
        Path(path).write_bytes(content)
    both = make('all', '--text', 'null.jsonl', *files, 'empty.txt', '--val', 'h', '--num-proc', '2')
    assert both == (sum(expected, []), TEXTS[1:2])


def test_archives_of_openwebtext_are_read_as_published(gpt2):
    """Tars of .xz tars give stripped documents, three newlines or more made two; 0.0005 are held out."""
    raw = [f'\n\n Story {i}\n\n\n\nends.\n\nReally\n' for i in range(3000)]
    inner = [tar({f'{i}.txt': raw[i].encode() for i in range(k, k + 1000)}) for k in (0, 1000, 2000)]
    Path('00.tar').write_bytes(tar({f'{k}_data.xz': lzma.compress(part) for k, part in enumerate(inner)}))
    train, val = make('openwebtext', '--text', '00.tar', '--num-proc', '2')
    expected = [f'Story {i}\n\nends.\n\nReally' for i in range(3000)]
    assert len(val) == 2 and train == [text for text in expected if text not in val]


def test_openwebtext_comes_as_parquet_if_whole_else_as_archives(monkeypatch):
    """All Parquet shards are taken if none is missing, else the archives."""
    shards = [f'data/train-{i:05d}-of-00003.parquet' for i in range(3)]
    archives = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(21)]
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', lambda repo, name, **kind: name)
    for listed, expected in ((shards, shards), (shards[:2], archives), ([], archives)):
        info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in ['README.md', *listed]])
        monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', lambda self, repo, info=info: info)
        assert prepare.openwebtext_files() == expected


def test_one_percent_is_held_out_by_the_seed_and_the_rest_keeps_its_order(gpt2):
    """20 of 2,000 documents, other ones with another seed, the same in any number of processes."""
    texts = [f'{i} ' + 'word ' * (i % 60) for i in range(2000)]
    Path('a.jsonl').write_bytes(jsonl(texts))
    runs = ('a', '0', '1'), ('b', '0', '2'), ('c', '1', '1')
    (train, val), again, (_, other) = (make(name, '--text', 'a.jsonl', '--seed', seed, '--num-proc', n)
                                       for name, seed, n in runs)
    assert len(val) == 20 and again == (train, val) and other != val
    assert train == [text for text in texts if text not in val] and set(val) <= set(texts)


def test_a_folder_a_dataset_by_name_and_another_field_give_their_texts(gpt2, monkeypatch):
    """--text FOLDER is the files below it that can be read; --hub takes a dataset with its config and split;
    --field says where the text is."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    Path('books/old').mkdir(parents=True)
    files = {'books/old/a.jsonl': jsonl(['a', 'b']), 'books/z.txt': b'z', 'books/.git': b'no',
             'books/cover.png': b'no', 'val.txt': b'held'}
    for name, content in files.items():
        Path(name).write_bytes(content)
    assert make('books', '--text', 'books', '--val', 'val.txt') == (['a', 'b', 'z'], ['held'])
    Path('owner/stories').mkdir(parents=True)  # as a repository on the Hub, whose name a folder can have, too
    Path('owner/stories/README.md').write_text(
        '---\nconfigs:\n- config_name: main\n  data_files: [{split: train, path: a.jsonl}]\n'
        '- config_name: more\n  data_files: [{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]\n'
        '---\n')
    for name, text in (('a', 'A story'), ('b', 'A test')):
        rows = [json.dumps({'id': i, 'body': f'{text} {i}.'}) for i in range(200)]
        Path(f'owner/stories/{name}.jsonl').write_text('\n'.join(rows))
    for name, text in (('main', 'A story'), ('main:train', 'A story'), ('more:test', 'A test')):
        train, val = make('hub', '--hub', f'owner/stories:{name}', '--field', 'body', '--overwrite')
        assert sorted(train + val) == sorted(f'{text} {i}.' for i in range(200)) and len(val) == 2


def test_a_dataset_that_cannot_be_had_is_one_line(gpt2, capsys, monkeypatch):
    """No such config, split or field, or no network: the name as it was given, and what is there."""
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    Path('owner/stories').mkdir(parents=True)
    Path('owner/stories/a.jsonl').write_text('{"id": 1, "body": "x"}')
    for name, message in (('owner/stories', 'name one by --field: id, body'), ('owner/stories:x', "'x'"),
                          ('owner/stories:default:dev', '"dev"'), ('owner/none', "Couldn't reach")):
        line = error_of(prepare, capsys, 'bad', '--hub', name, printed=0)
        assert f'hub:{name}' in line and message in line and not list(Path().glob('data/*'))


def test_long_documents_are_cut_so_that_held_out_text_is_of_all_kinds(gpt2):
    """Books among many short documents become pieces of up to 20,000 characters that end with a paragraph;
    with --val, and below that length, a document stays whole."""
    book = '\n\n'.join(f'Paragraph {i} of a book. ' + 'It goes on. ' * 30 for i in range(300))
    Path('a.jsonl').write_bytes(jsonl([book, *(f'Article {i}.' for i in range(400)), book.upper()]))
    train, val = make('a', '--text', 'a.jsonl')
    pieces = [text for text in train + val if not text.startswith('Article')]
    assert len(train + val) - len(pieces) == 400 and sum(map(len, pieces)) == 2 * len(book)
    assert sum(text.endswith('\n\n') for text in pieces) == len(pieces) - 2
    assert 19_000 < min(sorted(map(len, pieces))[2:]) and max(map(len, pieces)) <= 20_002
    assert len(pieces) < 2 * len(book) / 19_000 + 2
    Path('val.jsonl').write_bytes(jsonl(['x']))
    assert make('b', '--text', 'a.jsonl', '--val', 'val.jsonl')[0][0] == book


def test_a_cut_vocabulary_is_gpt2s_first_merges_and_needs_no_other(gpt2, monkeypatch):
    """Its ids are those that GPT-2's first N merges make, its end-of-text is 256 + N; reading and decoding
    need nothing but meta.json; with all 50,000 merges it is GPT-2's."""
    whole, texts = data.load_tokenizer(data.GPT2), ['An unhappy nurse.', "I'd", *(t[:3000] for t in TEXTS)]
    Path('a.jsonl').write_bytes(jsonl(texts * 30))
    for n in (1, 300, 16_384, 50_000):
        prepare.main(['a', '--text', 'a.jsonl', '--merges', str(n), '--overwrite', '--num-proc', '1'])
        meta = data.read_meta(Path('data/a'))
        cut = data.load_tokenizer(meta['tokenizer'])
        assert meta['vocab_size'] == 257 + n and cut.eot_token == 256 + n
        rank = {tuple(merge.split(' ')): i for i, merge in enumerate(meta['tokenizer']['merges'])}
        assert len(rank) == n
        for text in texts:
            ids = cut.encode_ordinary(text)
            assert cut.decode(ids) == text and (n < 50_000 or ids == whole.encode_ordinary(text))
            if len(text) < 100:  # by hand: every pre-token apart, the earliest merge first
                assert ids == by_hand(text, rank)
    train, val = make('a', '--text', 'a.jsonl', '--merges', '300', '--overwrite')
    assert sorted(train + val) == sorted(texts * 30)


def by_hand(text: str, rank: dict[tuple[str, str], int]) -> list[int]:
    """Byte-pair encoding as the merges alone define it, as transformers does it."""
    name, ids = data.NAMES, []
    vocabulary = [*name.values(), *(a + b for a, b in rank)]
    for word in regex.findall(data.r50k_pat_str, text):
        parts = [name[byte] for byte in word.encode()]
        while pairs := [pair for pair in zip(parts, parts[1:]) if pair in rank]:
            best = min(pairs, key=rank.get)
            at = next(i for i, pair in enumerate(zip(parts, parts[1:])) if pair == best)
            parts[at:at + 2] = [''.join(best)]
        ids += map(vocabulary.index, parts)
    return ids


@pytest.mark.parametrize('unit, end, count', [
    ('one\ntwo', '\n\n', 900), ('word ' * 900, '\n\n', 600), ('a line', '\n', 2000), ('word', ' ', 9000),
    ('x', '', 30_000)])
def test_a_lone_text_is_cut_where_it_hurts_least(unit, end, count, gpt2):
    """It becomes 100 pieces or more, of at most some 20,000 characters, that end with a paragraph, or a line,
    or a word, and are together the text; one in a hundred is held out."""
    text = end.join(f'{i} {unit}' if end else unit for i in range(count))
    Path('book.txt').write_text(text)
    train, val = make('book', '--text', 'book.txt', '--num-proc', '2')
    pieces = train + val
    assert 100 <= len(pieces) <= 2 * max(100, len(text) / 20_000) and len(val) == round(len(pieces) / 100)
    assert max(map(len, pieces)) <= 20_002 and sum(piece.endswith(end) for piece in pieces) >= len(pieces) - 1
    assert sum(map(len, pieces)) == len(text) and all(piece in text for piece in pieces)


@pytest.mark.parametrize('name, content, message', [
    ('a.csv', b'x', 'not one of those it reads: .jsonl'), ('b.txt', b'\xff\xfe', "'utf-8' codec can't"),
    ('c.txt', b'', 'too little'), ('d.txt', b'x', 'too little'), ('e.jsonl', b'', 'StopIteration'),
    ('f.jsonl', b'{"text": "a"}\n{"te', 'JSON parse'), ('g.jsonl', b'{"text": "a"}\n{"text": 3}', '"text"'),
    ('h.jsonl', b'{"body": "a"}', 'column "text"'), ('i.jsonl', b'{"text": "\xff"}', 'Invalid UTF8'),
    ('j.parquet', b'PAR1', 'size'), ('k.parquet', parquet(['a'], 'body'), 'column "text"'),
    ('l.txt.xz', b'unpacked', 'not supported'), ('m.txt.gz', gzip.compress(b'ab' * 999)[:-9], 'ended before'),
    ('n.tar', b'not a tar', 'truncated'), ('o.tar', tar({'a.txt': b'a' * 9999})[:5000], 'unexpected end')])
def test_a_file_that_cannot_be_read_is_one_line(name, content, message, gpt2, capsys):
    """It names the file, the exit code is 2, and nothing stays behind; so if it is the second of two."""
    Path(name).write_bytes(content)
    Path('good.txt').write_text('good')
    for files in ([name], ['good.txt', name])[:1 if 'little' in message else 2]:
        line = error_of(prepare, capsys, 'bad', '--text', *files, printed=0)
        assert name in line and message in line and not list(Path().glob('data/*'))


@pytest.mark.parametrize('argv, message', [
    ('none', '--text or --hub'), ('a --text x --merges 0', 'from 1 to 50000'), ('toy --hub a/b', 'no text'),
    ('a --text x --merges 50001', 'from 1 to 50000'), ('a --text none.txt', 'none.txt is not a'),
    ('', 'NAME'), ('toy --frob', 'help'),
    ('a/b --text x', "'a/b'"), ('../a --text x', "'../a'"), ('a --merges 50001', 'from 1 to 50000'),
    ('toy --num-proc 0', 'from 1'), ('toy --seed -1', 'from 0'), ('toy --text x', 'no')])
def test_a_bad_command_is_one_line(argv, message, tmp_path, monkeypatch, capsys):
    """Exit code 2, one line that names what was given, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert message in error_of(prepare, capsys, *argv.split()) and not Path('data').exists()


def test_without_a_network_one_line_says_what_to_do(gpt2, capsys, monkeypatch):
    """Neither OpenWebText nor GPT-2's vocabulary can be fetched: one line each, exit code 2."""
    def no_network(*args, **kwargs):
        raise ConnectionError('no route')
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', no_network)
    assert '(no route); connect, or use --text FILE' in error_of(prepare, capsys, 'openwebtext')
    monkeypatch.setattr(tiktoken, 'get_encoding', no_network)
    data._encoding.cache_clear()
    assert 'TIKTOKEN_CACHE_DIR' in error_of(prepare, capsys, 'openwebtext')


def test_a_made_folder_is_neither_made_twice_nor_replaced(gpt2, capsys):
    """The same command again says so and does nothing, another is refused, --overwrite replaces all of it."""
    Path('a.txt').write_text(' '.join(map(str, range(9000))))
    _, val = make('a', '--text', 'a.txt')
    stamp = os.stat('data/a/train.bin').st_mtime_ns
    make('a', '--text', 'a.txt', '--num-proc', '1')
    assert 'data/a was made by this command' in capsys.readouterr().out
    assert '--overwrite' in error_of(prepare, capsys, 'a', '--text', 'a.txt', '--seed', '1')
    Path('a.txt').touch()
    assert '--overwrite' in error_of(prepare, capsys, 'a', '--text', 'a.txt')
    assert os.stat('data/a/train.bin').st_mtime_ns == stamp
    Path('data/a/mine').touch()
    assert make('a', '--text', 'a.txt', '--seed', '1', '--overwrite')[1] != val


def start(*argv: str, limit: int = resource.RLIM_INFINITY) -> subprocess.Popen:
    """Run prepare.py in a session of its own, where a file can have so many bytes."""
    return subprocess.Popen([sys.executable, ROOT / 'prepare.py', *argv], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, start_new_session=True,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))


@pytest.mark.slow
@pytest.mark.parametrize('limit, name', [(100_000, 'own'), (1_500_000, 'own'), (1_000_000, 'toy')])
def test_a_full_disk_is_one_line_and_leaves_nothing(limit, name, gpt2):
    """Space ends while it reads, while it encodes (ids take more bytes than this text), or writes bins."""
    Path('a.jsonl').write_bytes(jsonl(['\x01\x02' * 1000] * 500))
    process = start(name, *['--text', 'a.jsonl'] * (name == 'own'), limit=limit)
    assert process.communicate()[1] == 'prepare.py: [Errno 27] File too large\n'
    assert process.returncode == 2 and os.listdir('data') == []


@pytest.mark.slow
@pytest.mark.parametrize('number, code, error, left', [
    (0, 0, '', ['own']), (signal.SIGINT, 130, 'prepare.py: interrupted\n', []),
    (signal.SIGKILL, -signal.SIGKILL, '', ['.own.partial'])])
def test_a_second_prepare_gives_way_and_a_stopped_one_leaves_nothing(number, code, error, left, gpt2, capsys):
    """Two at once do not mix. After Ctrl-C nothing is left, after a kill nothing that looks complete, and no
    process; then the next one makes all of it."""
    Path('a.jsonl').write_bytes(jsonl([f'{i} {i * i} {i ** 3} ' * 200 for i in range(3000)]))
    process = start('own', '--text', 'a.jsonl', '--num-proc', '2')
    while not any(Path('data').rglob('tmp*')):  # to which a process writes what it encodes
        assert process.poll() is None and not time.sleep(0.01)
    os.killpg(process.pid, signal.SIGSTOP)  # or it could be done before the signal comes
    assert 'another prepare.py is making data/own' in error_of(prepare, capsys, 'own', '--text', 'a.jsonl')
    os.kill(process.pid, number) if number == signal.SIGKILL else os.killpg(process.pid, number)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == error  # all of its processes have closed it
    assert process.returncode == code and os.listdir('data') == left
    assert len(sum(make('own', '--text', 'a.jsonl'), [])) == 3000
