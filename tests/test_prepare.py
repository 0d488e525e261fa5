"""Claims about the data: what goes into the bins, and what the toy world knows of itself."""

import collections
import gzip
import io
import json
import lzma
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare
from rucksack import common as common_py
from rucksack import data as data_py
from rucksack import toy as toy_py

ROOT = Path(__file__).parent.parent
TEXTS = ['The nurse said that she\n\nhad a new  car.\n', 'Żółć, naïve 日本語 <|endoftext|> 😀', 'x' * 3000,
         '\n'.join(f'line {i}   \n\n' for i in range(300))]


def gpt2_or_skip() -> None:
    """Skip a test where GPT-2's vocabulary can't be had."""
    try:
        data_py.load_tokenizer(data_py.GPT2)
    except common_py.UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bins(name: str) -> tuple[np.ndarray, np.ndarray, dict]:
    """Training ids, held-out ids and meta.json of data/NAME."""
    data = Path('data') / name
    meta = json.loads((data / 'meta.json').read_text())
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    return np.fromfile(data / 'train.bin', dtype), np.fromfile(data / 'val.bin', dtype), meta


def documents(ids: np.ndarray) -> list[str]:
    """The texts between end-of-text ids; every document ends with one."""
    encoding = data_py.load_tokenizer(data_py.GPT2)
    assert ids[-1] == encoding.eot_token
    ends = np.flatnonzero(ids == encoding.eot_token)
    return [encoding.decode(part[part != encoding.eot_token].tolist()) for part in np.split(ids,
                                                                                            ends + 1)[:-1]]


def error_of(capsys, *argv: str) -> str:
    """What prepare.py says on standard error, in one line, as it leaves with exit code 2 and no data
    behind."""
    before = sorted(Path('data').rglob('*'))
    with pytest.raises(SystemExit) as stop:
        prepare.main(list(argv))
    line = [x for x in capsys.readouterr().err.splitlines() if 'examples' not in x and 'rows' not in x and x]
    assert stop.value.code == 2 and len(line) == 1 and line[0].startswith('prepare.py: ')
    assert sorted(Path('data').rglob('*')) == before
    return line[0]


# -----------------------------------------------------------------------------
# Files.


def write_parquet(path: Path, column: str = 'text') -> None:
    """A .parquet with the texts."""
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({column: TEXTS}), path)


def test_decoded_bins_are_the_texts_whatever_the_format(folder):
    """jsonl, parquet, text and an unknown extension, plain, .gz and .xz, come back from the bins letter
    for letter."""
    gpt2_or_skip()
    lines = ''.join(json.dumps({'text': t, 'other': i or [i]}) + '\n\n' for i, t in enumerate(TEXTS)).encode()
    Path('a[1].JSONL').write_bytes(lines)
    Path('b.jsonl.xz').write_bytes(lzma.compress(lines))
    Path('c.jsonl.gz').write_bytes(gzip.compress(lines))
    write_parquet(Path('d.parquet'))
    for i, text in enumerate(TEXTS):
        Path(f'e{i}.txt').write_bytes(text.encode())
        Path(f'e{i}.tokens.xz').write_bytes(lzma.compress(text.encode()))
    for name, files in (('a', ['a[1].JSONL']), ('b', ['b.jsonl.xz']), ('c', ['c.jsonl.gz']),
                        ('d', ['d.parquet']),
                        ('e', [f'e{i}.txt' for i in range(4)]), ('f', [f'e{i}.tokens.xz' for i in range(4)])):
        prepare.main([name, '--text', *files, '--val', 'e0.txt', '--num-proc', '2'])
        train, val, meta = bins(name)
        assert documents(train) == TEXTS and documents(val) == TEXTS[:1], name
        assert meta['tokens'] == {'train': len(train), 'val': len(val)} and meta['documents'] == 4
    assert not [p for p in Path('data').iterdir() if p.name.startswith('.')]


def test_a_long_document_encodes_as_a_whole(folder, monkeypatch):
    """A text read in many pieces has the tokens of the text read at once, and one end-of-text."""
    gpt2_or_skip()
    monkeypatch.setattr(data_py, 'PIECE', 50)
    text = "It's  a \t test,\n\n\n  don't   you\u00a0think? " * 60 + '   \n'
    Path('long.txt').write_bytes(text.encode())
    assert len(list(prepare.rows_of_text('long.txt'))) > 20
    prepare.main(['long', '--text', 'long.txt', '--val', 'long.txt', '--num-proc', '1'])
    encoding = tiktoken.get_encoding('gpt2')
    assert bins('long')[0].tolist() == encoding.encode_ordinary(text) + [encoding.eot_token]


def nested_archive(path: Path, texts: list[str]) -> None:
    """A tar of .xz members that are tars of .txt files, as OpenWebText's subsets are."""
    def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    with tarfile.open(path, 'w') as outer:
        for start in range(0, len(texts), 3):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode='w') as inner:
                for i, text in enumerate(texts[start:start + 3]):
                    add(inner, f'{start + i}.txt', text.encode())
            add(outer, f'openwebtext/urlsf-{start}_data.xz', lzma.compress(buffer.getvalue()))


def test_openwebtext_archives_are_read_as_published(folder):
    """Nested archives give stripped documents in order, three or more newlines made two; 0.0005 are
    held out."""
    gpt2_or_skip()
    raw = [f'\n\n Story {i}\n\n\n\nends.\n\nReally\n' for i in range(20)]
    nested_archive(Path('urlsf_subset00.tar'), raw)
    prepare.main(['openwebtext', '--text', 'urlsf_subset00.tar', '--num-proc', '1'])
    train, val, meta = bins('openwebtext')
    expected = [f'Story {i}\n\nends.\n\nReally' for i in range(20)]
    held = documents(val)
    assert len(held) == 1 and held[0] in expected
    assert documents(train) == [t for t in expected if t != held[0]] and meta['documents'] == 20


def test_openwebtext_comes_as_archives_or_as_whole_parquet(monkeypatch):
    """All Parquet shards are taken if they are complete, else the archives; --subsets N takes the first
    N archives."""
    import huggingface_hub
    shards = [f'data/train-{i:05d}-of-00003.parquet' for i in range(3)]
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', lambda filename, **repo: filename)
    for listed, subsets, expected in (
            (shards, None, shards),
            (shards[:2], None, [f'subsets/urlsf_subset{i:02d}.tar' for i in range(21)]),
            (shards, 2, ['subsets/urlsf_subset00.tar', 'subsets/urlsf_subset01.tar'])):
        monkeypatch.setattr(huggingface_hub.HfApi, 'list_repo_files', lambda self, listed=listed,
                            **repo: listed)
        assert prepare.openwebtext_files(subsets) == expected


def test_the_held_out_share_is_about_one_percent_of_the_tokens(folder):
    """1% of the tokens or a little more, in whole documents, other ones with another seed."""
    gpt2_or_skip()
    rng = np.random.default_rng(0)
    texts = [f'{i} ' + 'word ' * int(rng.integers(1, 60)) for i in range(2000)]
    Path('a.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
    held = []
    for seed in (0, 1):
        prepare.main([f's{seed}', '--text', 'a.jsonl', '--seed', str(seed), '--num-proc', '1'])
        train, val, meta = bins(f's{seed}')
        assert 0.01 <= len(val) / (len(train) + len(val)) < 0.012
        assert sorted(documents(train) + documents(val)) == sorted(texts)
        held.append(documents(val))
    assert held[0] != held[1]


def test_a_lone_document_is_cut(folder):
    """Of one book, the last 1% is held out; the two parts are the book, and both end with end-of-text."""
    gpt2_or_skip()
    text = ' '.join(str(i) for i in range(20_000))
    Path('book.txt').write_text(text)
    prepare.main(['book', '--text', 'book.txt', '--num-proc', '1'])
    train, val, _ = bins('book')
    (start,), (end,) = documents(train), documents(val)
    assert start + end == text and 0.009 < len(val) / len(train) < 0.011


PEAK = """
import re, resource, sys
import prepare
prepare.main(sys.argv[1:])
own = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='tells memory as Linux does')
def test_memory_does_not_grow_with_the_corpus(folder):
    """Eight times a corpus of 5 MB, so 36 MB more text and 16 MB more tokens, takes less than 24 MB more
    memory, in the process that takes most: batches on their way, of which the small corpus has too few."""
    gpt2_or_skip()
    rng, peaks = np.random.default_rng(0), []
    words = [''.join(rng.choice(list('abcdefghij'), n)) for n in rng.integers(2, 9, 300)]
    lines = [json.dumps({'text': ' '.join(rng.choice(words, 250))}) + '\n' for _ in range(3500)]
    for copies in (1, 8):
        Path('corpus.jsonl').write_text(''.join(lines) * copies)
        assert 4.5e6 < os.path.getsize('corpus.jsonl') / copies < 6e6
        argv = [sys.executable, '-c', PEAK, f'x{copies}', '--text', 'corpus.jsonl', '--num-proc', '2']
        done = subprocess.run(argv, env=os.environ | {'PYTHONPATH': str(ROOT)}, stdout=subprocess.PIPE)
        peaks.append(int(done.stdout.split()[-1]))
    assert 50 < peaks[1] < peaks[0] + 24


def test_held_out_rows_of_split_documents_are_their_ends():
    """Where documents are several rows, what is held out is whole documents, or the end of one, never a
    middle."""
    rng = np.random.default_rng(0)
    for seed in range(50):
        lengths = rng.integers(1, 9, 30)
        ends = rng.random(30) < 0.3
        ends[-1] = True
        held = prepare.hold_out(lengths, ends, seed, 0.0005, 0.2)
        assert round(0.2 * lengths.sum()) <= held.sum() <= 0.5 * lengths.sum()
        partial = 0
        for rows in np.split(np.arange(30), np.flatnonzero(ends)[:-1] + 1):
            flags = np.concatenate([np.arange(lengths[r]) >= lengths[r] - held[r] for r in rows])
            assert (np.diff(flags.astype(int)) >= 0).all()
            partial += 0 < flags.sum() < len(flags)
        assert partial <= 1


def test_a_finished_folder_is_not_made_twice_nor_replaced(folder, capsys):
    """The same command again does nothing, another is refused without --overwrite, a damaged bin is not
    taken for whole."""
    gpt2_or_skip()
    Path('a.txt').write_text('one two three ' * 200)
    prepare.main(['a', '--text', 'a.txt', '--num-proc', '1'])
    stamp = Path('data/a/train.bin').stat().st_mtime_ns
    prepare.main(['a', '--text', 'a.txt', '--num-proc', '1'])
    assert 'complete' in capsys.readouterr().out and Path('data/a/train.bin').stat().st_mtime_ns == stamp
    assert '--overwrite' in error_of(capsys, 'a', '--text', 'a.txt', '--seed', '1')
    prepare.main(['a', '--text', 'a.txt', '--seed', '1', '--overwrite', '--num-proc', '1'])
    Path('data/a/val.bin').write_bytes(b'')
    assert '--overwrite' in error_of(capsys, 'a', '--text', 'a.txt', '--seed', '1')


def tarfile_of_nothing() -> bytes:
    """A tar without members."""
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode='w').close()
    return buffer.getvalue()


def cut_tar() -> bytes:
    """A tar of two documents, damaged in the header of the second."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for name in ('a.txt', 'b.txt'):
            info = tarfile.TarInfo(name)
            info.size = 600
            tar.addfile(info, io.BytesIO(b'word ' * 120))
    data = bytearray(buffer.getvalue())
    data[512 + 1024 + 3] ^= 255
    return bytes(data)


@pytest.mark.parametrize('name, content, message', [
    ('a.txt', b'\xff\xfe\x00binary', 'is not text'), ('b.txt', b'text\0with zero', 'zero bytes'),
    ('c.txt', b'', 'no text'), ('d.jsonl', b'{"text": "a"}\n{"text": ', 'line 2: it must be'),
    ('e.jsonl', b'{"body": "a"}\n', 'line 1: it must be'),
    ('f.jsonl', b'{"text": 3}\n', 'line 1: it must be'),
    ('g.jsonl', b'{"text": "\\ud800"}\n', 'line 1'), ('h.jsonl', b'', 'no documents'),
    ('i.parquet', b'PAR1', 'no .parquet'), ('j.txt.xz', b'not packed', 'cannot be read'),
    ('k.txt.gz', gzip.compress(b'a' * 999)[:-9], 'cannot be read'), ('l.tar', b'not a tar', 'cannot be read'),
    ('m.tar', cut_tar(), 'damaged tar'), ('n.tar', tarfile_of_nothing(), 'no documents')])
def test_a_file_that_cannot_be_read_is_one_line(name, content, message, folder, capsys):
    """Binary, empty, malformed and truncated files are named in one line, exit code 2, and leave
    nothing behind."""
    gpt2_or_skip()
    Path(name).write_bytes(content)
    Path('good.txt').write_text('good')
    for files in ([name], ['good.txt', name]):  # the second is read in two processes
        line = error_of(capsys, 'bad', '--text', *files, '--num-proc', '2')
        assert message in line and name in line or message == 'no text'
        if message == 'no text':
            break


@pytest.mark.parametrize('argv, message', [
    (['nowhere'], 'toy or openwebtext'), (['a', '--text', 'none.txt'], 'none.txt is not a file'),
    (['../up', '--text', 'x'], "'../up'"), (['toy', '--text', 'x'], 'another NAME'), ([], 'NAME'),
    (['openwebtext', '--subsets', '22'], '1 to 21'), (['toy', '--subsets', '1'], 'openwebtext alone'),
    (['toy', '--num-proc', '0'], 'at least 1'), (['toy', '--frobnicate'], '--help')])
def test_a_bad_command_is_one_line(argv, message, folder, capsys):
    """Exit code 2, one line that names what was given, nothing written."""
    assert message in error_of(capsys, *argv)


def test_without_a_network_one_line_says_what_to_do(folder, capsys, monkeypatch):
    """Neither OpenWebText nor GPT-2's vocabulary can be fetched: one line each, exit code 2."""
    import huggingface_hub
    gpt2_or_skip()

    def no_network(*args, **kwargs):
        raise ConnectionError('no route')
    monkeypatch.setattr(huggingface_hub.HfApi, 'list_repo_files', no_network)
    assert 'give its archives by path' in error_of(capsys, 'openwebtext')
    data_py._encoding.cache_clear()
    monkeypatch.setattr(tiktoken, 'get_encoding', no_network)
    Path('a.txt').write_text('hello')
    assert 'TIKTOKEN_CACHE_DIR' in error_of(capsys, 'a', '--text', 'a.txt', '--num-proc', '1')
    data_py._encoding.cache_clear()


def test_a_vocabulary_beyond_65536_words_takes_uint32():
    """Two bytes hold the ids 0 to 65,535."""
    assert [data_py.token_dtype(n) for n in (50_257, 65_536, 65_537)] == ['uint16', 'uint16', 'uint32']


# -----------------------------------------------------------------------------
# The toy world.


@pytest.fixture(scope='module')
def stories():
    """Stories of the toy world with their surprisal."""
    return toy_py.toy_stories(7, 20_000)


def test_the_world_is_as_large_as_promised(stories):
    """40 role nouns, 30 products of 10 makers, 8 topics, 3 homographs, 30 pairs, 400 to 1,200 words,
    all of them told."""
    words = collections.Counter(w for text, _ in stories for w in re.findall(r'\w+', text))
    assert len(toy_py.ROLES) == 40
    assert len(toy_py.PRODUCTS) == 30 and len(set(toy_py.PRODUCTS.values())) == 10
    assert len(toy_py.TOPICS) == 8 and len(toy_py.HOMOGRAPHS) == 3 and len(toy_py.SYNONYMS) == 30
    assert 400 <= len(words) <= 1200 and min(words.values()) >= 10
    known = [*toy_py.ROLES, *toy_py.PRODUCTS, *sum(toy_py.TOPICS.values(), []), *toy_py.HOMOGRAPHS]
    assert set(known) <= words.keys() and {w for a, b, _ in toy_py.SYNONYMS for w in (a, b)} <= words.keys()


def test_every_word_is_one_token_and_decoding_gives_the_text(stories):
    """The toy tokenizer gives a token a word, falls back to bytes for the rest, and loses nothing."""
    encoding = data_py.load_tokenizer(toy_py.toy_tokenizer([text for text, _ in stories]))
    for text, _ in stories[:300]:
        ids = encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text and len(ids) == len(re.findall(r'\w+|[^\w\s]', text))
    odd = 'Zebras naïvely 日本\n<|endoftext|>'
    assert encoding.decode(encoding.encode_ordinary(odd)) == odd
    assert encoding.eot_token == encoding.n_vocab - 1 not in encoding.encode_ordinary(odd)


@pytest.mark.parametrize('change', [
    {'pattern': '('}, {'pattern': 3}, {'pattern': ''}, {'pattern': '(a+)+$'}, {'pieces': [1]},
    {'pieces': None}, {'pieces': ['ab', 'ab']}, {'pieces': ['a']}, {'pieces': [chr(0xD800)]},
    {'name': None}, {'name': '../gpt2'}, {'pieces': {}, 'pattern': None}])
def test_a_damaged_description_of_a_tokenizer_is_refused(change):
    """What describes no tokenizer is an error of one line, whatever types it holds."""
    description = {**toy_py.toy_tokenizer(['The nurse said']), **change}
    with pytest.raises(common_py.UserError) as error:
        data_py.load_tokenizer({key: value for key, value in description.items() if key != 'name' or value})
    assert '\n' not in str(error.value)


def test_a_tool_belongs_to_no_pronoun():
    """Every tool and place of a she-noun is one of a he-noun, so that only the noun itself tells she
    from he."""
    for column in (1, 2):
        of = {odds: {role[column] for role in toy_py.ROLES.values() if role[0] == odds}
              for odds in (toy_py.SHE, toy_py.HE, toy_py.EVEN)}
        assert of[toy_py.SHE] == of[toy_py.HE] and not of[toy_py.SHE] & of[toy_py.EVEN]


def sentence_patterns() -> list[str]:
    """A regular expression for each kind of sentence, its slots open."""
    lines = [opening.replace('{deed}', deed) for opening in toy_py.OPENINGS
             for deed in toy_py.DEEDS[:None if '{deed}' in opening else 1]]
    lines += toy_py.SEQUELS + toy_py.PRODUCT_LINES + toy_py.TOPIC_LINES
    lines += toy_py.ADJECTIVE_LINES + toy_py.ADVERB_LINES + [h[0] for h in toy_py.HOMOGRAPHS.values()]
    return [re.sub(r'\\{\w+\\}', r'\\w+', re.escape(line)) for line in lines]


def test_a_text_has_one_derivation(stories):
    """A story parses in one way into sentences of the grammar, so that its surprisal is exact."""
    patterns = [re.compile(p + r'(?: |$)') for p in sentence_patterns()]

    def parses(text: str) -> int:
        if not text:
            return 1
        return sum(parses(text[m.end():]) for p in patterns if (m := p.match(text)))

    assert all(parses(text) == 1 for text, _ in stories[:2000])
    slots = [set(toy_py.ROLES), set(toy_py.PRODUCTS), *map(set, toy_py.TOPICS.values()),
             {w for a, b, _ in toy_py.SYNONYMS for w in (a, b)}]
    assert sum(map(len, slots)) == len(set.union(*slots))  # a word tells which list it was drawn from


def test_surprisal_is_that_of_the_told_stories(stories):
    """Product stories, which any text has few of, are told as often as exp(-surprisal) says, to
    sampling error."""
    told = collections.Counter(re.sub(r'\w+(?=[ .])', 'w', text) for text, _ in stories)
    assert len(told) > 100
    by_kind = collections.Counter()
    for text, nats in stories:
        if any(maker in text for maker in toy_py.PRODUCTS.values()):
            by_kind['product'] += 1
            assert nats == pytest.approx(-math.log(toy_py.KINDS['product']) + 3 * math.log(30 * 7))
    assert by_kind['product'] / len(stories) == pytest.approx(toy_py.KINDS['product'], abs=0.01)


def test_talk_stays_on_its_topic_or_wanders(stories):
    """The words of a sentence are of one topic, that of the next sentence is the same as often as WANDER
    says, and the surprisal of a topic story is that of its kind, lines, words and topics."""
    topic_of = {word: label for label, words in toy_py.TOPICS.items() for word in words}
    patterns = [re.sub(r'\\{\w\\}', r'(\\w+)', re.escape(line)) for line in toy_py.TOPIC_LINES]
    stay, told = 1 - toy_py.WANDER + toy_py.WANDER / 8, []
    for text, nats in stories:
        if not set(re.findall(r'\w+', text)) & topic_of.keys():
            continue
        expected, topics = -math.log(toy_py.KINDS['topic']) + math.log(8), []
        for sentence in re.findall(r'[^.]+\.', text):
            words = next(m.groups() for p in patterns if (m := re.fullmatch(p, sentence.strip())))
            assert len({topic_of[word] for word in words}) == 1
            topics.append(topic_of[words[0]])
            expected += math.log(len(toy_py.TOPIC_LINES)) + len(words) * math.log(13)
        same = [a == b for a, b in zip(topics, topics[1:])]
        expected -= sum(math.log(stay if s else toy_py.WANDER / 8) for s in same)
        assert nats == pytest.approx(expected) and len(topics) == 6
        told += same
    assert sum(told) / len(told) == pytest.approx(stay, abs=4 * math.sqrt(0.25 / len(told)))


def test_the_truth_is_in_the_stories(stories):
    """Pronouns follow the odds, products their makers, second words the share of common contexts."""
    text = '\n'.join(text for text, _ in stories)
    for noun in ('nurse', 'mechanic', 'cook'):
        found = collections.Counter(re.findall(rf'\b{noun} (?:said|believes)(?: that)? (she|he|they)\b',
                                               text))
        she = found['she'] / found.total()
        assert she == pytest.approx(toy_py.ROLE_ODDS[noun][0], abs=4 * math.sqrt(0.25 / found.total()))
    for product, maker in re.findall(r'The (\w+) is made by (\w+)', text):
        assert toy_py.PRODUCTS[product] == maker
    for a, b, s in toy_py.SYNONYMS:
        common = set(toy_py.CONTEXTS[a][2])
        things = re.findall(rf'\b{b} (\w+)', text)
        share = sum(t in common for t in things) / len(things)
        assert share == pytest.approx(s, abs=0.15)


def test_the_entropy_in_meta_is_the_mean_surprisal(folder):
    """entropy_per_token is the nats of all stories over their tokens, end-of-text included; val's
    likewise."""
    prepare.main(['toy', '--seed', '3'])
    train, val, meta = bins('toy')
    stories = toy_py.toy_stories(3, meta['documents'])
    nats = [n for _, n in stories]
    assert meta['entropy_per_token'] == pytest.approx(sum(nats) / (len(train) + len(val)))
    n_val = int((val == meta['vocab_size'] - 1).sum())
    assert meta['val_entropy_per_token'] == pytest.approx(sum(nats[-n_val:]) / len(val))
    encoding = data_py.load_tokenizer(meta['tokenizer'])
    assert encoding.decode(train.tolist()).split(data_py.END_OF_TEXT)[0] == stories[0][0]
