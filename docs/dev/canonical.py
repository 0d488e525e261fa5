"""Compare ways to teach a model canonical examples (arXiv 2402.06155).

    python -m docs.dev.canonical validate FOLDER canonical.csv [--tasks ..] [--methods ..]
    python -m docs.dev.canonical test FOLDER canonical.csv [--tasks ..] [--methods ..]

FOLDER has a folder for each of the six tasks, and text.jsonl, ordinary text from outside them. Each
run appends a row to the CSV file; runs that are already in it are skipped. validate tries every
configuration of every method on the validation pairs; test runs the best one for each task and
method on the test pairs with three seeds. LoRA needs peft.

An update (vectors of senses, or differences of parameters) that costs more than the budget on 100
texts is scaled back. The price is measured on 300 other texts. Learning uses neither. (In
validation, which only chooses configurations, both use the same 30 texts.)
The neighbours of the examples are found by english (see rucksack/edits/neighbours.py), half of them
are held where senses are learned, and the other half is counted for every method.
Lent senses are learned by english with the configurations of senses, but not scaled: beta is the
largest of 1.5, 1.4 .. 0 that keeps to the budget on the 100 texts.
"""

import argparse
import csv
import json
import math
import random
import time
from bisect import bisect_left
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rucksack.edits import learning
from rucksack.edits.examples import Example
from rucksack.edits.lending import Lent
from rucksack.edits.neighbours import neighbours_of, write_texts
from rucksack.edits.positions import inside
from rucksack.edits.shifts import make_shift
from rucksack.loaded import load_model

PASSES = 10   # over the examples, for finetuning
EXAMPLES_AT_ONCE = 5
BUDGET = 1e-3  # a share of the loss on ordinary text
FACTORS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
BETAS = [n / 10 for n in range(15, -1, -1)]  # for lending
TASKS = {  # examples, texts to judge, hard negatives; the wish; what counts as success
    'country_capital': (('fixed', 'clear_eval', 'hard_neg'), 'more', 0.2),
    'pronoun_gender_bias': (('train', 'eval', 'hard_neg_eval'), 'equal', 1.5),
    'company_ceo': (('train', 'eval_clear', 'hard_neg_eval_clear'), 'more', 0.05),
    'verb_conjugation': (('train', 'eval', 'hard_neg_eval'), 'order', 16),
    'stereoset': (('train', 'eval_clear', 'hard_neg'), 'less', 0.001),
    'temporal': (('train', 'eval_clear', 'hard_neg_eval_clear'), 'more', 0.05)}
SUBJECTS = ('country_capital', 'company_ceo', 'pronoun_gender_bias', 'temporal')
CONFIGS = {
    'senses': [{'HOLD': hold, 'URGENCY': hold / 10} for hold in (100, 10, 1)],
    'full': [{'lr': lr, 'kl': kl}
             for kl, lr in [*product((10, 1), (3e-4, 1e-3, 1e-4, 3e-5)), (30, 3e-4), (30, 1e-4)]],
    'lora': [{'lr': lr, 'kl': kl, 'rank': rank}
             for rank, kl, lr in [*product((4, 16), (10, 1), (3e-3, 1e-2)), (16, 10, 1e-3),
                                  (16, 1, 1e-3), (16, 30, 3e-3), (16, 1, 3e-4)]],
    'lent': []}  # the configurations of senses
METHODS = {  # method -> model and configurations
    'senses': ('english', 'senses'),
    'senses of any word': ('english', 'senses'),  # as if no example had a subject
    'Transformer, full': ('english_gpt', 'full'),
    'Transformer, LoRA': ('english_gpt', 'lora'),
    'Transformer, lent senses': ('english_gpt', 'lent'),
    'Transformer, lent senses of any word': ('english_gpt', 'lent'),
    'Backpack, full': ('english', 'full'),
    'Backpack, LoRA': ('english', 'lora')}
SIZES = {  # at most: examples, texts to judge, hard negatives, texts that give the price
    'validate': (120, 120, 60, 30), 'test': (120, 360, 120, 300)}
# nats, errors of means over texts; inside: divergence inside the examples' prompts; other, same:
# neighbours with another subject, and with the same (or, for tasks without subjects, any); rises of
# p(A), shares whose likeliest next word changed, and their number
COLUMNS = (
    'stage', 'task', 'method', 'config', 'seed', 'before', 'success_before', 'hard_before', 'size',
    'budget', 'factor', 'nats', 'gain_error', 'success', 'hard', 'hard_error', 'price',
    'price_error', 'inside', 'other_rise', 'other_changed', 'same_rise', 'same_changed',
    'neighbours', 'loss', 'seconds')


# -----------------------------------------------------------------------------
# Data.


def read_rows(path, wish, encoding, most):
    """Read the rows of a file as examples: at most `most`, drawn with a fixed seed."""
    rows = [json.loads(line) for line in path.open(encoding='utf-8')]
    if len(rows) > most:
        rows = random.Random(0).sample(rows, most)
    examples = []
    for row in rows:
        prefix, *suffixes = with_subject(row)
        first, second = [encoding.encode_ordinary(text) for text in [*suffixes, ''][:2]]
        longest = 255 - max(len(first), len(second))
        prompt = encoding.encode_ordinary(prefix)[-longest:] or [encoding.eot_token]
        examples.append(Example('', prompt, first[:250], second[:250], wish))
    return [one for one in examples if one.a]


def with_subject(row):
    """List the prefix and suffixes of a row, so that the prefix has the subject.

    A few published rows end the prefix too early: The capital of | Tunisia is Tunis.
    """
    if 'suffix1' in row:
        return row['prefix'], row['suffix1'], row['suffix2']
    prefix, suffix = row['prefix'], row['suffix']
    subject, between, rest = suffix.partition(' is ')
    if prefix.endswith('The capital of') and between:
        return f'{prefix}{subject} is', f' {rest}'
    return prefix, suffix


def read_task(folder, task, split, encoding, sizes):
    """Read the examples, the texts to judge and the hard negatives of a task."""
    parts, wish, _ = TASKS[task]
    if task == 'stereoset':  # line i of each file has the same subject: judge what was taught
        sizes = (sizes[0], sizes[0], *sizes[2:])
    return [read_rows(folder / task / f'{task}_{part}-{split}.jsonl',
                      wish if part != parts[2] else 'more', encoding, most)
            for part, most in zip(parts, sizes)]


def with_neighbours(loaded, task, data, held):
    """Give the examples of a task their subjects, and find the neighbours."""
    examples, *rest = data
    if task not in SUBJECTS:
        examples = [replace(one, subject=()) for one in examples]
    background = [(ids[:1], ids[1:]) for ids in held]
    examples, near = neighbours_of(loaded, examples, background)
    return [examples, *rest], near


def read_background(folder, encoding, n, stage):
    """Read texts that learning preserves, n others that give the price, and some to scale by."""
    texts = []
    for line in (folder / 'text.jsonl').open(encoding='utf-8'):
        ids = [encoding.eot_token, *encoding.encode_ordinary(json.loads(line)['text'])]
        if len(ids) > 2:
            texts.append(ids[:257])
    priced = texts[1000:1000 + n]
    return texts[:40], priced, priced if stage == 'validate' else texts[2000:2100]


# -----------------------------------------------------------------------------
# Scores of a model in its current state.


@torch.no_grad()
def nats_after(model, prompt, continuation, edit):
    """Compute -log p of a continuation, in nats."""
    n = len(continuation)
    text = torch.tensor(prompt + continuation)
    logits = last_logits(model, text[None, :-1], n, edit)
    return F.cross_entropy(logits, text[-n:], reduction='sum').item()


def last_logits(model, idx, n, edit):
    """Compute the logits at the last n positions of a text (1, T), under an edit or none."""
    changed = {'C': edit(idx, model.senses(idx))} if edit else {}
    return model(idx, **changed)[0, -n:, :model.config.n_vocab]


def judge(model, examples, edit, threshold):
    """Compute the values that the examples should lower (n,), and the share that succeeds."""
    losses, successes = [], []
    for one in examples:
        nats_of_a, nats_of_b = (nats_after(model, one.prompt, ids, edit) if ids else 0
                                for ids in (one.a, one.b))
        loss = one.loss(torch.tensor(nats_of_b - nats_of_a)).item()
        sign = -1 if one.wish in ('more', 'order') else 1
        losses.append(loss)
        successes.append(loss <= sign * math.log(threshold))
    return torch.tensor(losses), sum(successes) / len(examples)


def loss_of_texts(model, texts, edit=None):
    """Compute the loss of each text (n,), such that the mean is the loss in nats per token."""
    nats = torch.tensor([nats_after(model, ids[:1], ids[1:], edit) for ids in texts])
    return nats * len(texts) / sum(len(ids) - 1 for ids in texts)


def mean_loss(model, texts, edit=None):
    """Compute the mean loss of texts, in nats per token."""
    return loss_of_texts(model, texts, edit).mean().item()


def standard_error(values):
    """Estimate the standard error of the mean of values (n,), by bootstrap."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (1000, len(values)), generator=generator)
    return values[drawn].mean(1).std().item()


@torch.no_grad()
def inside_prompts(model, examples, edit=None):
    """Predict at the positions inside the prompts of examples: log p of all ids (positions, V)."""
    texts = [torch.tensor(one.prompt[:-1]) for one in examples if len(one.prompt) > 1]
    logits = [last_logits(model, ids[None], len(ids), edit) for ids in texts]
    return torch.cat(logits).log_softmax(-1)


# -----------------------------------------------------------------------------
# Methods. Each returns a function from a factor to an edit, or None if it has changed the model.


def learn_senses(model, examples, held, near, config, seed):
    """Learn vectors for senses, as rucksack edit does."""
    set_constants(config)
    background = [(ids[:1], ids[1:]) for ids in held]
    written = write_texts(model, examples, held[0][0], seed)
    texts = [background, written, [one.texts[0] for one in near[::2]]]
    found = learning.find_vectors(model, examples, texts, inside(examples), seed)
    shift = make_shift(*found)
    return shift.edit, len(shift.numbers)


def set_constants(config):
    """Set the constants of rucksack/edits/learning.py that a configuration has."""
    for name, value in config.items():
        setattr(learning, name, value)


def logits_of(model, idx):
    """Compute the logits of the ids that the tokenizer knows."""
    return model(idx)[..., :model.config.n_vocab]


def finetune(model, parameters, examples, held, lr, kl, seed):
    """Train parameters with the same steps that learn vectors of senses."""
    optimizer = torch.optim.Adam(parameters, lr, betas=(0.9, 0.995), fused=True)
    steps = PASSES * math.ceil(len(examples) / EXAMPLES_AT_ONCE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.tensor(ids[i:i + 65]) for ids in held for i in range(0, len(ids) - 65, 65)]
    with torch.no_grad():
        before = [logits_of(model, ids[None, :-1])[0].log_softmax(-1) for ids in blocks]
    orders = [torch.randperm(len(examples), generator=generator) for _ in range(PASSES)]
    for batch in [batch for order in orders for batch in order.split(EXAMPLES_AT_ONCE)]:
        texts, targets, signs, owners = [], [], [], []
        for i in batch.tolist():
            one = examples[i]
            for sign, ids in ((1, one.a), (-1, one.b)):
                if ids:
                    text = torch.tensor(one.prompt + ids)
                    target = text[1:].clone()
                    target[:-len(ids)] = -1
                    texts.append(text[:-1])
                    targets.append(target)
                    signs.append(sign)
                    owners.append(i)
        idx = pad_sequence(texts, batch_first=True)
        target = pad_sequence(targets, batch_first=True, padding_value=-1)
        nats = F.cross_entropy(logits_of(model, idx).transpose(1, 2), target, ignore_index=-1,
                               reduction='none').sum(1)
        nats = nats * torch.tensor(signs)
        losses = []
        for i in batch.tolist():
            one = examples[i]
            loss = one.loss(-nats[torch.tensor(owners) == i].sum())
            losses.append(loss.clamp(min=min(one.goal, 0)))
        loss = torch.stack(losses).mean()
        i = torch.randint(len(blocks), (1,), generator=generator).item()
        after = logits_of(model, blocks[i][None, :-1])[0].log_softmax(-1)
        loss = loss + kl * F.kl_div(after, before[i], log_target=True, reduction='batchmean')
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def finetune_all(model, examples, held, config, seed):
    """Train all parameters; returns a function that interpolates from before to after."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.requires_grad_(True)
    finetune(model, list(model.parameters()), examples, held, config['lr'], config['kl'], seed)
    for p in model.parameters():
        p.requires_grad_(False)
    changes = {name: p - before[name] for name, p in model.named_parameters()}
    return setter(model, before, changes), sum(p.numel() for p in model.parameters())


def finetune_lora(model, examples, held, config, seed):
    """Train low-rank updates of all linear layers; returns a function like finetune_all's."""
    from peft import LoraConfig, inject_adapter_in_model
    torch.manual_seed(seed)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    linear = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    rank = config['rank']
    tuned = inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=rank, target_modules=linear), model)
    parameters = [p for p in tuned.parameters() if p.requires_grad]
    finetune(tuned, parameters, examples, held, config['lr'], config['kl'], seed)
    del tuned.peft_config
    changes = {}
    for name in linear:
        layer = tuned.get_submodule(name)
        changes[f'{name}.weight'] = layer.get_delta_weight('default').detach()
        parent, _, last = name.rpartition('.')
        setattr(tuned.get_submodule(parent), last, layer.base_layer)
    return setter(model, before, changes), sum(p.numel() for p in parameters)


def setter(model, before, changes):
    """Make the function that sets parameters to before + factor * changes."""
    parameters = dict(model.named_parameters())

    def set_parameters(factor):
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(before[name])
                if factor and name in changes:
                    p.add_(changes[name], alpha=factor)
    return set_parameters


@torch.no_grad()
def choose_beta(model, texts, edit, budget):
    """Find the largest beta within a budget, in nats per token: logits are linear in beta."""
    extra = torch.zeros(len(BETAS), dtype=torch.float64)
    for ids in texts:
        text = torch.tensor(ids)
        idx = text[None, :-1]
        logits = last_logits(model, idx, len(ids) - 1, None)
        added = last_logits(model, idx, len(ids) - 1, edit) - logits
        is_moved = added.any(-1)
        logits, added, targets = logits[is_moved], added[is_moved], text[1:][is_moved]
        nats = [F.cross_entropy(logits + beta * added, targets, reduction='sum')
                for beta in BETAS]
        extra += torch.stack(nats) - nats[-1]
    prices = extra / sum(len(ids) - 1 for ids in texts)
    return next(beta for beta, price in zip(BETAS, prices) if price <= budget)


LEARN = {'full': finetune_all, 'lora': finetune_lora}  # the rest: learn_senses


# -----------------------------------------------------------------------------
# Runs.


def factor_within(model, texts, apply, budget):
    """Find the largest factor of an update within a budget, in nats per token.

    Interpolates between two FACTORS, found by bisection, as if prices grew with the factor.
    """
    base = mean_loss(model, texts, apply(0))

    @cache
    def price(factor):
        price = mean_loss(model, texts, apply(factor)) - base
        return price if math.isfinite(price) else math.inf

    n = bisect_left(FACTORS, True, lo=1, key=lambda factor: price(factor) > budget)
    low = FACTORS[n - 1]
    if n == len(FACTORS):
        return low
    share = (budget - price(low)) / (price(FACTORS[n]) - price(low))
    return low + share * (FACTORS[n] - low)


class Measured(NamedTuple):
    """What a model does in its current state."""

    nats: Tensor     # of each text to judge, which the examples should lower
    success: float   # share of these texts
    hard: Tensor     # of each hard negative
    loss: Tensor     # of each text that gives the price
    inside: Tensor   # log p at the positions inside the examples' prompts, (positions, V)
    near: Tensor     # log p after the neighbours, (neighbours, V)


@torch.no_grad()
def after_neighbours(model, near, edit=None):
    """Predict after the neighbours that learning leaves out: log p of all ids (n, V)."""
    logits = [last_logits(model, torch.tensor([one.prompt]), 1, edit) for one in near[1::2]]
    return torch.cat(logits).log_softmax(-1)


def specificity(before, after, near):
    """Measure how neighbours moved: columns of a row."""
    found = {'neighbours': len(before)}
    changed = before.argmax(-1) != after.argmax(-1)
    ids = torch.tensor([one.a[0] for one in near[1::2]])[:, None]
    rises = (after.exp().gather(1, ids) - before.exp().gather(1, ids))[:, 0]
    is_other = torch.tensor([one.kind == 'another subject' for one in near[1::2]])
    for name, some in (('other', is_other), ('same', ~is_other)):
        found[f'{name}_rise'] = rises[some].mean().item()
        found[f'{name}_changed'] = changed[some].double().mean().item()
    return found


def measure(model, task, data, near, priced, edit=None):
    """Measure a model on the data of a task, and on the texts that give the price."""
    examples, texts, negatives = data
    nats, success = judge(model, texts, edit, TASKS[task][2])
    hard, _ = judge(model, negatives, edit, 1)
    inside = inside_prompts(model, examples, edit)
    loss = loss_of_texts(model, priced, edit)
    return Measured(nats, success, hard, loss, inside, after_neighbours(model, near, edit))


def run(model, kind, task, data, near, background, config, seed, before):
    """Teach a model, measure it, and restore it; returns columns of a row."""
    held, priced, for_scale = background
    start = time.monotonic()
    learner = model.lender if kind == 'lent' else model
    if kind in LEARN:
        apply, size = LEARN[kind](learner, data[0], held, config, seed)
    else:
        apply, size = learn_senses(learner, data[0], held, near, config, seed)
    seconds = time.monotonic() - start
    apply(0)
    budget = BUDGET * mean_loss(model, for_scale)
    if kind == 'lent':
        factor = choose_beta(model, for_scale, apply(1), budget)
    else:
        factor = factor_within(model, for_scale, apply, budget)
    after = measure(model, task, data, near, priced, apply(factor))
    apply(0)
    price = after.loss - before.loss
    divergence = F.kl_div(after.inside, before.inside, log_target=True, reduction='batchmean')
    means = {'before': before.nats, 'nats': after.nats, 'hard_before': before.hard,
             'hard': after.hard, 'loss': before.loss, 'price': price}
    errors = {'gain_error': before.nats - after.nats, 'hard_error': after.hard - before.hard,
              'price_error': price}
    return {
        'size': size, 'budget': BUDGET, 'factor': factor, 'seconds': seconds,
        'success_before': before.success, 'success': after.success, 'inside': divergence.item(),
        **specificity(before.near, after.near, near),
        **{name: values.mean().item() for name, values in means.items()},
        **{name: standard_error(values) for name, values in errors.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('stage', choices=SIZES)
    parser.add_argument('folder', type=Path)
    parser.add_argument('csv', type=Path)
    parser.add_argument('--tasks', nargs='+', default=list(TASKS))
    parser.add_argument('--methods', nargs='+', default=list(METHODS))
    parser.add_argument('--seeds', nargs='+', type=int, help='random seeds of test [0 1 2]')
    args = parser.parse_args()
    sizes = SIZES[args.stage]
    split = {'validate': 'val', 'test': 'test'}[args.stage]
    seeds = {'validate': [0], 'test': args.seeds or [0, 1, 2]}[args.stage]
    done = []
    if args.csv.exists():
        done = list(csv.DictReader(args.csv.open()))
    models = {name: load_model(name, 'cpu') for name in ('english', 'english_gpt')}
    for loaded in models.values():
        loaded.model.requires_grad_(False)
    encoding = models['english'].encoding
    background = read_background(args.folder, encoding, sizes[3], args.stage)
    for task, method in product(args.tasks, args.methods):
        name, kind = METHODS[method]
        model = models[name].model
        if kind == 'lent':
            model = Lent(model, models['english'].model)
        data = read_task(args.folder, task, split, encoding, sizes)
        data, near = with_neighbours(models['english'], task, data, background[0])
        if method.endswith('of any word'):
            data[0] = [replace(one, subject=()) for one in data[0]]
        print(f'{task}, {method}: {[len(part) for part in data]}', flush=True)
        configs = CONFIGS[kind]
        if kind == 'senses' and not data[0][0].subject:
            configs = configs[:1]  # all are the same: they weigh what is held after subjects
        if args.stage == 'test':
            configs = best_config(done, task, method.removeprefix('Transformer, lent '))
        before = None
        for config, seed in product(map(json.dumps, configs), seeds):
            key = {'stage': args.stage, 'task': task, 'method': method, 'config': config,
                   'seed': str(seed)}
            if any(key.items() <= row.items() for row in done):
                continue
            if before is None:
                before = measure(model, task, data, near, background[1])
            row = run(model, kind, task, data, near, background, json.loads(config), seed, before)
            row = {name: shortened(value) for name, value in (key | row).items()}
            is_new = not args.csv.exists()
            with args.csv.open('a', newline='') as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            print(' ', ', '.join(f'{name} {row[name]}' for name in COLUMNS[3:]), flush=True)


def shortened(value):
    """Write a float with five digits."""
    return f'{value:.5g}' if isinstance(value, float) else value


def best_config(done, task, method):
    """List the configuration with the lowest nats in validation; none if none was validated."""
    rows = [row for row in done
            if (row['stage'], row['task'], row['method']) == ('validate', task, method)]
    rows.sort(key=lambda row: float(row['nats']))
    return [json.loads(row['config']) for row in rows[:1]]


if __name__ == '__main__':
    main()
