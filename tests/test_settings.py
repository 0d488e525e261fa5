"""Claims about settings: config files, flags, and what is said where they do not fit."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, error_of

import train
from rucksack.start import random_model
from train import parse_args


def test_settings_come_from_defaults_then_files_then_the_command_line(tmp_path):
    """A later source wins; --overwrite is --overwrite=True, --batch-size 3 is --batch_size=3, 1 is 1.0."""
    (tmp_path / 'a.py').write_text("\ufeff# comment\nn_layer = 3\nlearning_rate = 1  # one\ndataset = 'x'\n")
    s = parse_args(['--overwrite', str(tmp_path / 'a.py'), '--n_layer=5', '--batch_size=3', '--compile=False'])
    assert (s.n_layer, s.learning_rate, s.dataset, s.compile, s.n_head) == (5, 1.0, 'x', False, 12)
    assert type(s.learning_rate) is float and (s.out_dir, s.batch_size, s.overwrite) == ('out/a', 3, True)
    assert s == parse_args([str(tmp_path / 'a.py'), '--n-layer', '5', '--batch-size', '3', '--overwrite', 'True',
                            '--compile', 'False'])


def test_the_command_that_goes_on_is_one_that_runs(monkeypatch, capsys):
    """It has all flags but those of the start, quoted; under torchrun as many processes, which must divide."""
    argv, again = ['--out_dir=a b', '--overwrite', '--init_from=resume'], "train.py '--out_dir=a b'"
    assert parse_args(argv).command == f'python {again}'
    for name, value in (('RANK', '0'), ('LOCAL_WORLD_SIZE', '4'), ('WORLD_SIZE', '8')):
        monkeypatch.setenv(name, value)
    argv = [*argv, '--gradient-accumulation-steps', '16']
    assert parse_args(argv).command == f'torchrun --nproc_per_node=4 {again} --gradient_accumulation_steps=16'
    assert 'is 1; it must be a multiple of 8, the number of processes' in error_of(train, capsys, *argv[:3])


@pytest.mark.parametrize('word, message', [  # a flag, a config file or, with more in it, a config file's text
    ('--n_layerz=3', 'there is no setting n_layerz; did you mean n_layer?'),
    ('--lr=1', 'there is no setting lr; --help lists all'), ('--n_layer', 'expected one argument'),
    ('--n_layer=2.5', 'n_layer is 2.5; it must be of type int'), ('--n_layer=True', 'n_layer is True'),
    ('--compile=yes', 'of type bool'), ('--learning_rate=nan', 'of type float'), ('--batch_size=0', 'from 1 to'),
    (f'--learning_rate=1{"0" * 400}', 'to below'), ('--min_lr=1e999', 'to below'), ('--beta1=1', 'to below 1'),
    ('--n_embd=18', 'n_embd = 18 is not divisible by n_sense = 4'), ('--n_head=3', 'divisible by n_head = 3'),
    ('--model=bert', 'it can be backpack, gpt'), ('--dtype=int8', 'it can be auto'),
    ('--device=abacus', 'cannot be used'), ('--dataset=none', 'run python prepare.py none --text FILE...'),
    ('--dataset=../data/tiny', 'the name of a folder in data/'), ('--block_size=300', 'smaller --block_size'),
    ('--init_from=no/such', 'no such file or folder: no/such; out/ has no run'),
    ('--init_from=resume', 'nothing to resume; start with python train.py --dataset=tiny --n_layer=2'),
    ('config/toy.py', 'no such config file: config/toy.py; there are config/b.py'),
    ('import os', 'config/b.py, line 1: a config file holds lines key = value'), ('x = (', 'config/b.py: a config'),
    ("n_layer = open('marker', 'w')", 'line 1: a config file'), ('a = b = 1', 'line 1: a config file'),
    ('\nn_layers = 3', 'config/b.py, line 2: there is no setting n_layers; did you mean n_layer?'),
    ("n_layer = 'three'", "n_layer is 'three'; it must be of type int"), ('n_layer += 1', 'line 1: a config')])
def test_a_setting_that_does_not_fit_is_one_line(word, message, tiny, capsys):
    """Exit code 2, a line that names what was given, no folder of a run; nothing in a config file is run."""
    Path('config').mkdir()
    Path('config/b.py').write_text(word)
    assert message in error_of(train, capsys, *SMALL, 'config/b.py' if ' ' in word else word)
    assert not Path('out').exists() and not Path('marker').exists()


@pytest.mark.parametrize('name', sorted(path.stem for path in (ROOT / 'config').glob('*.py')))
def test_every_config_makes_a_model(name):
    """All but the toys take 524,288 tokens a step, on 4 GPUs too; a run's folder says which model it is of."""
    k = (['--n_sense=4'], '_4') if name == 'senses' else (['--out_dir='], '')
    for more, end in (([], ''), (['--model=gpt'], '_gpt'), k):
        s = parse_args([f'{ROOT}/config/{name}.py', *more])
        with torch.device('meta'):
            assert random_model(s, {'vocab_size': 50257}).config.n_sense == s.n_sense * (end != '_gpt')
        assert s.out_dir == f'out/{name.removeprefix("train_")}{end}'
        if name not in ('train_toy', 'train_english'):
            assert s.tokens_per_step == 524_288 and s.gradient_accumulation_steps % 4 == 0
            assert s.max_iters == (50_000 if name == 'senses' else 100_000) and s.learning_rate == 6e-4
