"""Random models and small benchmarks for the tests of the tables."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch

from model import Backpack, Config
from rucksack.data import load_tokenizer
from rucksack.table import Subject
from rucksack.toy import toy_tokenizer

WORDS = """the nurse said that she he they was music guitar song . table chair food dining sports fashion
    style film tv video travel adventure gaming fitness health"""
PASSAGES = [{'text': text} for text in ('He took the ball and threw the ball', ' A song\n', 'It was sick')]
PAIRS = [dict(zip(('UID', 'linguistics_term', 'sentence_good', 'sentence_bad'), pair)) for pair in (
    ('one', 'agreement', 'The cats sleep.', 'The cats sleeps.'), ('two', 'islands', 'I ran.', 'Me ran.'),
    ('two', 'islands', 'Who left?', 'Left who?'))]
PAGES = [{'page': ' = One = \n \n 1 @,@ 000 km , " so far " . \n = = Deeper = = \n one ( so @-@ called ) . '},
         {'page': ' = Two = \n end . \n'}]


def toy_subject(k: int = 4, padding: int = 0, seed: int = 0, **shape) -> Subject:
    """A random model with clear preferences, of a vocabulary made of WORDS, with rows of padding."""
    encoding = load_tokenizer(tokenizer := toy_tokenizer([f' {word}' for word in WORDS.split()]))
    shape = dict(block_size=24, n_layer=1, n_head=2, n_embd=16, n_vocab=encoding.n_vocab) | shape
    torch.manual_seed(seed)
    model = Backpack(Config(n_sense=k, vocab_size=encoding.n_vocab + padding, **shape))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.tokenizer = tokenizer
    return Subject('toy', model.eval(), encoding)


def save(folder: str, model: Backpack, **settings) -> None:
    """A checkpoint with what eval.py reads of one."""
    Path(folder).mkdir(parents=True)
    torch.save({'model': model.state_dict(), 'model_config': asdict(model.config), 'settings': settings,
                'step': 10, 'tokenizer': model.tokenizer}, f'{folder}/ckpt.pt')


def write_benchmarks(folder: Path) -> Path:
    """The three benchmarks of Table 2 in a folder; lines end as on Windows."""
    (folder / 'blimp').mkdir(parents=True)
    for name, rows in (('lambada_test', PASSAGES), ('blimp/one', PAIRS[:1]), ('blimp/two', PAIRS[1:])):
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\r\n' for row in rows))
    text = '\n'.join(['\ufeff ', *(page['page'] for page in PAGES)])
    (folder / 'wiki.test.raw').write_bytes(text.replace('\n', '\r\n').encode())
    return folder


def flags(data: Path | None = None, **more) -> Namespace:
    """The command line as a table reads it."""
    args = dict(table='x', data=data and str(data), device='cpu', runs=[], size=None, sweep=None)
    return Namespace(**args | more)
