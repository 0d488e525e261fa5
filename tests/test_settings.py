"""Claims about settings: where they come from, how they are spelled, and the project's configs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import ROOT, SIZES, SMALL, error_of

from rucksack import train
from rucksack.run import config_for, out_dir_of, parse_settings
from rucksack.train import Settings


def parse_args(words: list[str]) -> tuple[Settings, set[str]]:
    """Parse a command line into settings, out_dir included, and the names that were typed."""
    s, typed, configs = parse_settings(Settings, words)
    return replace(s, out_dir=s.out_dir or out_dir_of(s, typed, configs)), typed


CONFIGS = sorted(path.stem for path in (ROOT / 'config').glob('*.py'))


def test_the_command_line_wins_over_files_over_defaults(folder):
    """Flags (with - or _) win over files, later files over earlier ones, files over defaults."""
    lines = ['\ufeff# a comment', 'n_layer = 3', 'n_head = 2  # two', 'beta1 = .5',
             'compile = False']
    Path('a.py').write_text('\n'.join(lines), encoding='utf-8')
    Path('b.py').write_text('n_layer = 4\nlearning_rate = 1\n')
    words = ['a.py', 'b.py', '--overwrite', '--n-head=5', '--batch_size=3']
    s, flags = parse_args(words)
    changed = dict(n_layer=4, n_head=5, beta1=0.5, compile=False, learning_rate=1.0, batch_size=3,
                   overwrite=True)
    assert s == Settings(**changed, out_dir='out/b')
    assert flags == {'overwrite', 'n_head', 'batch_size'}


@pytest.mark.parametrize('line', [
    "n_layer = open('marker', 'w')", 'n_layers = 3', 'n_layer = 4 * 8', "out_dir = 'out/' + 'x'",
    '"""A docstring."""'])
def test_a_config_line_that_does_not_fit_is_named(line, tiny, capsys):
    """A line that is no key = value is named with its file, and nothing in a file is executed."""
    Path('b.py').write_text(f'n_head = 2\n{line}\n')
    error = error_of(train, capsys, *SMALL, 'b.py')
    assert 'b.py: ' in error
    assert line.partition(' ')[0].strip('"') in error
    assert sorted(os.listdir()) == ['b.py', 'data']


def test_a_tilde_is_the_home_folder(tiny, monkeypatch):
    """A shell leaves the ~ after = alone, so out_dir, dataset and init_from expand it."""
    monkeypatch.setenv('HOME', str(tiny))
    monkeypatch.setenv('USERPROFILE', str(tiny))
    train.main([*SMALL, '--max_iters=0', '--out_dir=~/runs/a', '--dataset=~/data/tiny'])
    train.main([*SMALL, '--max_iters=0', '--out_dir=~/runs/b', '--init_from=~/runs/a'])
    assert sorted(os.listdir('runs')) == ['a', 'b']


@pytest.mark.parametrize('model, end', [('backpack', ''), ('gpt', '_gpt')])
@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_makes_a_model(name, model, end):
    """Every config makes a model, and the name of the run's folder says which kind it holds."""
    s, _ = parse_args([f'{ROOT}/config/{name}.py', f'--model={model}'])
    assert config_for(s, {'vocab_size': 50257}).n_sense == (16 if model == 'backpack' else 0)
    assert s.out_dir == f'out/{name.removeprefix("train_")}{end}'


@pytest.mark.parametrize('name, size, n_steps, hidden', [
    ('train_micro', 'micro', 100_000, 0), ('train_mini', 'mini', 100_000, 0),
    ('train_small', 'small', 100_000, 0), ('senses', 'mini', 50_000, 640)])
def test_the_papers_sizes_train_as_published(name, size, n_steps, hidden):
    """Configs take 100,000 steps of 2^19 tokens (50,000 for Table 8), at the published rates."""
    s, _ = parse_args([f'{ROOT}/config/{name}.py'])
    published = SIZES[size] | dict(
        dataset='openwebtext', max_iters=n_steps, warmup_iters=n_steps // 20, block_size=512,
        tokens_per_step=2 ** 19, sense_hidden=hidden, dropout=0.1, optimizer='adamw',
        learning_rate=6e-4, beta1=0.9, beta2=0.999, weight_decay=0.1, decay_embeddings=False,
        grad_clip=1.0)
    assert {key: getattr(s, key) for key in published} == published
    assert s.gradient_accumulation_steps % 4 == 0
