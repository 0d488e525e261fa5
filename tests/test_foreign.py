"""Claims about others' weights and vocabularies: they keep their tokens, or are refused."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import TRANSFORMERS

from rucksack import prepare
from rucksack.checkpoint import make_model
from rucksack.data import read_bin, read_meta
from rucksack.errors import UserError
from rucksack.hub.export import export
from rucksack.loaded import from_pretrained, load_model
from rucksack.model import GPT, Config
from rucksack.page.page import write_page
from rucksack.tokenizer import (
    ENGLISH,
    GPT2,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
    vocab_size,
)

MERGES = ['\u0120 t', 'h e', '\u0120t he']
CUT = GPT2 | {'merges': MERGES}  # 256 bytes, 3 merges and end-of-text
TEXT = ' the hen, then'

pytestmark = pytest.mark.usefixtures('folder')


def a_gpt(**changes) -> GPT:
    """Make a small Transformer (a Backpack if it has senses) for the vocabulary above."""
    torch.manual_seed(0)
    shape = dict(block_size=8, vocab_size=260, n_layer=1, n_head=2, n_embd=8, n_sense=0)
    return make_model(Config(**{**shape, **changes}))


def vocab_of(description: dict) -> dict[str, int]:
    """Map tokens, spelled as in the files of a GPT-2, to ids, without special tokens."""
    return tokenizer_files(description)['tokenizer.json']['model']['vocab']


def write_vocabulary(vocab: dict[str, int], merges: list[str]) -> None:
    """Write the tokenizer.json of a byte-level BPE without added tokens."""
    tokenizer = tokenizer_files(CUT)['tokenizer.json'] | {'added_tokens': []}
    tokenizer['model'] |= {'vocab': vocab, 'merges': merges}
    Path('tokenizer.json').write_text(json.dumps(tokenizer), encoding='utf-8-sig')


def test_a_folder_without_tokenizer_json_is_not_taken_for_gpt2():
    """A vocab.json without a tokenizer.json is refused, and the error says how to make one."""
    Path('vocab.json').write_text('{}')
    with pytest.raises(UserError, match='AutoTokenizer'):
        read_tokenizer(Path())


def test_special_tokens_have_ids_and_never_stand_for_text():
    """Special tokens may have any name and id; config.json says which one is end-of-text."""
    vocab = vocab_of(CUT) | {'</s>': 259, '[PAD]': 300}
    write_vocabulary(vocab, MERGES)
    description = read_tokenizer(Path(), 259)
    encoding = load_tokenizer(description)
    assert vocab_size(description) == 301
    assert encoding.eot_token == 259
    assert encoding.encode_ordinary(TEXT) == load_tokenizer(CUT).encode_ordinary(TEXT)
    assert 300 not in encoding.encode_ordinary('[PAD]')


def test_another_vocabulary_goes_all_the_way():
    """A vocabulary with end-of-text as id 0 is exported, read and prepared, but gets no page."""
    vocab = {token: i + 1 for token, i in vocab_of(CUT).items()}
    write_vocabulary(vocab | {'<|endoftext|>': 0, '[PAD]': 265}, MERGES)
    description = read_tokenizer(Path())
    ids = load_tokenizer(description).encode_ordinary(TEXT)
    assert ids == [i + 1 for i in load_tokenizer(CUT).encode_ordinary(TEXT)]
    export(a_gpt(vocab_size=266, n_sense=2), description, 'out')
    assert from_pretrained('out')[1] == description
    assert json.loads(Path('out/config.json').read_text())['eos_token_id'] == 0
    Path('a.txt').write_text(TEXT * 100)
    prepare.main(['own', '--text', 'a.txt', '--like', 'out'])
    meta = read_meta(Path('data/own'))
    assert meta['vocab_size'] == 266
    assert read_bin(Path('data/own/train.bin'), meta)[-1] == 0
    with pytest.raises(UserError, match='ids'):
        write_page(load_model('out', 'cpu'), '', 'a.html')


def test_a_changed_merge_of_the_bundled_vocabulary_is_refused():
    """The merges of english are known by a checksum; with one of them changed, they are checked."""
    tokenizer = json.loads((ENGLISH / 'tokenizer.json').read_text(encoding='utf-8'))
    merges = tokenizer['model']['merges']
    merges[merges.index('\u0120t he')] = '\u0120 the'
    Path('tokenizer.json').write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match='other merges'):
        read_tokenizer(Path())


@pytest.mark.parametrize('is_changed', [False, True])
def test_50000_merges_are_gpt2s_if_all_are(is_changed, gpt2):
    """Swapping two neighbouring merges of GPT-2 makes a different vocabulary."""
    merges = tokenizer_files(GPT2)['tokenizer.json']['model']['merges']
    if is_changed:
        merges[40_000:40_002] = merges[40_001:39_999:-1]
    description = GPT2 | {'merges': merges}
    write_vocabulary(vocab_of(description) | {'<|endoftext|>': 50_256}, merges)
    assert read_tokenizer(Path()) == (description if is_changed else GPT2)


TWO_WAYS = ['b c', 'a b', 'ab c']  # to make abc: tiktoken would take either
CHANGES = {
    'endoftext': lambda t: t['added_tokens'].clear(),
    'order of its merges': lambda t: t['model']['vocab'].update({'he': 256, '\u0120t': 257}),
    'other merges': lambda t: t['model'].update(
        merges=TWO_WAYS, vocab=vocab_of(GPT2 | {'merges': TWO_WAYS})),
    "KeyError: '#'": lambda t: t['model']['vocab'].pop('#'),
    'add_prefix_space': lambda t: t['pre_tokenizer']['pretokenizers'][-1].update(
        add_prefix_space=True),
    'use_regex': lambda t: t['pre_tokenizer']['pretokenizers'][-1].update(use_regex=False),
    'ignore_merges': lambda t: t['model'].update(ignore_merges=True),
    'Digits': lambda t: t['pre_tokenizer']['pretokenizers'].insert(
        0, {'type': 'Digits', 'individual_digits': True}),
    'normalizer': lambda t: t.update(normalizer={'type': 'NFC'}),
    'post_processor': lambda t: t.update(
        post_processor={'type': 'TemplateProcessing', 'special_tokens': {'<s>': {'id': 'x'}}}),
    'added token': lambda t: t['added_tokens'].append(
        {'id': 260, 'content': 'the', 'special': False})}


@pytest.mark.parametrize('part', CHANGES)
def test_a_tokenizer_that_cuts_texts_otherwise_is_refused(part):
    """The error names what in tokenizer.json would make tiktoken split texts differently."""
    tokenizer = tokenizer_files(CUT)['tokenizer.json']
    Path('tokenizer.json').write_text(json.dumps(tokenizer))
    assert read_tokenizer(Path()) == CUT
    CHANGES[part](tokenizer)
    Path('tokenizer.json').write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=part):
        read_tokenizer(Path())


TRAIN_THERE = """
import json, sys
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, trainers
texts = json.load(open('texts.json'))
first, last = ByteLevelBPETokenizer(), ByteLevelBPETokenizer()
first.train_from_iterator(texts, vocab_size=400, special_tokens=['<|endoftext|>'])
last.train_from_iterator(texts, vocab_size=400)
last.add_special_tokens(['<|endoftext|>'])
plain = Tokenizer(models.BPE())
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
plain.train_from_iterator(texts, trainers.BpeTrainer(
    vocab_size=400, special_tokens=['<pad>', '<|endoftext|>'],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
for name, tokenizer in {'first': first, 'last': last, 'plain': plain}.items():
    tokenizer.save(name + '.json')
    ids = [[*tokenizer.encode(text).ids, tokenizer.token_to_id('<|endoftext|>')] for text in texts]
    json.dump(sum(ids, []), open(name + '.ids', 'w'))
"""
LANGUAGES = [
    "I'm told the nurse's hen won't   lay.\n\n 12 eggs", 'Die Straße heißt »Öffnung«, nicht wahr?',
    'Zażółć gęślą jaźń', 'Съешь ещё этих мягких булок', 'שלום עליכם', 'नमस्ते दुनिया', 'ภาษาไทย',
    '日本語のテキスト 😀']


@pytest.mark.slow
@pytest.mark.skipif(not TRANSFORMERS, reason='no tokenizers')
@pytest.mark.parametrize('name', ['first', 'last', 'plain'])
def test_like_takes_a_tokenizer_trained_with_tokenizers(name):
    """In eight languages, a bin has the ids that a tokenizer trained with tokenizers gives."""
    Path('texts.json').write_text(json.dumps(LANGUAGES * 9))
    subprocess.run([TRANSFORMERS, '-c', TRAIN_THERE], check=True, capture_output=True)
    Path('a.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in LANGUAGES * 9))
    Path('val.txt').write_text('held out')
    prepare.main(['a', '--text', 'a.jsonl', '--val', 'val.txt', '--like', f'{name}.json'])
    found = read_bin(Path('data/a/train.bin'), read_meta(Path('data/a')))
    assert found.tolist() == json.loads(Path(f'{name}.ids').read_text())


def test_rows_beyond_the_ids_of_the_tokenizer_are_padding():
    """Extra rows are padding in a Transformer of any vocabulary; too few rows are refused."""
    export(a_gpt(vocab_size=320), CUT, 'padded')
    settings = json.loads(Path('padded/config.json').read_text())
    del settings['n_vocab']
    Path('padded/config.json').write_text(json.dumps(settings))
    model, _ = from_pretrained('padded')
    assert model.config.n_vocab == 260
    assert model.config.vocab_size == 320
    export(a_gpt(vocab_size=250), CUT, 'short')
    with pytest.raises(UserError, match='260'):
        from_pretrained('short')
