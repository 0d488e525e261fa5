"""Claims about the functions in rucksack itself (load, word, save) and its subcommands."""

import doctest
import os
from pathlib import Path

import pytest
import tiktoken
import torch
from helpers import Averages, error_of, lively, save, say

import rucksack
from rucksack import sample
from rucksack.__main__ import VERBS, main
from rucksack.hub import export as export_verb
from rucksack.loaded import from_pretrained
from rucksack.model import Backpack, Config
from rucksack.tokenizer import ENGLISH, load_tokenizer, read_tokenizer, words_tokenizer

pytestmark = pytest.mark.usefixtures('folder')
CONFIG = Config(block_size=8, vocab_size=260, n_layer=1, n_head=1, n_embd=8, n_sense=2)
THREE = {'name': 'gpt2', 'merges': ['\u0120 t', 'h e', '\u0120t he']}
ENCODING = load_tokenizer(THREE)
SPECIAL = {'[PAD]': 0, '<|endoftext|>': 1, '[CLS]': 264}
DESCRIPTIONS = {
    'english': read_tokenizer(ENGLISH), 'three': THREE,
    'special': THREE | {'special': SPECIAL}}


def test_the_examples_of_the_front_door_run():
    """The docstring examples of rucksack print what they show, with the bundled model."""
    model, encoding = rucksack.load('english')
    names = {'model': model, 'encoding': encoding}
    assert doctest.testmod(rucksack, extraglobs=names) == (0, 4)


@pytest.mark.parametrize('description', DESCRIPTIONS.values(), ids=DESCRIPTIONS)
def test_save_describes_an_encoding_as_it_was_made(description):
    """save needs no description of an encoding, because its tokens are enough."""
    encoding = load_tokenizer(description)
    rucksack.save(lively(vocab_size=encoding.n_vocab), encoding, 'mine')
    assert from_pretrained('mine')[1] == description


NOT_FINITE = lively(vocab_size=260)
NOT_FINITE.wte.weight.data[3, 3] = torch.nan
OTHER_SPLIT = tiktoken.Encoding('other', pat_str='.', mergeable_ranks=ENCODING._mergeable_ranks,
                                special_tokens=ENCODING._special_tokens)


class Positional(Averages):
    """A contextualizer of another kind that has position embeddings too."""

    def __init__(self, d: int):
        super().__init__(d, d)
        self.wpe = torch.nn.Embedding(8, d)


REFUSED = {
    'is a GPT-2': (Backpack(CONFIG, contextualizer=Positional(8)), ENCODING),
    'contextualizer': (Backpack(CONFIG, contextualizer=Averages(8, 8)), ENCODING),
    '260': (lively(vocab_size=261), ENCODING),
    'wte.weight': (NOT_FINITE, ENCODING),
    'splits': (lively(vocab_size=260), OTHER_SPLIT),
    'BPE': (lively(vocab_size=259), load_tokenizer(words_tokenizer(['aa bb'])))}


@pytest.mark.parametrize('fact', REFUSED)
def test_save_refuses_what_load_could_not_read(fact):
    """The error says what is wrong with the model or encoding, and nothing is written."""
    with pytest.raises(ValueError, match=fact) as refusal:
        rucksack.save(*REFUSED[fact], 'mine')
    assert '\n' not in str(refusal.value)
    assert list(Path().iterdir()) == []


def test_an_export_is_read_as_its_model_and_never_replaced(capsys):
    """An exported folder loads as the same model, words and texts; another one needs a new name."""
    save('out/run', lively(vocab_size=260).float(), THREE)
    export_verb.main(['a/b/exported', '--from', 'out/run'])
    assert 'a/b/exported: written\n' in capsys.readouterr().out
    assert 'exported' in error_of(export_verb, capsys, 'a/b/exported')
    assert os.listdir('a/b') == ['exported']
    argv = ['--senses-off', '*:1', '--start', 'the', '--max-new-tokens', '9', '--from']
    _, own = say(sample, capsys, *argv, 'out/run').split('\n', 1)
    _, exported = say(sample, capsys, *argv, 'a/b/exported').split('\n', 1)
    assert exported == own


@pytest.mark.parametrize('verb', VERBS)
def test_every_verb_says_how_it_is_used(verb, capsys):
    """Each verb's module can be imported, and prints its help."""
    with pytest.raises(SystemExit) as stop:
        main([verb, '--help'])
    assert not stop.value.code
    assert 'usage:' in capsys.readouterr().out


@pytest.mark.parametrize('argv, named', [
    (['fly'], 'fly'), (['sample', '--temperature=-1'], '-1'), (['probs'], 'LIST')])
def test_a_bad_verb_is_one_line(argv, named, monkeypatch, capsys):
    """An unknown verb, or an error in one, gives one line."""
    monkeypatch.setattr('sys.argv', ['rucksack', *argv])
    with pytest.raises(SystemExit, match='2'):
        main()
    line = capsys.readouterr().err
    assert named in line
    assert line.count('\n') == 1
