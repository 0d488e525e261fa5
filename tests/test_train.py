"""Claims about training: gradients, processes, resuming, fine-tuning, the log, how a run ends."""

import math
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
from helpers import (
    ROOT,
    RUN,
    SMALL,
    assert_same_run,
    checkpoint,
    error_of,
    lasting,
    log,
    make_data,
    ranks,
    same,
)
from torch import Tensor
from torch.testing import assert_close

from rucksack import train
from rucksack.cli import UserError, run_cli
from rucksack.data import TokenDataset, read_meta, texts_of_step
from rucksack.hub import export, from_pretrained
from rucksack.loaded import load_subject
from rucksack.model import GPT, Backpack, Config, DistinctIds, distinct_ids
from rucksack.train import Settings, share_of_peak
from rucksack.training import gauge
from rucksack.training.checkpoint import make_model, training_of
from rucksack.training.machine import Machine
from rucksack.training.report import stopped
from rucksack.training.start import SHAPE, start_from

RESUME = [*SMALL, '--init_from=resume']
FIXTURES = ROOT / 'tests' / 'fixtures'
ALONE = Machine('cpu', 'float64', 0, 1)


def a_model(**changes) -> Backpack:
    """A small model in float64."""
    torch.manual_seed(0)
    shape = dict(block_size=8, vocab_size=40, n_layer=2, n_head=2, n_embd=16, n_sense=4) | changes
    return make_model(Config(**shape)).double()


def dataset(name: str) -> TokenDataset:
    """A bin of data/tiny in texts of 8 tokens."""
    folder = Path('data/tiny')
    return TokenDataset(folder, name, read_meta(folder), 8)


def evaluations(folder: str = 'out/run') -> list[dict]:
    """The rows of a run's log that have a validation loss."""
    return [row for row in log(folder) if row['val_loss']]


# -----------------------------------------------------------------------------
# The parts of a step.


def split_gradients(size: int, n: int, rank: int = 0, world: int = 1) -> list[Tensor]:
    """A process's share of step 3 in n micro-batches: its loss, and the gradients."""
    model = DistinctIds(a_model())
    model.no_sync = nullcontext  # as DistributedDataParallel has
    s = Settings(batch_size=size, gradient_accumulation_steps=n)
    machine = Machine('cpu', 'float64', rank, world)
    loss = train.forward_backward(model, dataset('train'), 3, s, machine)
    return [loss, *(p.grad for p in model.parameters())]


def plain_gradients() -> list[Tensor]:
    """The mean loss of the 8 texts of step 3, and its gradients."""
    model = a_model()
    texts = texts_of_step(Settings.seed, 3, 8, 99)
    loss = model(*dataset('train')(texts))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize('size, n', [(8, 1), (2, 4)])
def test_gradients_are_those_of_the_mean_loss(size, n, tiny):
    """One batch of 8 and four of 2 have the gradients of model(idx, targets)."""
    assert_close(split_gradients(size, n), plain_gradients(), rtol=1e-9, atol=1e-14)


def test_two_processes_have_the_mean_of_their_gradients(tiny):
    """Each takes two of four batches of 2; the mean of both is the gradient of all 8."""
    shares = zip(split_gradients(2, 4, 0, 2), split_gradients(2, 4, 1, 2))
    means = [(a + b) / 2 for a, b in shares]
    assert_close(means, plain_gradients(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize('eval_iters, chosen', [(100, range(24)), (1, [0, 3, 6, 10, 13, 17, 20])])
def test_evaluation_is_the_mean_over_fixed_texts(eval_iters, chosen, tiny):
    """Over all, or over some spread evenly over the bin, without dropout, each text by itself."""
    model = DistinctIds(a_model(dropout=0.5))
    data = dataset('val')
    s = Settings(batch_size=7, eval_iters=eval_iters)
    loss = train.evaluate(model.train(), data, s, ALONE)
    plain = model.model.eval()
    each = [plain(*data(np.array([i]))).item() for i in chosen]
    assert loss == pytest.approx(np.mean(each), rel=1e-12)


SCHEDULE = Settings(
    warmup_iters=4, lr_decay_iters=14, min_lr=0.01, learning_rate=0.02, max_iters=24)


@pytest.mark.parametrize('step, share', [
    (0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (4, 1.0), (9, 0.75), (14, 0.5), (19, 0.5)])
def test_the_learning_rate_warms_up_and_decays_to_min_lr(step, share):
    """Linear up to the peak in warmup_iters, down to min_lr at lr_decay_iters, flat after it."""
    assert share_of_peak(step, SCHEDULE) == share


@pytest.mark.parametrize('step, rate', [(14, 0.75), (24, 0.5)])
def test_the_learning_rate_decays_to_the_end_by_default(step, rate):
    """With lr_decay_iters = 0 it is at min_lr after max_iters."""
    assert share_of_peak(step, replace(SCHEDULE, lr_decay_iters=0)) == rate


def test_embeddings_decay_only_if_asked(tiny):
    """Under strong weight decay they shrink, by --decay_embeddings=False not; matrices do."""
    embedding = 'wte.weight'
    matrix = 'sense_weights.c_attn.weight'
    run = [*SMALL, '--max_iters=3', '--weight_decay=50']
    train.main([*run, '--decay_embeddings=True', '--out_dir=out/both'])
    train.main([*run, '--decay_embeddings=False', '--out_dir=out/one'])
    both = checkpoint('out/both')['model']
    one = checkpoint('out/one')['model']
    assert both[embedding].norm() < 0.7 * one[embedding].norm()
    assert both[matrix].norm().item() == pytest.approx(one[matrix].norm().item(), rel=0.2)


def watch_steps(monkeypatch, see) -> None:
    """Call see(optimizer) right before each of its steps."""
    real = train.make_optimizers

    def make_optimizers(*args, **options):
        optimizers = real(*args, **options)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda optimizer, *_: see(optimizer))
        return optimizers

    monkeypatch.setattr(train, 'make_optimizers', make_optimizers)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_each_step_has_the_rate_of_its_optimizer_and_group(optimizer, tiny, monkeypatch):
    """Muon's is muon_lr; loaded parameters have loaded_lr times their optimizer's."""
    train_a_run('gpt')
    seen = []

    def see(own) -> None:
        rates = {group['factor']: group['lr'] for group in own.param_groups}
        seen.append((type(own).__name__, rates))

    watch_steps(monkeypatch, see)
    train.main([*WARM, '--max_iters=3', f'--optimizer={optimizer}', '--muon_lr=0.03',
                '--loaded_lr=0.1'])
    s = Settings(warmup_iters=2, lr_decay_iters=20)
    names = ['AdamW', 'Muon'] if optimizer == 'muon' else ['AdamW']
    assert [name for name, _ in seen] == names * 3
    for i, (name, rates) in enumerate(seen):
        peak = {'AdamW': 0.01, 'Muon': 0.03}[name]
        rate = peak * share_of_peak(i // len(names), s)
        assert rates == pytest.approx({1.0: rate, 0.1: 0.1 * rate})


def test_gradients_are_clipped_and_logged_as_they_were(tiny, monkeypatch):
    """The optimizer gets a norm of grad_clip; the log has the norm before clipping."""
    real = train.forward_backward

    def forward_backward(model, *args):
        loss = real(model, *args)
        for p in model.parameters():
            p.grad.fill_(1.0)
        return loss

    norms = []

    def see(own) -> None:
        gradients = [p.grad for group in own.param_groups for p in group['params']]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    monkeypatch.setattr(train, 'forward_backward', forward_backward)
    watch_steps(monkeypatch, see)
    train.main([*SMALL, '--max_iters=1', '--grad_clip=0.5'])
    n = sum(weight.numel() for weight in checkpoint()['model'].values())
    assert norms == [pytest.approx(0.5, rel=1e-4)]
    assert float(log()[1]['grad_norm']) == pytest.approx(n ** 0.5, rel=1e-4)


def test_bfloat16_is_for_products_alone(tiny):
    """Weights stay in float32; the loss after two steps is near float32's and is not the same."""
    losses = {}
    weights = {}
    for dtype in ('float32', 'bfloat16'):
        folder = f'out/{dtype}'
        train.main([*SMALL, f'--dtype={dtype}', '--max_iters=2', f'--out_dir={folder}'])
        weights[dtype] = checkpoint(folder)['model']
        losses[dtype] = checkpoint(folder)['val_loss']
    assert {weight.dtype for weight in weights['bfloat16'].values()} == {torch.float32}
    assert not torch.equal(weights['bfloat16']['wte.weight'], weights['float32']['wte.weight'])
    assert losses['bfloat16'] == pytest.approx(losses['float32'], abs=0.02)
    assert losses['bfloat16'] != losses['float32']


# -----------------------------------------------------------------------------
# Compiled.


def loss_and_gradients(loss: Tensor, model: Backpack) -> list[Tensor]:
    """The loss, and the gradient of each parameter."""
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize('n_sense', [4, 0])
def test_a_model_is_compiled_once_for_any_distinct_ids(n_sense):
    """20 batches of 1 to 320 ids are one graph with the plain gradients, as smaller ones have."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = a_model(vocab_size=400, block_size=40, n_sense=n_sense)
    torch._dynamo.reset()
    compiled = torch.compile(DistinctIds(model), fullgraph=True, backend=backend)
    sizes = [8] * 20 + [7, 3, 2]
    for i, size in enumerate(sizes):
        n_ids = 1 + 21 * min(i, 18)
        idx = torch.randint(n_ids, (size, 40))
        inputs = ALONE.to_device(idx, idx, *distinct_ids(idx))
        own = loss_and_gradients(compiled(*inputs), model)
        plain = loss_and_gradients(model(idx, idx), model)
        assert_close(own, plain, rtol=1e-9, atol=1e-12)
        if size == 8:
            assert len(graphs) == 1


# -----------------------------------------------------------------------------
# Resuming.


@pytest.mark.parametrize('option', [
    '--dropout=0.2', '--model=gpt', '--dtype=float64', '--dtype=bfloat16', '--optimizer=muon',
    pytest.param('--compile=True', marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_bits(option, tiny, capsys, monkeypatch):
    """Ctrl-C ends it with exit code 130; resumed, it goes on from the last evaluation."""
    real = train.forward_backward

    def forward_backward(model, data, step, s, machine):
        if step == 7:
            raise KeyboardInterrupt
        return real(model, data, step, s, machine)

    run = [*SMALL, option, '--max_iters=20', '--eval_interval=5', '--learning_rate=.2']
    train.main([*run, '--out_dir=out/whole'])  # its best is early
    with monkeypatch.context() as patch:
        patch.setattr(train, 'forward_backward', forward_backward)
        with pytest.raises(SystemExit) as stop:
            train.main(run)
    assert stop.value.code == 130
    assert checkpoint()['step'] == 5
    train.main([*run, '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')


@pytest.mark.parametrize('option', [
    'learning_rate=0.02', 'optimizer=muon', 'seed=2', 'dtype=float64', 'n_sense=8', 'model=gpt'])
def test_a_resumed_run_keeps_its_settings(option, tiny, capsys):
    """Another size, or what would change the result, is refused by name, and nothing changes."""
    train.main([*SMALL, '--max_iters=2'])
    before = Path('out/run/ckpt.pt').read_bytes()
    error = error_of(train, capsys, *RESUME, '--max_iters=4', f'--{option}')
    name, value = option.split('=')
    for fact in ('out/run/ckpt.pt', name, value):
        assert fact in error
    assert Path('out/run/ckpt.pt').read_bytes() == before


def test_a_resumed_run_may_be_longer(tiny):
    """max_iters and the intervals may change; it ends in the bits of a run that was so long."""
    run = [*SMALL, '--dropout=0.2']
    train.main([*run, '--max_iters=4', '--eval_interval=1', '--out_dir=out/whole'])
    train.main([*run, '--max_iters=2', '--log_interval=2'])
    train.main([*run, '--max_iters=4', '--eval_interval=1', '--init_from=resume'])
    same(lasting(Path('out/whole/ckpt.pt')), lasting(Path('out/run/ckpt.pt')))


def test_a_resumed_run_keeps_its_data(tiny, capsys):
    """Other data under the same name are refused, and the checkpoint stays."""
    train.main([*SMALL, '--max_iters=2'])
    make_data([1] * 800, [2] * 200)
    assert 'data/tiny' in error_of(train, capsys, *RESUME, '--max_iters=5')
    assert checkpoint()['step'] == 2


def test_a_config_gives_a_resumed_run_its_name_alone(tiny):
    """The settings in it, changed since or not, do not reach the run; flags that steer it do."""
    Path('train_run.py').write_text('max_iters = 9\nlearning_rate = 5.0\nn_layer = 7\n')
    train.main([*RUN, '--max_iters=2'])
    train.main(['train_run.py', '--init_from=resume'])
    assert checkpoint()['step'] == 2
    train.main(['train_run.py', '--init_from=resume', '--max_iters=3'])
    assert checkpoint()['step'] == 3
    assert checkpoint()['settings']['learning_rate'] == 0.01


def test_a_resumed_run_has_the_number_format_it_began_with(tiny, capsys):
    """The first line says so."""
    train.main([*SMALL, '--max_iters=1'])
    assert 'in float32 (as set or saved)' in capsys.readouterr().out
    train.main(['--init_from=resume', '--out_dir=out/run', '--max_iters=2'])
    assert 'in float32 (as set or saved)' in capsys.readouterr().out


def test_too_little_memory_in_one_process_is_named(tiny, capsys, monkeypatch):
    """A process that is not its machine's first prints its own line, with its rank."""
    with pytest.raises(UserError) as out_of_memory:
        stopped(torch.OutOfMemoryError(), Path('out/run/ckpt.pt'), 3, rank=2)
    error = out_of_memory.value
    monkeypatch.setenv('LOCAL_RANK', '2')

    def fail(argv):
        raise error

    with pytest.raises(SystemExit):
        run_cli('train.py', fail, [])
    said = capsys.readouterr().err
    assert 'process 2' in said
    assert '--init_from=out/run/ckpt.pt' in said


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A10G', 70e12), ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA RTX A1000', None)])
def test_utilization_is_of_the_peak_of_the_gpu(name, peak):
    """The names of some GPUs begin with the name of another; other peaks are not known."""
    machine = Machine('cpu', 'float32', 0, 1)
    machine.name = name
    assert machine.mfu(peak or 1) == (1 if peak else None)


# -----------------------------------------------------------------------------
# Fine-tuning.

SIZELESS = [word for word in SMALL if not word.startswith('--n_')]
TUNE = [*SIZELESS, '--out_dir=out/tuned', '--max_iters=1', '--dropout=0.3']
KINDS = pytest.mark.parametrize('kind', ['backpack', 'gpt'])


def weights_of(source: str) -> dict[str, Tensor]:
    """The weights of a model, by name."""
    model, _ = from_pretrained(source)
    return model.state_dict()


def shape_of(model: GPT, n_sense: int, **changes) -> dict:
    """The shape of a Backpack that starts from a Transformer."""
    shape = {name: getattr(model.config, name) for name in SHAPE}
    return {**shape, 'n_sense': n_sense, **changes}


def train_a_run(kind: str) -> None:
    """Weights to start from in out/run."""
    train.main([*SMALL, '--max_iters=5', f'--model={kind}'])


@KINDS
@pytest.mark.parametrize('is_exported', [False, True])
def test_fine_tuning_starts_from_the_weights_given(kind, is_exported, tiny, capsys):
    """Its first loss is the last of the run it goes on from, also by way of exported files."""
    train_a_run(kind)
    source = 'out/run'
    if is_exported:
        source = 'exported'
        export(*from_pretrained('out/run'), source)
    train.main([*TUNE, f'--init_from={source}'])
    first = evaluations('out/tuned')[0]
    assert first['step'] == '0'
    assert first['val_loss'] == evaluations('out/run')[-1]['val_loss']


@KINDS
def test_fine_tuning_takes_the_sizes_of_the_weights(kind, tiny):
    """Those that are given may be the same; dropout is what was asked for."""
    train_a_run(kind)
    train.main([*TUNE, '--init_from=out/run', '--n_embd=16'])
    own = checkpoint('out/run')['model_config']
    tuned = checkpoint('out/tuned')
    assert tuned['model_config'] == own | {'dropout': 0.3}
    assert tuned['settings']['n_layer'] == own['n_layer']


@KINDS
def test_fine_tuning_can_be_resumed(kind, tiny):
    """With the same words, and --init_from=resume in place of the weights."""
    train_a_run(kind)
    tune = [*TUNE, '--init_from=out/run']
    train.main([*tune, '--max_iters=2', '--eval_interval=1', '--out_dir=out/whole'])
    train.main([*tune, '--eval_interval=1'])
    train.main([*TUNE, '--init_from=resume', '--max_iters=2'])
    assert_same_run('out/whole', 'out/tuned')


@pytest.mark.parametrize('kind, option', [
    ('backpack', 'n_embd=32'), ('backpack', 'n_layer=3'), ('backpack', 'model=gpt'),
    ('backpack', 'n_sense=8'), ('gpt', 'n_embd=32')])
def test_fine_tuning_refuses_other_sizes(kind, option, tiny, capsys):
    """The weights are named, the size and its value, and no run begins."""
    train_a_run(kind)
    error = error_of(train, capsys, *TUNE, '--init_from=out/run', f'--{option}')
    for fact in ('out/run', *option.split('=')):
        assert fact in error
    assert not Path('out/tuned').exists()


# -----------------------------------------------------------------------------
# A Backpack that starts from a Transformer.

WARM = [*TUNE, '--init_from=out/run', '--model=backpack', '--n_sense=2', '--sense_hidden=24']


def test_a_transformer_becomes_a_backpack(tiny, capsys):
    """Every tensor of the Transformer stays; senses of the size set are new, and a line says so."""
    train_a_run('gpt')
    capsys.readouterr()
    train.main([*WARM, '--max_iters=0'])
    said = capsys.readouterr().out
    assert 'out/run; sense_network and sense_weights are new' in said
    source = weights_of('out/run')
    warm, _ = from_pretrained('out/tuned')
    assert warm.config.n_sense == 2
    assert warm.config.sense_hidden == 24
    own = warm.state_dict()
    assert_close({name: own.pop(name) for name in source}, source, rtol=0, atol=0)
    assert all(name.startswith('sense_') for name in own)


def test_its_contextualizer_is_that_of_the_transformer():
    """h of a Backpack that starts from a published GPT-2 is GPT-2's, bit for bit."""
    gpt2, _ = from_pretrained(FIXTURES / 'gpt2-tiny')
    shape = shape_of(gpt2, 4, block_size=6, dropout=0.0)
    warm = start_from(gpt2, 'gpt2', 0, gpt2.config.n_vocab, shape, ALONE)
    assert warm.config.block_size == 6
    idx = torch.arange(12).view(2, 6)
    assert torch.equal(warm.contextualizer(warm.wte(idx)), gpt2.contextualizer(gpt2.wte(idx)))


@pytest.mark.parametrize('size', [0.02, 0.14, 4.0])
def test_its_first_loss_is_near_that_of_no_knowledge(size):
    """At most ln V + 0.2, also where trained embeddings are as large as GPT-2's, and larger."""
    torch.manual_seed(0)
    transformer = GPT(Config(block_size=32, vocab_size=500, n_layer=1, n_head=4, n_embd=256))
    torch.nn.init.normal_(transformer.wte.weight, mean=size / 2, std=size)
    warm = start_from(transformer, 'a', 0, 500, shape_of(transformer, 16), ALONE)
    idx = torch.randint(500, (8, 33))
    assert warm(idx[:, :-1], idx[:, 1:]) <= math.log(500) + 0.2


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_loaded_lr_0_trains_the_senses_alone(optimizer, tiny):
    """Embeddings and contextualizer stay as they were; senses and their weights move."""
    train_a_run('gpt')
    train.main([*WARM, '--max_iters=3', '--loaded_lr=0', f'--optimizer={optimizer}'])
    source, _ = from_pretrained('out/run')
    shape = shape_of(source, 2, sense_hidden=24)
    before = start_from(source, 'out/run', Settings.seed, 257, shape, ALONE).state_dict()
    for name, weight in weights_of('out/tuned').items():
        assert torch.equal(weight, before[name]) != name.startswith('sense_'), name


def test_rows_that_the_data_does_not_use_are_unused(tiny):
    """Weights without a tokenizer may have more ids than the data; the run has the data's."""
    config = Config(n_layer=2, n_head=2, n_embd=16, n_sense=4, block_size=8, vocab_size=300)
    export(Backpack(config), None, 'padded')
    train.main([*SMALL, '--init_from=padded', '--max_iters=1'])
    subject = load_subject('out/run', 'cpu')
    assert subject.model.config.n_vocab == 257
    assert subject.model.config.vocab_size == 300


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_a_warm_start_resumes_to_the_same_bits(optimizer, tiny):
    """With loaded_lr too, which a resumed run takes from its checkpoint."""
    train_a_run('gpt')
    warm = [*WARM, '--eval_interval=1', f'--optimizer={optimizer}', '--loaded_lr=0.1']
    train.main([*warm, '--max_iters=3', '--out_dir=out/whole'])
    train.main([*warm, '--max_iters=1'])
    train.main(['--init_from=resume', '--out_dir=out/tuned', '--max_iters=3'])
    assert_same_run('out/whole', 'out/tuned')


# -----------------------------------------------------------------------------
# Several processes.


def assert_close_runs(a: str, b: str) -> None:
    """The weights and first moments of two runs agree to 1e-12, and their logs."""
    one = checkpoint(a)
    other = checkpoint(b)
    assert_close(one['model'], other['model'], rtol=0, atol=1e-12)
    moments = other['optimizers']['AdamW']['state']
    for i, own in one['optimizers']['AdamW']['state'].items():
        assert_close(own['exp_avg'], moments[i]['exp_avg'], rtol=0, atol=1e-12)
    assert log(a) == log(b)


@pytest.mark.parametrize('n', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_train_as_one(n, tiny):
    """The first step's gradients, and the weights after 20, are those of one process in float64."""
    run = [*SMALL, '--gradient_accumulation_steps=4', '--dtype=float64', '--dropout=0.2',
           '--beta1=0']  # then exp_avg is the gradient
    for more in (['--max_iters=1'], ['--max_iters=20', '--init_from=resume']):
        train.main([*run, *more, '--out_dir=out/one'])
        all_of_them = [[*run, *more, '--out_dir=out/all']] * n
        assert ranks(*all_of_them) == [0] * n
        assert_close_runs('out/one', 'out/all')


TWO = [*SMALL, '--gradient_accumulation_steps=2']


def error_in(name: str) -> str:
    """The one line of an error in what a process said."""
    said = Path(name).read_text().splitlines()
    error, = [line for line in said if line.startswith('train.py: ')]
    return error


@pytest.mark.slow
def test_processes_at_different_steps_are_refused(tiny):
    """Two that resume from different checkpoints leave with exit code 2 and a line."""
    train.main([*TWO, '--max_iters=2', '--out_dir=out/a'])
    train.main([*TWO, '--max_iters=4', '--out_dir=out/b'])
    resume = [*TWO, '--max_iters=6', '--init_from=resume']
    assert ranks([*resume, '--out_dir=out/a'], [*resume, '--out_dir=out/b']) == [2, 2]
    assert 'out/a' in error_in('said0.txt')
    assert checkpoint('out/a')['step'] == 2


@pytest.mark.slow
def test_processes_that_read_different_data_are_refused(tiny):
    """They leave with exit code 2 and a line, before a run begins."""
    shutil.copytree('data/tiny', 'data/other')
    make_data([1] * 800, [1] * 200)
    run = [*TWO, '--max_iters=6']
    assert ranks(run, [*run, '--dataset=other']) == [2, 2]
    assert 'data/tiny' in error_in('said0.txt')
    assert not Path('out').exists()


# -----------------------------------------------------------------------------
# What a run says of its senses.


@pytest.mark.parametrize('kind, counted', [('backpack', ('2', '3')), ('gpt', ('', ''))])
def test_every_evaluation_counts_stuck_senses(kind, counted, tiny, capsys, monkeypatch):
    """What the gauge says is on the terminal and in two columns of log.csv, if there are senses."""
    on_current = torch.tensor([0.98, 0.96, 1.0, 0.1])  # two over 0.97
    moved = torch.tensor([0.04, 0.06, 0.0, 0.01])  # three below 0.05
    monkeypatch.setattr(gauge, 'sense_gauge', lambda model, idx: (on_current, moved))
    train.main([*SMALL, f'--model={kind}', '--max_iters=4', '--eval_interval=2'])
    rows = evaluations()
    assert len(rows) == 3
    for row in rows:
        assert (row['senses_on_current_token'], row['senses_by_position']) == counted
    said = re.findall(r'^stuck senses: (\d) .*, (\d) ', capsys.readouterr().out, re.MULTILINE)
    assert said == ([counted] * 3 if kind == 'backpack' else [])


# -----------------------------------------------------------------------------
# The log.


def test_the_log_has_a_row_a_step_and_an_evaluation(tiny):
    """Numbers are no longer than they are exact."""
    train.main([*RUN, '--learning_rate=0.0031'])
    steps = [(row['step'], row['val_loss'] != '') for row in log()]
    assert steps == [
        ('0', True), ('1', False), ('2', False), ('2', True), ('3', False), ('4', False),
        ('4', True), ('5', False), ('6', False), ('6', True)]
    assert [int(row['tokens']) for row in log()] == [32 * int(step) for step, _ in steps]
    assert log()[2]['learning_rate'] == '0.0031'
    assert log()[2]['muon_lr'] == ''
    for row in log():
        assert max(map(len, row.values())) <= 12


def test_muon_lr_is_logged_and_ends_at_the_same_share_as_min_lr(tiny, capsys):
    """The line and the log have both; min_lr is AdamW's, and Muon's floor the same share."""
    train.main([*SMALL, '--optimizer=muon', '--max_iters=20', '--muon_lr=0.04', '--min_lr=0.001'])
    last = log()[-2]
    assert float(last['learning_rate']) == pytest.approx(0.001, rel=0.6)
    assert float(last['muon_lr']) == pytest.approx(4 * float(last['learning_rate']), rel=1e-5)
    assert f'lr {float(last["learning_rate"]):.2e} (Muon {float(last["muon_lr"]):.2e})' in (
        capsys.readouterr().out)


def test_data_of_nanogpt_trains_unchanged(tiny):
    """Bins without a meta.json hold GPT-2's tokens."""
    Path('data/tiny/meta.json').unlink()
    train.main([*SMALL, '--max_iters=1', '--batch_size=1', '--eval_iters=1'])
    assert checkpoint()['tokenizer'] == {'name': 'gpt2'}
    assert checkpoint()['model_config']['n_vocab'] == 50257


def test_wandb_log_without_wandb_keeps_the_run_before(tiny, capsys, monkeypatch):
    """Asked for where it is not installed, it is one line, and --overwrite has deleted nothing."""
    train.main(RUN)
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it is an ImportError
    said = error_of(train, capsys, *RUN, '--overwrite', '--wandb_log')
    assert 'pip install wandb' in said
    assert sorted(os.listdir('out/run')) == ['best.pt', 'ckpt.pt', 'log.csv']


def test_wandb_log_gets_what_is_logged(tiny, monkeypatch):
    """The same rows, as numbers, under their steps, and the settings of the run."""
    asked = {}
    sent = []

    def init(**facts):
        asked.update(facts)
        return SimpleNamespace(log=lambda row, step: sent.append((step, row)))

    monkeypatch.setitem(sys.modules, 'wandb', SimpleNamespace(init=init))
    train.main([*RUN, '--wandb_log', '--wandb_project=p'])
    assert asked['project'] == 'p'
    assert asked['config'] == checkpoint()['settings']
    assert len(sent) == len(log())
    for logged, (step, row) in zip(log(), sent):
        numbers = {name: float(text) for name, text in logged.items() if text}
        given = {name: row[name] for name in logged if row.get(name) is not None}
        assert numbers == pytest.approx(given, rel=1e-5)
        assert row['step'] == step


# -----------------------------------------------------------------------------
# Weights that stay.

RARELY = [*SMALL, '--eval_interval=10']


def kept() -> list[str]:
    """The names of the weights that stay."""
    return sorted(path.name for path in Path('out/run').glob('ckpt-*.pt'))


def test_keep_every_keeps_the_weights_of_a_step(tiny):
    """ckpt-3.pt has the weights of a run that ends there, and says how many tokens those took."""
    train.main([*RARELY, '--max_iters=7', '--keep_every=3'])
    assert kept() == ['ckpt-3.pt', 'ckpt-6.pt']
    state = torch.load('out/run/ckpt-3.pt', weights_only=True)
    weights = dict(weights_of('out/run/ckpt-3.pt'))
    train.main([*RARELY, '--max_iters=3', '--out_dir=out/short'])
    same(weights, dict(checkpoint('out/short')['model']))
    assert training_of(state).tokens == 3 * 32


def test_keep_every_does_not_change_a_run(tiny):
    """The same bits with and without them; a resumed run may keep others."""
    train.main([*RARELY, '--max_iters=7', '--out_dir=out/whole'])
    train.main([*RARELY, '--max_iters=3', '--keep_every=3'])
    train.main([*RARELY, '--max_iters=7', '--keep_every=5', '--init_from=resume'])
    assert kept() == ['ckpt-3.pt', 'ckpt-5.pt']
    same(checkpoint('out/whole')['model'], checkpoint()['model'])


# -----------------------------------------------------------------------------
# Runs that must stop.


def line_of_a_stopped_run(capsys, *argv: str) -> str:
    """The one line that a run says as it stops itself with exit code 1."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(list(argv))
    error = capsys.readouterr().err
    assert stop.value.code == 1
    assert error.count('\n') == 1
    return error


def assert_finite(path: Path) -> None:
    """All weights and moments in a checkpoint are finite."""
    state = torch.load(path, weights_only=True)
    tensors = [*state['model'].values()]
    for optimizer in state.get('optimizers', {}).values():
        for moments in optimizer['state'].values():
            tensors.extend(moments.values())
    for tensor in tensors:
        assert tensor.isfinite().all()


WILD = [*SMALL, '--learning_rate=3', '--weight_decay=3', '--grad_clip=0', '--warmup_iters=100',
        '--max_iters=60', '--lr_decay_iters=0', '--eval_interval=3']


def test_a_run_that_diverges_keeps_its_best_and_last_state(tiny, capsys):
    """It says of which step the last one is, also where no line of the log was due."""
    error = line_of_a_stopped_run(capsys, *WILD, '--log_interval=60')
    last = checkpoint()
    best = torch.load('out/run/best.pt', weights_only=True)
    for fact in ('out/run/ckpt.pt', f'step {last["step"]}'):
        assert fact in error
    assert_finite(Path('out/run/ckpt.pt'))
    losses = {int(row['step']): float(row['val_loss']) for row in evaluations()}
    assert losses[best['step']] == min(losses.values())
    assert best['val_loss'] == pytest.approx(min(losses.values()), rel=1e-5)
    assert 0 < best['step'] < last['step']


def test_a_single_overflow_stops_a_run(tiny, capsys, monkeypatch):
    """A gradient whose square is infinite, once, in the second step: its moment is not saved."""
    real = train.forward_backward

    def forward_backward(model, data, step, s, machine):
        loss = real(model, data, step, s, machine)
        next(model.parameters()).grad.fill_(1e30 if step == 1 else 0)
        return loss

    monkeypatch.setattr(train, 'forward_backward', forward_backward)
    error = line_of_a_stopped_run(capsys, *WILD)
    for fact in ('step 2', 'out/run/ckpt.pt', 'step 0'):
        assert fact in error
    assert checkpoint()['step'] == 0
    assert_finite(Path('out/run/ckpt.pt'))


def test_keep_every_keeps_no_weights_that_are_not_finite(tiny, capsys):
    """Where no evaluation and no line of the log is due, they are checked all the same."""
    wild = [*RARELY, '--max_iters=7', '--learning_rate=1e9', '--weight_decay=1e9', '--grad_clip=0']
    line_of_a_stopped_run(capsys, *wild, '--keep_every=1', '--log_interval=99')
    assert kept()
    for name in kept():
        assert_finite(Path('out/run', name))
