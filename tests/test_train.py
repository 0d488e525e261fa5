"""Claims about training: batches, gradients, checkpoints, settings."""

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import SMALL, checkpoint, log, make_data, same

import prepare
import train
from model import Backpack, Config
from rucksack import data as data_py
from rucksack import toy as toy_py
from rucksack.data import Blocks
from rucksack.published import export, from_pretrained
from train import Machine, Settings

ROOT = Path(__file__).parent.parent
error_of = partial(conftest.error_of, train)


# -----------------------------------------------------------------------------
# Batches and gradients.


def test_targets_are_the_texts_one_token_later(tiny):
    """Block i holds tokens i * block_size on, and its targets are the same tokens shifted by one."""
    data = Blocks(Path('data/tiny'), 'train', data_py.read_meta(Path('data/tiny')), 8)
    ids = np.fromfile('data/tiny/train.bin', dtype='<u2').astype(int)
    x, y = data(np.array([0, 7]))
    assert data.n == 99
    assert x.tolist() == [ids[:8].tolist(), ids[56:64].tolist()]
    assert y.tolist() == [ids[1:9].tolist(), ids[57:65].tolist()]


def test_a_batch_has_its_distinct_words_and_asks_for_no_logits():
    """inputs_of hands over the texts, their targets, the words and places they are made of, and loss_only."""
    idx = torch.tensor([[7, 7, 2], [9, 2, 7]])
    inputs = data_py.inputs_of(idx, idx + 1, 'cpu')
    words, place = inputs.pop('distinct')
    assert torch.equal(words[place], idx) and words[:3].tolist() == [2, 7, 9]
    assert inputs.pop('loss_only') is True and torch.equal(inputs.pop('idx'), idx)
    assert torch.equal(inputs.pop('targets'), idx + 1) and not inputs


def test_every_epoch_has_each_block_once_in_an_order_of_its_own():
    """Steps of 6 over 10 blocks: each run of 10 draws is a permutation, and no two epochs agree."""
    drawn = np.concatenate([data_py.blocks_of_step(5, step, 6, 10) for step in range(10)])
    epochs = drawn.reshape(6, 10)
    assert (np.sort(epochs) == np.arange(10)).all() and len({tuple(e) for e in epochs}) == 6
    assert (drawn[:6] == data_py.blocks_of_step(5, 0, 6, 10)).all()
    assert (drawn[:6] != data_py.blocks_of_step(6, 0, 6, 10)).any()


def loss_and_gradients(batch_size: int, accumulation: int, rank: int = 0, world: int = 1):
    """Loss and unclipped gradients of step 3 of a fresh model in data/tiny."""
    torch.manual_seed(0)
    config = Config(block_size=8, vocab_size=40, n_layer=2, n_head=2, n_embd=16, n_sense=4)
    model = Backpack(config).double()
    settings = Settings(batch_size=batch_size, gradient_accumulation_steps=accumulation, block_size=8)
    data = Blocks(Path('data/tiny'), 'train', data_py.read_meta(Path('data/tiny')), 8)
    model.no_sync = nullcontext
    loss = train.gradients(model, data, 3, settings, Machine('cpu', 'float64', rank, world))
    return loss, [p.grad for p in model.parameters()]


def test_accumulation_changes_neither_loss_nor_gradients(tiny):
    """One micro-batch of 8 gives the loss and the unclipped gradients of four micro-batches of 2."""
    (loss, grads), (split_loss, split_grads) = loss_and_gradients(8, 1), loss_and_gradients(2, 4)
    torch.testing.assert_close(loss.double(), split_loss.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, split_grads)
    assert max(g.abs().max() for g in grads) > 1e-3


def test_processes_share_the_batch_of_one(tiny):
    """The mean of the gradients of two processes is the gradient of one with the same settings."""
    _, grads = loss_and_gradients(2, 4)
    halves = [loss_and_gradients(2, 4, rank, 2)[1] for rank in (0, 1)]
    torch.testing.assert_close([(a + b) / 2 for a, b in zip(*halves)], grads)


def launch(processes: int, *argv: str) -> None:
    """Run train.py under torchrun."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}',
               str(ROOT / 'train.py'), *argv]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_torchrun_trains_as_one_process(tiny):
    """10 float64 steps of two processes under torchrun end in the weights of one to 1e-9."""
    run = [*SMALL, '--dtype=float64', '--gradient_accumulation_steps=2', '--max_iters=10']
    launch(2, *run, '--out_dir=out/two')
    train.main([*run, '--out_dir=out/one'])
    one, two = checkpoint('out/one')['model'], checkpoint('out/two')['model']
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-9)


# -----------------------------------------------------------------------------
# The run.


@pytest.mark.parametrize('options', [[], ['--model=gpt'], ['--dropout=0.2']])
def test_a_resumed_run_is_the_uninterrupted_one(tiny, options):
    """10 steps and 10 resumed ones equal 20 bit for bit: weights, optimizer, log; dropout included."""
    run = [*SMALL, '--eval_interval=10', *options]
    train.main([*run, '--max_iters=20', '--out_dir=out/whole'])
    train.main([*run, '--max_iters=10'])
    half = checkpoint()
    train.main([*run, '--max_iters=20', '--init_from=resume'])
    whole, resumed = checkpoint('out/whole'), checkpoint()
    for key in ('model', 'optimizer'):
        same(whole[key], resumed[key])
    assert (half['step'], resumed['step']) == (10, 20) and log() == log('out/whole')
    assert not torch.equal(half['model']['wte.weight'], resumed['model']['wte.weight'])


def test_evaluation_is_the_mean_over_fixed_texts_without_dropout(tiny):
    """The validation loss equals the mean loss of its texts, one by one, and is the same when asked again."""
    torch.manual_seed(0)
    model = Backpack(Config(block_size=8, vocab_size=40, n_layer=1, n_head=2, n_embd=16, n_sense=4,
                            dropout=0.5))
    data = Blocks(Path('data/tiny'), 'val', data_py.read_meta(Path('data/tiny')), 8)
    settings = Settings(batch_size=7, eval_iters=100)
    machine = Machine('cpu', 'float32', 0, 1)
    loss = train.evaluate(model.train(), data, settings, machine)
    assert model.training and loss == train.evaluate(model, data, settings, machine)
    each = [model.eval()(*data(np.array([i])))[1].item() for i in range(24)]
    assert loss == pytest.approx(np.mean(each), rel=1e-6)


def test_the_best_state_is_kept_and_the_latest_is_latest(tiny):
    """With random text the validation loss rises as the model memorises: best.pt is earlier than ckpt.pt."""
    train.main([*SMALL, '--eval_interval=20', '--max_iters=200', '--lr_decay_iters=0',
                '--learning_rate=0.03'])
    losses = {int(r['step']): float(r['val_loss']) for r in log() if r['val_loss']}
    best = torch.load('out/run/best.pt', weights_only=True)
    assert best['val_loss'] == min(losses.values()) == losses[best['step']]
    assert checkpoint()['step'] == 200 > best['step'] and not list(Path('out/run').glob('*.partial'))


def test_the_learning_rate_warms_up_and_decays_to_its_end():
    """Linear up to learning_rate in warmup_iters steps, linear down to min_lr at lr_decay_iters, flat
    after it."""
    s = Settings(learning_rate=1.0, warmup_iters=4, lr_decay_iters=14, min_lr=0.5, max_iters=20)
    rates = [train.learning_rate_at(step, s) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and rates[9] == 0.75 and rates[14:] == [0.5] * 6


def test_a_non_finite_loss_stops_the_run_and_spoils_no_checkpoint(tiny):
    """Exit code 1, and the checkpoint on disk is the finite one from before."""
    with pytest.raises(SystemExit) as stop:
        train.main([*SMALL, '--max_iters=50', '--learning_rate=100', '--weight_decay=100', '--grad_clip=0',
                    '--warmup_iters=0'])
    assert stop.value.code == 1
    assert checkpoint()['step'] == 0 and all(t.isfinite().all() for t in checkpoint()['model'].values())


def test_fine_tuning_starts_from_the_weights_given(tiny):
    """--init_from=out/run takes the weights and the shape of that run; its first loss is the other's last.
    It resumes like any other run. An export of the run in the published format does the same."""
    train.main([*SMALL, '--max_iters=5'])
    train.main([*SMALL, '--max_iters=1', '--n_embd=999', '--init_from=out/run', '--out_dir=out/tuned'])
    assert log('out/tuned')[0]['val_loss'] == [r['val_loss'] for r in log() if r['val_loss']][-1]
    train.main([*SMALL, '--max_iters=2', '--n_embd=999', '--init_from=resume', '--out_dir=out/tuned'])
    assert checkpoint('out/tuned')['step'] == 2
    export(from_pretrained('out/run'), 'exported')
    train.main([*SMALL, '--max_iters=1', '--init_from=exported', '--out_dir=out/again'])
    assert log('out/again')[0]['val_loss'] == log('out/tuned')[0]['val_loss']


# -----------------------------------------------------------------------------
# Settings and bad input.


def test_settings_come_from_defaults_then_files_then_the_command_line(tmp_path):
    """A later source wins, and an int stands for a float."""
    (tmp_path / 'a.py').write_text("\ufeff# comment\nn_layer = 3\nlearning_rate = 1  # one\ndataset = 'x'\n")
    s = train.parse_args([str(tmp_path / 'a.py'), '--n_layer=5', '--compile=False'])
    assert (s.n_layer, s.learning_rate, s.dataset, s.compile, s.n_head) == (5, 1.0, 'x', False, 12)
    assert type(s.learning_rate) is float and s.out_dir == 'out/a'
    assert train.parse_args(['config/gpt_small.py', '--model=gpt']).out_dir == 'out/small_gpt'


def test_the_command_that_goes_on_is_one_that_runs(monkeypatch):
    """Under torchrun it starts as many processes on this machine as there are."""
    assert train.parse_args(['--n_layer=5']).command == 'python train.py --n_layer=5'
    for name, value in (('RANK', '0'), ('LOCAL_WORLD_SIZE', '4'), ('WORLD_SIZE', '8')):
        monkeypatch.setenv(name, value)
    assert train.parse_args(['--n_layer=5']).command == 'torchrun --nproc_per_node=4 train.py --n_layer=5'


def test_a_run_that_never_leaves_warmup_says_so(tiny, capsys):
    """A line where the learning rate is not reached, none where it is."""
    for steps, said in ((2, False), (1, True)):
        train.main([*SMALL, f'--max_iters={steps}', '--overwrite=True'])
        assert ('warmup_iters is 2: ' in capsys.readouterr().out) == said


@pytest.mark.parametrize('text, message', [
    ("import os\n", 'line 1: a config file holds only'),
    ("n_layer = print('boom')\n", 'line 1: a config file'),
    ("a = b = 1\n", 'only lines key = value'),
    ("n_layers = 3\n", 'no setting n_layers; did you mean n_layer?'),
    ("n_layer = 'three'\n", "n_layer is 'three'; it must be of type int"),
    ("n_layer = (\n", 'cannot be read'), ("n_layer = 1\n" + "#" * (1 << 20), 'it is too long')])
def test_a_config_file_is_never_executed(text, message, tmp_path, capsys):
    """Anything but key = value with plain values is one line and exit code 2."""
    (tmp_path / 'c.py').write_text(text)
    assert message in error_of(capsys, str(tmp_path / 'c.py'))


@pytest.mark.parametrize('option, message', [
    ('--n_layerz=3', 'did you mean n_layer?'), ('--n_layer=2.5', 'n_layer is 2.5; it must be of type int'),
    ('--n_layer=True', 'n_layer is True'), ('--compile=yes', 'type bool'),
    ('--learning_rate=nan', 'type float'), (f'--learning_rate=1{"0" * 400}', 'below 2**31'),
    (f'--n_embd=0x{"f" * 5000}', 'below 2**31'), ('--n_embd=2000000000', 'so large'),
    ('--n_embd=200000', 'GB, cpu has'), ('--batch_size=1000000', 'at most 2**20'),
    ('--n_embd=18', 'n_embd = 18 is not divisible by n_sense = 4'),
    ('--n_head=3', 'not divisible by n_head = 3'),
    ('--batch_size=0', 'at least 1'), ('--beta1=1.0', 'below 1'), ('--model=bert', 'backpack or gpt'),
    ('--dtype=int8', 'it can be auto'), ('--device=abacus', 'cannot be used'), ('--n_sense=0', '--model=gpt'),
    ('--dataset=none', 'run python prepare.py none --text FILE...'),
    ('--block_size=300', 'smaller --block_size'),
    ('--init_from=resume', 'start with python train.py --out_dir=out/run --dataset=tiny'),
    ('--init_from=nowhere', 'does not exist'),
    ('missing.py', 'cannot be read')])
def test_a_bad_setting_is_one_line_and_writes_nothing(option, message, tiny, capsys):
    """Exit code 2, one line that names what was given, and no folder of a run."""
    assert message in error_of(capsys, *SMALL, option)
    assert not Path('out').exists()


def test_bad_data_is_one_line(tiny, capsys):
    """Missing and empty bins, half tokens, ids beyond the vocabulary and a damaged meta.json are errors."""
    bin = Path('data/tiny/train.bin')
    make_data([*range(39), 257] * 10, [1] * 50)
    assert 'token id 257, beyond the vocabulary of 257' in error_of(capsys, *SMALL)
    make_data([], [1] * 50)
    assert 'holds 0 tokens' in error_of(capsys, *SMALL)
    for content in (b'', b'123', bytes(99), bytes(102)):
        make_data([1] * 50, [1] * 50)
        bin.write_bytes(content)
        assert f'has {len(content)} bytes, not 50 tokens' in error_of(capsys, *SMALL)
    bin.unlink()
    assert 'train.bin does not exist' in error_of(capsys, *SMALL)
    bin.mkdir()
    assert 'or is no file' in error_of(capsys, *SMALL)
    bin.rmdir()
    assert not Path('out').exists()


PIECES = toy_py.toy_tokenizer([''])


@pytest.mark.parametrize('change', [
    {'vocab_size': -1}, {'vocab_size': '257'}, {'vocab_size': 258}, {'vocab_size': 10**30},
    {'vocab_size': True},
    {'dtype': 'float32'}, {'dtype': 'uint32'}, {'dtype': ['uint16']}, {'tokenizer': None},
    {'tokenizer': {'name': '../../gpt2'}}, {'tokenizer': {**PIECES, 'pattern': '(a+)+$'}},
    {'tokenizer': {**PIECES, 'pattern': ''}}, {'tokenizer': {**PIECES, 'pieces': [['nurse']]}},
    {'tokenizer': {**PIECES, 'pieces': 3}}, {'tokens': {'train': -50, 'val': 50}}, {'tokens': None},
    {'tokens': {'train': 50.0, 'val': 50}}, {'tokens': {'train': 10**30, 'val': 50}}, {'tokens': [50, 50]},
    {'sha256': {}}, {'sha256': {'train': 'x', 'val': 3}}])
def test_a_damaged_meta_is_one_line_for_every_script(change, tiny, capsys):
    """Wrong types, absurd sizes, negative counts, unknown tokenizers: train and prepare say the same."""
    make_data([1] * 50, [1] * 50, **change)
    message = 'data/tiny/meta.json is damaged; run python prepare.py tiny --text FILE... --overwrite'
    assert message in error_of(capsys, *SMALL)
    assert message in conftest.error_of(prepare, capsys, 'tiny', '--check')
    assert not Path('out').exists()


def test_a_nanogpt_folder_holds_gpt2_tokens(tiny):
    """Bins without a meta.json are read as GPT-2's 50,257 words in uint16."""
    Path('data/tiny/meta.json').unlink()
    meta = data_py.read_meta(Path('data/tiny'))
    assert meta == {'tokenizer': {'name': 'gpt2'}, 'vocab_size': 50257, 'dtype': 'uint16',
                    'tokens': {'train': 800, 'val': 200}}


def test_a_run_is_not_overwritten_unasked(tiny, capsys):
    """scratch into a run with a checkpoint is refused, --overwrite=True replaces it, resume needs the
    same shape."""
    train.main([*SMALL, '--max_iters=2'])
    assert '--overwrite=True' in error_of(capsys, *SMALL, '--max_iters=3')
    for option, message in (('--n_sense=8', 'n_sense 4, now 8'), ('--model=gpt', 'model backpack, now gpt'),
                            ('--n_layer=3', 'n_layer 2, now 3'),
                            ('--sense_hidden=8', 'sense_hidden 0, now 8')):
        for more in ((), ('--allow_changes=True',)):
            assert message in error_of(capsys, *SMALL, '--init_from=resume', '--max_iters=2', option, *more)
    assert 'is at step 2' in error_of(capsys, *SMALL, '--init_from=resume', '--max_iters=1',
                                      '--allow_changes=True')
    train.main([*SMALL, '--max_iters=3', '--overwrite=True'])
    assert checkpoint()['step'] == 3
    path = Path('out/run/ckpt.pt')
    path.write_bytes(path.read_bytes()[:3000])
    assert 'damaged' in error_of(capsys, *SMALL, '--init_from=resume')


@pytest.mark.parametrize('name', sorted(p.name for p in (ROOT / 'config').glob('*.py')))
def test_every_config_makes_a_model(name):
    """Each file in config/ is valid; all but the toy take 524,288 tokens a step and are split evenly
    over 4 GPUs."""
    s = train.parse_args([str(ROOT / 'config' / name)])
    train.check(s)
    Config(n_layer=s.n_layer, n_head=s.n_head, n_embd=s.n_embd, n_sense=s.n_sense,
           sense_hidden=s.sense_hidden)
    if name != 'train_toy.py':
        assert s.tokens_per_step == 524_288 and s.gradient_accumulation_steps % 4 == 0
        assert s.max_iters == (50_000 if name.startswith('senses') else 100_000)
    assert math.isclose(s.learning_rate, 6e-4) or name == 'train_toy.py'
