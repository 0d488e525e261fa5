"""Claims about settings: config files, flags, and what is said where they do not fit."""

from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, error_of

import train
from train import parse_args, random_model


def test_settings_come_from_defaults_then_files_then_the_command_line(tmp_path):
    """A later source wins, whatever the spelling of a flag."""
    (a := tmp_path / 'a.py').write_text('\ufeff# comment\nn_layer = 3\nn_head = 2  # two\nbeta1 = .5')
    (b := tmp_path / 'b.py').write_text('n_layer = 4\nlearning_rate = 1\n')
    s, _ = parse_args(['--overwrite', str(a), str(b), '--n_head=5', '--batch_size=3', '--compile=False'])
    assert (s.n_layer, s.n_head, s.beta1, s.compile, s.n_embd) == (4, 5, 0.5, False, 768)
    assert type(s.learning_rate) is float and (s.out_dir, s.batch_size, s.overwrite) == ('out/b', 3, True)
    again, _ = parse_args([f'{a}', f'{b}', *'--n-head 5 --batch-size=3 --compile False --overwrite'.split()])
    assert s == again


@pytest.mark.parametrize('word, message', [  # a flag or, with spaces in it, what is in a config file
    ('--n_layerz=3', 'no setting n_layerz; did you mean n_layer?'), ('--lr=1', 'no setting lr; --help'),
    ('--n_layer=2.5', 'n_layer is 2.5; it must be of type int'), ('--n_layer=True', 'must be of type int'),
    ('--learning_rate=nan', 'of type float'), ('--batch_size=0', 'be from 1 to'), ('--beta1=1', 'below 1'),
    (f'--min_lr=1{"0" * 400}', 'below 2147483648'), ('--dtype=int8', 'it can be auto, '),
    ('--n_embd=18', 'n_embd = 18 is not divisible by n_sense = 4'), ('--device=abacus', 'cannot be used'),
    ('--dataset=none', 'run python prepare.py none'), ('--dataset=../data/tiny', 'name of a folder in data/'),
    ('--block_size=300', 'smaller --block_size'), ('--init_from=nowhere', 'no such file or folder: nowhere'),
    ('--init_from=resume', 'nothing to resume; start without --init_from=resume'),
    ('config/toy.py', 'no such config file: config/toy.py; there are config/b.py'),
    ('import os', 'config/b.py, line 1: a config file holds lines key = value'), ('x = (', 'b.py: a config'),
    ("n_layer = open('marker', 'w')", 'b.py, line 1: a config'), ('n_layer += 1', 'b.py, line 1: a config'),
    ('\nn_layers = 3', 'b.py, line 2: there is no setting n_layers'), ("n_layer = '3'", "n_layer is '3'; ")])
def test_a_setting_that_does_not_fit_is_one_line(word, message, tiny, capsys):
    """Exit code 2, a line that names what was given, no folder of a run; nothing in a config file is run."""
    Path('config').mkdir()
    Path('config/b.py').write_text(word)
    assert message in error_of(train, capsys, *SMALL, '--max_iters=1', 'config/b.py' if ' ' in word else word)
    assert not Path('out').exists() and not Path('marker').exists()


@pytest.mark.parametrize('name', sorted(path.stem for path in (ROOT / 'config').glob('*.py')))
def test_every_config_makes_a_model(name):
    """All but the toys take 524,288 tokens a step, on 4 GPUs too; a run's folder says which model it has."""
    for more, end in (['--model=gpt'], '_gpt'), (['--n_sense=4'], '_4') if name == 'senses' else ([], ''):
        s, _ = parse_args([f'{ROOT}/config/{name}.py', *more])
        with torch.device('meta'):
            model = random_model(s, {'vocab_size': 50257, 'tokenizer': None})
        assert model.config.n_sense == (0 if end == '_gpt' else s.n_sense)
        assert s.out_dir == f'out/{name.removeprefix("train_")}{end}'
        if name not in ('train_toy', 'train_english'):
            assert (s.tokens_per_step, s.gradient_accumulation_steps % 4) == (524_288, 0)
            assert (s.max_iters, s.learning_rate) == (50_000 if name == 'senses' else 100_000, 6e-4)
