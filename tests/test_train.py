"""Claims about training: gradients, processes, resuming, fine-tuning, the log, how a run ends."""

import os
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, checkpoint, error_of, log, make_data, same
from test_checkpoint import RUN, assert_same_run, ranks

import train
from model import Backpack, Config
from rucksack.data import DistinctIds, TokenDataset, inputs_of, read_meta, texts_of_step
from rucksack.machine import Machine
from rucksack.published import export, from_pretrained
from train import Settings


def a_model(**changes) -> Backpack:
    """A small model in float64."""
    torch.manual_seed(0)
    shape = dict(block_size=8, vocab_size=40, n_layer=2, n_head=2, n_embd=16, n_sense=4) | changes
    return Backpack(Config(**shape)).double()


def dataset(name: str) -> TokenDataset:
    """A bin of data/tiny in texts of 8 tokens."""
    return TokenDataset(Path('data/tiny'), name, read_meta(Path('data/tiny')), 8)


def test_gradients_are_those_of_the_mean_loss_however_it_is_split(tiny):
    """One batch of 8, four of 2, and the mean of two processes have the gradients of model(idx, targets)."""
    model, found = a_model(), []
    loss = model(*dataset('train')(texts_of_step(Settings.seed, 3, 8, 99)))
    loss.backward()
    for size, n, rank, world in ((8, 1, 0, 1), (2, 4, 0, 1), (2, 4, 0, 2), (2, 4, 1, 2)):
        same, s = DistinctIds(a_model()), Settings(batch_size=size, gradient_accumulation_steps=n)
        same.no_sync = nullcontext
        share = train.gradients(same, dataset('train'), 3, s, Machine('cpu', 'float64', rank, world))
        found.append([share, *(p.grad for p in same.parameters())])
    plain = [loss.detach(), *(p.grad for p in model.parameters())]
    for split in (*found[:2], [(a + b) / 2 for a, b in zip(*found[2:])]):
        torch.testing.assert_close(split, plain, rtol=1e-9, atol=1e-14)


def test_evaluation_is_the_mean_over_fixed_texts_without_dropout(tiny):
    """It is the mean over all texts, each by itself, or over some that are spread evenly over the bin."""
    model, data = DistinctIds(a_model(dropout=0.5)), dataset('val')
    for n, chosen in ((100, range(24)), (1, [0, 3, 6, 10, 13, 17, 20])):
        s, machine = Settings(batch_size=7, eval_iters=n), Machine('cpu', 'float64', 0, 1)
        loss = train.evaluate(model.train(), data, s, machine)
        each = [model.eval().model(*data(np.array([i]))).item() for i in chosen]
        assert loss == pytest.approx(np.mean(each), rel=1e-12)


def test_the_learning_rate_warms_up_and_decays_to_its_end():
    """Linear up to learning_rate in warmup_iters steps, down to min_lr at lr_decay_iters, flat after it."""
    s = Settings(learning_rate=1.0, warmup_iters=4, lr_decay_iters=14, min_lr=0.5, max_iters=24)
    rates = [train.learning_rate_at(step, s, 1.0) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and rates[9] == 0.75 and rates[14:] == [0.5] * 6
    s = replace(s, lr_decay_iters=0)
    assert train.learning_rate_at(14, s, 1.0) == 0.75 and train.learning_rate_at(24, s, 1.0) == 0.5
    assert train.learning_rate_at(9, s, 2.0) == 1.625  # of another peak, to the same end


@pytest.mark.slow
@pytest.mark.parametrize('n_sense', [4, 0])
def test_a_compiled_model_is_compiled_once_whatever_the_number_of_distinct_ids(n_sense):
    """20 batches of 1 to 320 distinct ids make one graph, with the plain gradients; so do smaller batches."""
    graphs, model = [], a_model(vocab_size=400, block_size=40, n_sense=n_sense)
    torch._dynamo.reset()
    compiled = torch.compile(DistinctIds(model), fullgraph=True,
                             backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for i, n in enumerate([8] * 20 + [7, 3, 2]):
        idx, both = torch.randint(1 + 21 * min(i, 18), (n, 40)), []
        for loss in (compiled(*inputs_of(idx, idx, 'cpu')), model(idx, idx)):
            model.zero_grad()
            loss.backward()
            both.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)
        assert len(graphs) == 1 or n < 8


@pytest.mark.parametrize('option', [
    '--dropout=0.2', '--model=gpt', '--dtype=float64', '--dtype=bfloat16', '--optimizer=muon',
    pytest.param('--compile=True', marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_bits(option, tiny, capsys, monkeypatch):
    """Ctrl-C ends it with exit code 130; resumed, it goes on from the last evaluation."""
    def gradients(model, data, step, s, machine, real=train.gradients):
        if step == 7:
            raise KeyboardInterrupt
        return real(model, data, step, s, machine)

    run = [*SMALL, option, '--max_iters=20', '--eval_interval=5', '--learning_rate=.2']  # the best is early
    train.main([*run, '--out_dir=out/whole'])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, 'gradients', gradients)
        train.main(run)
    assert (stop.value.code, checkpoint()['step']) == (130, 5)
    train.main([*run, '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')


@pytest.mark.parametrize('option', [
    'learning_rate=0.02', 'optimizer=muon', 'batch_size=2', 'seed=2', 'weight_decay=50.0', 'beta2=0.99',
    'gradient_accumulation_steps=2', 'block_size=4', 'eval_iters=3', 'dtype=float64'])
def test_a_resumed_run_keeps_its_settings(option, tiny, capsys):
    """What would change the result is refused: a line with the setting, both values, and what to run."""
    train.main([*SMALL, '--max_iters=2'])
    before = checkpoint()
    error = error_of(train, capsys, *SMALL, '--max_iters=4', '--init_from=resume', f'--{option}')
    name, value = option.split('=')
    assert re.search(rf'out/run/ckpt.pt was trained with .*{name} \S+, now {value}[,;]', error)
    assert '--init_from=out/run/ckpt.pt --out_dir=NEW' in error
    same(before, checkpoint())


@pytest.mark.parametrize('option', [
    'n_layer=3', 'n_head=4', 'n_sense=8', 'sense_hidden=8', 'model=gpt', 'dropout=0.1'])
def test_a_resumed_run_keeps_its_shape(option, tiny, capsys):
    """A shape that the weights do not have is refused: a line with both."""
    train.main([*SMALL, '--max_iters=2'])
    error = error_of(train, capsys, *SMALL, '--max_iters=4', '--init_from=resume', f'--{option}')
    assert re.search(f'ckpt.pt has {option.partition("=")[0]}=.*; drop --{option}', error)


def test_a_resumed_run_may_be_longer(tiny, capsys):
    """max_iters and intervals may change, max_iters not below the steps done; other data are refused."""
    resume = [*SMALL, '--init_from=resume']
    train.main([*SMALL, '--max_iters=2'])
    assert 'is already at step 2, and --max_iters is 1' in error_of(train, capsys, *resume, '--max_iters=1')
    train.main([*resume, '--max_iters=4', '--eval_interval=1', '--log_interval=2'])
    assert 'changed: max_iters 2, now 4' in capsys.readouterr().out
    assert checkpoint()['step'] == 4
    make_data([1] * 800, [2] * 200)
    error = error_of(train, capsys, *resume, '--max_iters=5')
    assert 'data/tiny is not what out/run/ckpt.pt was trained on' in error


@pytest.mark.parametrize('unit, dtype', [('AMX', 'bfloat16'), ('', 'float32')])
def test_auto_takes_bfloat16_where_it_is_fast(unit, dtype, tiny, capsys, monkeypatch):
    """The first line says which format and why; on another processor a run goes on in the format it has."""
    for units, last in ((unit, 1), ('' if unit else 'AMX', 2)):
        monkeypatch.setattr('rucksack.machine.bfloat16_unit', lambda device, units=units: units)
        train.main([*SMALL, '--dtype=auto', f'--max_iters={last}', *['--init_from=resume'] * (last - 1)])
        said = capsys.readouterr().out.splitlines()[0]
        why = 'as set' if last == 2 else f'it has {unit}' if unit else 'it has no fast bfloat16'
        assert checkpoint()['settings']['dtype'] == dtype and said.endswith(f'in {dtype} ({why})')


@pytest.mark.parametrize('name', ['train_micro', 'train_mini', 'train_small', 'senses'])
def test_the_papers_sizes_train_as_published(name):
    """Betas (0.9, 0.999), embeddings without decay, steps of 2^19 tokens; elsewhere nanoGPT's betas."""
    s, _ = train.parse_args([str(ROOT / 'config' / f'{name}.py')])
    plain = Settings()
    assert (s.beta1, s.beta2, s.decay_embeddings, s.tokens_per_step) == (0.9, 0.999, False, 524_288)
    assert (plain.beta1, plain.beta2, plain.decay_embeddings) == (0.9, 0.95, True)


def test_embeddings_decay_only_if_asked(tiny):
    """Under strong weight decay they shrink, with --decay_embeddings=False they do not; matrices do."""
    norms, names = [], ('wte.weight', 'sense_weights.c_attn.weight')
    run = [*SMALL, '--max_iters=3', '--weight_decay=50', '--overwrite']
    for asked in (True, False):
        train.main([*run, f'--decay_embeddings={asked}'])
        norms.append([checkpoint()['model'][name].norm().item() for name in names])
    assert norms[0][0] < 0.7 * norms[1][0] and norms[0][1] == pytest.approx(norms[1][1], rel=0.2)


@pytest.mark.parametrize('kind, other', [('backpack', 'gpt'), ('gpt', 'backpack')])
def test_fine_tuning_starts_from_the_weights_given(kind, other, tiny, capsys):
    """Its first loss is the last of the run it goes on from; sizes are the weights', others are refused."""
    train.main([*SMALL, '--max_iters=5', f'--model={kind}'])
    last = [row['val_loss'] for row in log() if row['val_loss']][-1]
    sizeless = [word for word in SMALL if not word.startswith('--n_')]
    tune = [*sizeless, '--out_dir=out/tuned', '--max_iters=1', '--dropout=0.3']
    train.main([*tune, '--init_from=out/run', '--n_embd=16'])
    state = checkpoint('out/tuned')
    sizes = {'n_layer': 2, 'n_head': 2, 'n_embd': 16, 'n_sense': 4 * (kind == 'backpack'), 'dropout': 0.3}
    assert log('out/tuned')[0]['val_loss'] == last and state['settings']['model'] == kind
    assert sizes.items() <= state['settings'].items() and sizes.items() <= state['model_config'].items()
    train.main([*tune, '--init_from=resume', '--max_iters=2'])
    assert checkpoint('out/tuned')['step'] == 2
    export(from_pretrained('out/run'), 'exported')
    train.main([*tune, '--init_from=exported', '--overwrite'])
    assert log('out/tuned')[0]['val_loss'] == last
    for option in ('n_embd=32', 'n_layer=3', f'model={other}'):
        error = error_of(train, capsys, *tune, '--init_from=out/run', f'--{option}', '--out_dir=out/new')
        assert re.search(f'out/run has {option.partition("=")[0]}=.*; drop --{option}', error)
    assert not Path('out/new').exists()


@pytest.mark.parametrize('n', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_as_one(n, tiny):
    """The first step's gradients, and the weights after 20, are those of one process to 1e-12 in float64."""
    run = [*SMALL, '--gradient_accumulation_steps=4', '--dtype=float64', '--dropout=0.2', '--beta1=0']
    for more in (['--max_iters=1'], ['--max_iters=20', '--init_from=resume']):
        train.main([*run, *more, '--out_dir=out/one'])
        assert ranks(*[[*run, *more, '--out_dir=out/all']] * n) == [0] * n
        one, many = checkpoint('out/one'), checkpoint('out/all')
        states = [state['optimizers']['AdamW']['state'] for state in (one, many)]
        moments = [[moment['exp_avg'] for moment in state.values()] for state in states]
        torch.testing.assert_close(*moments, rtol=0, atol=1e-12)  # with beta1 = 0 exp_avg is the gradient
        torch.testing.assert_close(one['model'], many['model'], rtol=0, atol=1e-12)
        assert log('out/one') == log('out/all')


@pytest.mark.slow
def test_processes_that_disagree_are_refused(tiny):
    """Two processes that resume from different steps, or read different data, leave with exit code 2."""
    run = [*SMALL, '--gradient_accumulation_steps=2', '--max_iters=6']
    for name, steps in (('a', 2), ('b', 4)):
        train.main([*run, f'--max_iters={steps}', f'--out_dir=out/{name}'])
    resume = [*run, '--init_from=resume']
    assert ranks([*resume, '--out_dir=out/a'], [*resume, '--out_dir=out/b']) == [2, 2]
    shutil.copytree('data/tiny', 'data/other')
    make_data([1] * 800, [1] * 200)
    assert ranks(run, [*run, '--dataset=other']) == [2, 2]
    assert Path('said0.txt').read_text().count('the processes see different files') == 2
    assert ranks(run, run, run) == [2, 2, 2] and 'must be a multiple of 3' in Path('said1.txt').read_text()


@pytest.mark.parametrize('kind', ['backpack', 'gpt'])
def test_every_evaluation_counts_stuck_senses(kind, tiny, capsys, monkeypatch):
    """What the gauge says of four senses goes to the terminal and to two columns of log.csv, which a
    Transformer leaves empty."""
    gauge = torch.tensor([0.98, 0.96, 1.0, 0.1]), torch.tensor([0.04, 0.06, 0.0, 0.01])
    monkeypatch.setattr(train, 'sense_gauge', lambda model, idx: gauge)
    train.main([*SMALL, f'--model={kind}', '--max_iters=4', '--eval_interval=2'])
    found = [(row['senses_on_current_token'], row['senses_by_position']) for row in log() if row['val_loss']]
    said = capsys.readouterr().out.count('stuck senses: 2 give over 0.97 of their weight to the current '
                                         'token, 3 follow position alone\n')
    assert (found, said) == (([('2', '3')] * 3, 3) if kind == 'backpack' else ([('', '')] * 3, 0))


def test_the_gauge_is_read_on_16_texts_without_dropout(tiny, monkeypatch):
    """Texts spread evenly over the bin, in evaluation mode; then the model goes back to training."""
    read = []

    def gauge(model, idx):
        read.append((model.training, idx))
        return torch.ones(4), torch.ones(4)

    monkeypatch.setattr(train, 'sense_gauge', gauge)
    model, data = a_model(dropout=0.5).train(), dataset('val')
    assert train.stuck_senses(model, data, Machine('cpu', 'float64', 0, 1)) == (4, 0)
    (training, idx), = read
    assert not training
    assert torch.equal(idx, data(np.arange(16) * 24 // 16)[0])
    assert model.training


def test_what_a_run_logs_goes_to_weights_and_biases_too_if_asked_for(tiny, monkeypatch, capsys):
    """Plain numbers, none longer than it is exact; wandb is imported only where it gets the same rows."""
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it is an ImportError
    train.main(RUN)
    asked, sent = {}, []
    fake = SimpleNamespace(log=lambda row, step: sent.append((step, row)))
    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=lambda **kw: asked.update(kw) or fake))
    train.main([*RUN, '--overwrite', '--wandb_log', '--wandb_project=p', '--learning_rate=0.0031'])
    assert re.search(r'\nstep 1 done on cpu \(.*\), peak memory \d+\.\d\d GB\n', capsys.readouterr().out)
    assert Path('out/run/log.csv').read_text().startswith('step,tokens,seconds,loss,val_loss,senses_')
    assert len(log()) == len(sent) == 10 and (asked['project'], asked['config']['n_embd']) == ('p', 16)
    for logged, (step, row) in zip(log(), sent):
        assert {name: float(x) for name, x in logged.items() if x} == pytest.approx(
            {name: row[name] for name in logged if row.get(name) is not None}, rel=1e-5)
        assert row['step'] == step and row['tokens'] == 32 * step and max(map(len, logged.values())) <= 12
    assert log()[2]['learning_rate'] == '0.0031'


def test_weights_that_stay_are_those_of_their_step(tiny, capsys):
    """ckpt-STEP.pt holds the weights of a run that ends there; they do not change the run, are read by name,
    and go with --overwrite, other files not; one that is not finite is not written."""
    run = [*SMALL, '--eval_interval=10']
    train.main([*run, '--max_iters=7', '--keep_every=3'])
    kept = {path.name: from_pretrained(path) for path in Path('out/run').glob('ckpt-*.pt')}
    whole, weights, mine = checkpoint(), kept['ckpt-3.pt'].state_dict(), Path('out/run/ckpt-3-mine.pt')
    mine.touch()
    assert sorted(kept) == ['ckpt-3.pt', 'ckpt-6.pt'] and kept['ckpt-6.pt'].run['tokens'] == 6 * 32
    train.main([*run, '--max_iters=3', '--overwrite'])
    same(dict(weights), dict(checkpoint()['model']))
    assert sorted(os.listdir('out/run')) == ['best.pt', mine.name, 'ckpt.pt', 'log.csv', 'previous.pt']
    train.main([*run, '--max_iters=7', '--keep_every=5', '--init_from=resume'])
    same(whole['model'], checkpoint()['model'])
    assert Path('out/run/ckpt-5.pt').exists()
    with pytest.raises(SystemExit, match='1'):
        train.main([*run, '--max_iters=7', '--keep_every=1', '--learning_rate=1e9', '--weight_decay=1e9',
                    '--grad_clip=0', '--log_interval=99', '--overwrite'])
    assert all(torch.isfinite(p).all() for path in Path('out/run').glob('ckpt-?.pt')
               for p in torch.load(path, weights_only=True)['model'].values())


def test_a_run_that_overflows_keeps_its_best_and_its_last_good_state(tiny, capsys, monkeypatch):
    """Whatever the log interval, and were it but a moment: exit code 1, one line, no checkpoint is spoilt."""
    def gradients(*args, real=train.gradients):
        loss = real(*args)
        next(args[0].parameters()).grad.fill_(1e30 if args[2] == 1 else 0)  # its square is infinite
        return loss

    wild = [*SMALL, '--learning_rate=3', '--weight_decay=3', '--grad_clip=0', '--warmup_iters=100',
            '--max_iters=60', '--lr_decay_iters=0', '--eval_interval=3']
    for interval in (60, 1):
        with pytest.raises(SystemExit) as stop:
            train.main([*wild, f'--log_interval={interval}', f'--out_dir=out/{interval}'])
        said, last = capsys.readouterr().err, checkpoint(f'out/{interval}')
        assert stop.value.code == 1 and said.count('\n') == 1 and 'stopped: step ' in said
        assert f'state is out/{interval}/ckpt.pt, of step {last["step"]}; go on by --init_from=' in said
        moments = [t for state in last['optimizers']['AdamW']['state'].values() for t in state.values()]
        assert all(t.isfinite().all() for t in [*last['model'].values(), *moments])
        monkeypatch.setattr(train, 'gradients', gradients)
    assert last['step'] == 0 and said.startswith('train.py: stopped: step 2: ')
    losses = {int(row['step']): float(row['val_loss']) for row in log('out/60') if row['val_loss']}
    best, previous = (torch.load(f'out/60/{name}.pt', weights_only=True) for name in ('best', 'previous'))
    assert losses[best['step']] == min(losses.values()) == pytest.approx(best['val_loss'], rel=1e-5)
    assert 0 < best['step'] < previous['step'] == checkpoint('out/60')['step'] - 3
