"""Claims about the functions in rucksack itself (load, word, save) and its subcommands."""

import doctest
import os
import signal
from pathlib import Path

import pytest
import tiktoken
import torch
from helpers import Averages, lively

import rucksack
from rucksack import sample
from rucksack.__main__ import main
from rucksack.errors import user_errors
from rucksack.model import Backpack, Config
from rucksack.tokenizer import (
    description_of,
    gpt2_tokenizer,
    load_tokenizer,
    tokenizer_json,
    words_tokenizer,
)
from rucksack.weights import export

pytestmark = pytest.mark.usefixtures('folder')
ENCODING = load_tokenizer(gpt2_tokenizer(3))
CONFIG = Config(block_size=8, vocab_size=260, n_layer=1, n_head=1, n_embd=8, n_sense=2)
MERGES = ['\u0120 t', 'h e', '\u0120t he']
DESCRIPTIONS = [
    words_tokenizer(['the nurse, é']), gpt2_tokenizer(300), {'name': 'gpt2', 'merges': MERGES},
    {'name': 'gpt2', 'merges': MERGES, 'ids': [*range(2, 261)],
     'special': {'[PAD]': 0, '<|endoftext|>': 1, '[CLS]': 264}}]


def test_the_examples_of_the_front_door_run():
    """The docstring examples of rucksack print what they show, with the bundled model."""
    model, encoding = rucksack.load('english')
    names = {'model': model, 'encoding': encoding}
    assert doctest.testmod(rucksack, extraglobs=names) == (0, 4)


@pytest.mark.parametrize('description', DESCRIPTIONS, ids=['words', 'merges', 'three', 'ids'])
def test_an_encoding_is_described_as_it_was_made(description):
    """save needs no description of an encoding, because its tokens are enough."""
    assert description_of(tokenizer_json(load_tokenizer(description))) == description


NOT_FINITE = lively(vocab_size=260)
NOT_FINITE.wte.weight.data[3, 3] = torch.nan
REFUSED = {
    'contextualizer': Backpack(CONFIG, contextualizer=Averages(8, 8)),
    '260': lively(vocab_size=261),
    'wte.weight': NOT_FINITE}


@pytest.mark.parametrize('fact', REFUSED)
def test_save_refuses_what_load_could_not_read(fact):
    """The error says what is wrong with the model, and nothing is written."""
    with pytest.raises(ValueError, match=fact) as refusal:
        rucksack.save(REFUSED[fact], ENCODING, 'mine')
    assert '\n' not in str(refusal.value)
    assert list(Path().iterdir()) == []


def test_save_refuses_an_encoding_that_cuts_texts_otherwise():
    """An encoding with its own split is refused, because load would split texts as GPT-2 does."""
    other = tiktoken.Encoding('other', pat_str='.', mergeable_ranks=ENCODING._mergeable_ranks,
                              special_tokens=ENCODING._special_tokens)
    with pytest.raises(ValueError, match='splits'):
        rucksack.save(lively(vocab_size=other.n_vocab), other, 'mine')


def test_another_contextualizer_is_not_exported():
    """An export with another contextualizer is refused, and nothing is written."""
    with pytest.raises(ValueError, match='contextualizer'):
        export(REFUSED['contextualizer'], gpt2_tokenizer(3), 'mine')
    assert list(Path().iterdir()) == []


def test_a_terminated_export_leaves_nothing(monkeypatch):
    """An export terminated by SIGTERM removes its temporary folder."""
    monkeypatch.delenv('RANK', raising=False)
    default = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr('os.rename', lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match='143'):
        sample.main(['--from', 'english', '--export', 'mine'])
    signal.signal(signal.SIGTERM, default)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize('kind', [NameError, AssertionError])
def test_a_bug_of_ours_is_not_shown_as_a_damaged_file(kind):
    """A bug in our code keeps its traceback."""
    with pytest.raises(kind), user_errors('a file'):
        raise kind


@pytest.mark.parametrize('argv, named', [
    ([], 'sample'), (['fly'], 'fly'), (['sample', '--temperature=-1'], '-1')])
def test_a_bad_verb_is_one_line(argv, named, monkeypatch, capsys):
    """A missing or unknown subcommand, or an error in one, gives one line."""
    monkeypatch.setattr('sys.argv', ['rucksack', *argv])
    with pytest.raises(SystemExit, match='2'):
        main()
    line = capsys.readouterr().err
    assert named in line
    assert line.count('\n') == 1
