"""Claims about training: gradients, processes, resuming, fine-tuning, logs, and how runs end."""

import itertools
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import RUN, SMALL, assert_same_run, checkpoint, error_of, log, make_data, ranks, same
from torch import Tensor
from torch.testing import assert_close

from rucksack import train
from rucksack.hub.export import export
from rucksack.loaded import from_pretrained
from rucksack.model import GPT, Config
from rucksack.optimizers import make_optimizers
from rucksack.start import fine_tune
from rucksack.train import Settings, chunks_of_step, lr_scale

RESUME = [*SMALL, '--init_from=resume']


def texts(name: str, chunks) -> tuple[Tensor, Tensor]:
    """Read chunks of 8 tokens of data/tiny, and the tokens after each: both (n, 8)."""
    ids = torch.from_numpy(np.fromfile(f'data/tiny/{name}.bin', '<u2').astype(int))
    idx = torch.stack([ids[8 * i:8 * i + 8] for i in chunks])
    return idx, torch.stack([ids[8 * i + 1:8 * i + 9] for i in chunks])


def evaluations(folder: str = 'out/run') -> list[dict]:
    """Return the rows of a run's log that have a validation loss."""
    return [row for row in log(folder) if row['val_loss']]


@pytest.mark.parametrize('batch_size, n', [(8, 1), (2, 4)])
def test_gradient_accumulation_steps_keep_the_gradients(batch_size, n, tiny, in_float64):
    """One batch of 8, or four of 2, gives the gradients of model(idx, targets) on all 8 texts."""
    run = [*SMALL, f'--batch_size={batch_size}', f'--gradient_accumulation_steps={n}',
           '--beta1=0', '--grad_clip=0']  # then exp_avg is the gradient
    train.main([*run, '--max_iters=0'])
    plain, _ = from_pretrained('out/run')
    train.main([*run, '--max_iters=1', '--overwrite'])
    chunks = chunks_of_step(0, Settings(batch_size=8), 99).flatten()
    plain(*texts('train', chunks)).backward()
    adamw, = make_optimizers(plain, Settings(optimizer='adamw'))
    params = [p for group in adamw.param_groups for p in group['params']]
    moments = checkpoint()['optimizers']['AdamW']['state']
    for i, p in enumerate(params):
        assert_close(moments[i]['exp_avg'], p.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize('eval_iters, chosen', [(100, range(24)), (1, [0, 3, 6, 10, 13, 17, 20])])
def test_evaluation_is_the_mean_over_fixed_texts(eval_iters, chosen, tiny):
    """An evaluation reads all texts, or evenly spaced ones, without dropout or padding rows."""
    train.main([*SMALL, '--dropout=0.5', '--batch_size=7', f'--eval_iters={eval_iters}',
                '--max_iters=20'])
    model, _ = from_pretrained('out/run')
    idx, targets = texts('val', chosen)
    logits = model(idx)[..., :257]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(evaluations()[-1]['val_loss']) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize('step, share', [(0, 0.25), (3, 1.0), (4, 1.0), (14, 0.75), (24, 0.5)])
def test_the_rate_decays_to_min_lr_at_max_iters(step, share):
    """The learning rate rises linearly to the peak in warmup_iters, then falls to min_lr."""
    schedule = Settings(warmup_iters=4, min_lr=0.01, learning_rate=0.02, max_iters=24)
    assert lr_scale(step, schedule) == share


def test_muon_lr_and_loaded_lr_set_the_rates_of_a_step(tiny):
    """Muon decays from muon_lr as AdamW does; loaded parameters get loaded_lr times the rate."""
    train.main([*SMALL, '--max_iters=5', '--model=gpt'])
    train.main([*WARM, '--max_iters=20', '--optimizer=muon', '--muon_lr=0.03', '--loaded_lr=0.1',
                '--min_lr=0.001'])
    share = 0.1 + 0.9 * 1 / 18  # one step before the end of an 18-step decay
    for name, peak, column in (('AdamW', 0.01, 'learning_rate'), ('Muon', 0.03, 'muon_lr')):
        groups = checkpoint('out/tuned')['optimizers'][name]['param_groups']
        rates = {group['factor']: group['lr'] for group in groups}
        assert rates == pytest.approx({1.0: peak * share, 0.1: 0.1 * peak * share})
        assert float(log('out/tuned')[-2][column]) == pytest.approx(peak * share, rel=1e-5)


def test_grad_clip_clips_gradients_after_they_are_logged(tiny):
    """At beta1 = 0, AdamW's first moment is the gradient, whose norm is logged before clipping."""
    train.main([*SMALL, '--max_iters=1', '--beta1=0', '--grad_clip=0.01'])
    moments = checkpoint()['optimizers']['AdamW']['state'].values()
    norm = torch.nn.utils.get_total_norm([own['exp_avg'] for own in moments])
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    assert float(log()[1]['grad_norm']) > 0.02


DTYPES = ('float32', 'bfloat16')


def test_bfloat16_is_for_products_alone(tiny):
    """Weights stay in float32; the loss after two steps is near float32's but not equal."""
    for dtype in DTYPES:
        train.main([*SMALL, f'--dtype={dtype}', '--max_iters=2', f'--out_dir=out/{dtype}'])
    state = checkpoint('out/bfloat16')
    exact, rounded = (evaluations(f'out/{dtype}')[-1]['val_loss'] for dtype in DTYPES)
    assert {weight.dtype for weight in state['model'].values()} == {torch.float32}
    assert float(rounded) == pytest.approx(float(exact), abs=0.02)
    assert rounded != exact


NEW_SENSES = ['--model=backpack', '--n_sense=2', '--sense_hidden=24']


@pytest.mark.parametrize('options', [
    ['--dropout=0.2'], ['--model=gpt'], ['--dtype=bfloat16'], ['--optimizer=muon'],
    ['--model=gpt', '--init_from=out/gpt'],
    ['--init_from=out/gpt', *NEW_SENSES, '--loaded_lr=0.1', '--optimizer=muon'],
    pytest.param(['--compile=True'], marks=pytest.mark.slow)])
def test_a_run_resumed_with_more_max_iters_has_the_same_bits(options, tiny):
    """A resumed run ends like one with its max_iters from the start; the best state comes early."""
    train.main([*SMALL, '--model=gpt', '--max_iters=1', '--out_dir=out/gpt'])  # to start from
    run = [*SMALL, *options, '--eval_interval=5', '--learning_rate=.2', '--min_lr=.2']
    train.main([*run, '--max_iters=20', '--out_dir=out/whole'])
    train.main([*run, '--max_iters=10'])
    train.main([*run, '--max_iters=20', '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')


def test_a_resumed_run_keeps_its_settings_and_its_data(tiny, capsys):
    """A change that would alter the result is refused by name, and the checkpoint stays."""
    train.main([*SMALL, '--max_iters=2'])
    resume = [*RESUME, '--max_iters=4']
    assert '--learning_rate' in error_of(train, capsys, *resume, '--learning_rate=0.02')
    make_data([1] * 800, [2] * 200)
    assert 'data/tiny' in error_of(train, capsys, *resume)
    assert checkpoint()['step'] == 2


def test_a_command_can_be_repeated_to_resume(tiny):
    """A repeated command may contain -1 and auto; a truncated last row of the log is dropped."""
    run = [*SMALL, '--warmup_iters=-1', '--dtype=auto', '--eval_interval=9']
    train.main([*run, '--max_iters=2'])
    with open('out/run/log.csv', 'a') as file:
        file.write('1')  # the start of a row of step 15, say
    train.main([*run, '--max_iters=3', '--init_from=resume'])
    assert [row['step'] for row in log()] == ['0', '1', '2', '2', '3', '3']
    assert checkpoint()['settings']['dtype'] in DTYPES


SIZELESS = [word for word in SMALL if not word.startswith('--n_')]
TUNE = [*SIZELESS, '--out_dir=out/tuned', '--max_iters=1', '--dropout=0.3']


def weights_of(source: str) -> dict[str, Tensor]:
    """Return the weights of a model, by name."""
    model, _ = from_pretrained(source)
    return dict(model.state_dict())


@pytest.mark.parametrize('kind', ['backpack', 'gpt'])
@pytest.mark.parametrize('source', ['out/run', 'exported'])
def test_init_from_starts_with_the_weights_and_their_sizes(source, kind, tiny):
    """The first loss is the earlier run's last, even after an export; dropout may change."""
    train.main([*SMALL, '--max_iters=5', f'--model={kind}'])
    export(*from_pretrained('out/run'), 'exported')
    train.main([*TUNE, f'--init_from={source}'])
    first = evaluations('out/tuned')[0]
    assert first['val_loss'] == evaluations('out/run')[-1]['val_loss']
    sizes = checkpoint('out/run')['model_config']
    assert checkpoint('out/tuned')['model_config'] == sizes | {'dropout': 0.3}


WARM = [*TUNE, '--init_from=out/run', *NEW_SENSES]


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_loaded_lr_0_trains_the_senses_of_a_transformer_alone(optimizer, tiny):
    """The Transformer's tensors stay, except unused positions; senses of the given size learn."""
    train.main([*SMALL, '--max_iters=5', '--model=gpt'])
    run = [*WARM, '--block_size=4', '--loaded_lr=0', f'--optimizer={optimizer}']
    train.main([*run, '--max_iters=0', '--out_dir=out/new'])
    train.main([*run, '--max_iters=3'])
    loaded = weights_of('out/run')
    loaded['contextualizer.wpe.weight'] = loaded['contextualizer.wpe.weight'][:4]
    new = weights_of('out/new')
    tuned = weights_of('out/tuned')
    assert tuned['sense_network.mlp.c_fc.weight'].shape == (24, 16)
    assert tuned['sense_network.final_mlp.c_proj.weight'].shape == (2 * 16, 24)
    same({name: tuned.pop(name) for name in loaded}, loaded)
    for name, weight in tuned.items():
        assert not torch.equal(weight, new[name]), name


def test_its_first_loss_is_near_that_of_no_knowledge():
    """A new Backpack's loss is at most ln V + 0.2, even if embeddings are larger than GPT-2's."""
    torch.manual_seed(0)
    transformer = GPT(Config(block_size=32, vocab_size=500, n_layer=1, n_head=4, n_embd=256))
    torch.nn.init.normal_(transformer.wte.weight, mean=2.0, std=4.0)
    warm = fine_tune(transformer, replace(transformer.config, n_sense=16))
    idx = torch.randint(500, (8, 33))
    assert warm(idx[:, :-1], idx[:, 1:]) <= math.log(500) + 0.2


@pytest.mark.parametrize('n', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_as_one(n, tiny, in_float64):
    """Gradients of the first step and the state after 20 agree with one process's to 1e-12."""
    run = [*SMALL, '--gradient_accumulation_steps=4', '--dropout=0.2', '--min_lr=0',
           '--beta1=0']  # then exp_avg is the gradient
    for more in (['--max_iters=1'], ['--max_iters=20', '--init_from=resume']):
        train.main([*run, *more, '--out_dir=out/one'])
        assert ranks(n, *run, *more, '--out_dir=out/all', DTYPE='float64') == [0] * n
        one = checkpoint('out/one')
        other = checkpoint('out/all')
        assert_close(one['model'], other['model'], rtol=0, atol=1e-12)
        assert_close(one['optimizers'], other['optimizers'], rtol=0, atol=1e-12)
        assert log('out/one') == log('out/all')


@pytest.mark.parametrize('given, steps', [('-1', 2), ('0', 0), ('3', 3)])
def test_warmup_iters_is_5_percent_of_the_steps_unless_given(given, steps, tiny):
    """warmup_iters is resolved once: a resumed run with more steps keeps it."""
    run = [*SMALL, f'--warmup_iters={given}']
    train.main([*run, '--max_iters=40', '--eval_interval=40'])
    assert checkpoint()['settings']['warmup_iters'] == steps
    train.main(['--init_from=resume', '--out_dir=out/run', '--max_iters=41'])
    assert checkpoint()['settings']['warmup_iters'] == steps


@pytest.mark.parametrize('kind, counts', [('backpack', ('0', '4')), ('gpt', ('', ''))])
def test_every_evaluation_counts_stuck_senses(kind, counts, tiny):
    """All 4 senses of an untrained model depend only on position; a Transformer has none."""
    train.main([*SMALL, f'--model={kind}', '--max_iters=0'])
    row, = log()
    assert (row['senses_on_current_token'], row['senses_by_position']) == counts


def test_the_log_has_a_row_a_step_and_an_evaluation(tiny):
    """Every step and evaluation has a row, whose numbers have no more digits than are exact."""
    train.main([*RUN, '--max_iters=4', '--learning_rate=0.0031'])
    steps = [(row['step'], row['val_loss'] != '') for row in log()]
    assert steps == [
        ('0', True), ('1', False), ('2', False), ('2', True), ('3', False), ('4', False),
        ('4', True)]
    assert [int(row['tokens']) for row in log()] == [32 * int(step) for step, _ in steps]
    assert log()[2]['learning_rate'] == '0.0031'
    assert log()[2]['muon_lr'] == ''


def test_a_run_leaves_torch_as_it_was(tiny):
    """Training in a notebook leaves torch's choice of algorithms as it was."""
    train.main([*SMALL, '--max_iters=0'])
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_single_overflow_stops_a_run(tiny, capsys, monkeypatch):
    """A gradient whose square is infinite stops the run before its moment is saved."""
    real = torch.nn.utils.clip_grad_norm_
    scales = itertools.chain([0, 1e30], itertools.repeat(0))

    def clip_grad_norm_(params, norm):
        params = list(params)
        params[0].grad.fill_(next(scales))
        return real(params, norm)

    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', clip_grad_norm_)
    with pytest.raises(SystemExit, match='1'):
        train.main([*SMALL, '--max_iters=9', '--eval_interval=3', '--grad_clip=0'])
    assert 'at step 3\n' in capsys.readouterr().err
    assert checkpoint()['step'] == 0


def test_a_run_that_diverges_keeps_its_best_and_last_state(tiny):
    """Even if no log line was due, the states that were saved are finite, and the best stays."""
    with pytest.raises(SystemExit, match='1'):
        train.main([*SMALL, '--learning_rate=3', '--weight_decay=3', '--grad_clip=0',
                    '--warmup_iters=100', '--eval_interval=3', '--log_interval=60',
                    '--max_iters=60'])
    best = torch.load('out/run/best.pt', weights_only=True)
    losses = {int(row['step']): float(row['val_loss']) for row in evaluations()}
    assert losses[best['step']] == min(losses.values())
    assert 0 < best['step'] < checkpoint()['step']
    assert all(weight.isfinite().all() for weight in checkpoint()['model'].values())


def test_wandb_log_gets_what_is_logged(tiny, monkeypatch):
    """wandb gets all rows as numbers, and a resumed run continues its own."""
    rows = []
    ids = []

    def init(config, id, resume):
        ids.append(id)
        return SimpleNamespace(id='r0', log=lambda row, step: rows.append(row))

    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=init))
    train.main([*RUN, '--max_iters=2', '--wandb_log'])
    train.main([*RESUME, '--max_iters=4', '--wandb_log'])
    assert ids == [None, 'r0']
    for texts, row in zip(log(), rows, strict=True):
        numbers = {name: float(text) for name, text in texts.items() if text}
        assert numbers == pytest.approx({name: row[name] for name in numbers}, rel=1e-5)


def test_without_a_compiler_that_works_a_run_says_so(tiny, capsys, monkeypatch):
    """Without a working compiler, a run says so and continues without torch.compile."""
    monkeypatch.setattr(torch, 'compile', lambda function: None)  # returns no function
    train.main([*SMALL, '--compile=True', '--max_iters=1'])
    assert 'without torch.compile' in capsys.readouterr().out
    assert checkpoint()['step'] == 1
