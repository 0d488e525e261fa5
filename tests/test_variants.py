"""Claims about docs/dev/variants.py: each variant is what it says."""

import os

import pytest
import torch
from helpers import SMALL, assert_same_run, checkpoint, text
from torch.testing import assert_close

from docs.dev.variants import VARIANTS, measure_scores, run
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.hub.export import export
from rucksack.model import Config, weighted_sum
from rucksack.senses import scale_senses
from rucksack.tokenizer import GPT2

CONFIG = Config(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)


def test_uniform_weights_average_the_senses_so_far():
    """Position i sums the senses of each token and averages them over tokens 0 to i."""
    model = VARIANTS['uniform'](CONFIG)
    sums = model.senses(text()).sum(2)  # (B, T, d)
    averages = sums.cumsum(1) / torch.arange(1, 11)[:, None]
    assert_close(model(text()), model.project(averages))


@pytest.mark.parametrize('name, is_changed', [('own_table', False), ('untied', True)])
def test_what_reads_the_second_table(name, is_changed):
    """Other embeddings in the second table change senses; if untied, alpha and its scores too."""
    model = VARIANTS[name](CONFIG)
    senses = model.senses(text())
    alpha = model.alpha(text())
    scores = measure_scores(model, text())
    model.second.weight.data.normal_()
    assert not torch.equal(model.senses(text()), senses)
    assert torch.equal(model.alpha(text()), alpha) is not is_changed
    assert (measure_scores(model, text()) == scores) is not is_changed


@pytest.mark.parametrize('name', ['none', 'qk_norm', 'uniform', 'own_table', 'untied'])
def test_the_logits_of_a_variant_are_its_senses_its_alpha_and_e(name):
    """The logits are E^T of the sum of senses(idx), weighted by alpha(idx)."""
    model = VARIANTS[name](CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    o = weighted_sum(model.alpha(text()), model.senses(text()))
    assert_close(model(text()), o @ model.wte.weight.T)


@pytest.mark.parametrize('edit', [None, scale_senses(None, [0, 2], 0.3)], ids=['plain', 'edited'])
@pytest.mark.parametrize('name', VARIANTS)
def test_a_cache_changes_no_text_of_a_variant(name, edit):
    """Cached writes the variant's own texts, with and without an edit."""
    model = VARIANTS[name](CONFIG).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    plain = model.generate(text(4), 8, temperature=0, edit=edit)
    assert torch.equal(Cached(model).generate(text(4), 8, temperature=0, edit=edit), plain)


@pytest.mark.parametrize('name', [*VARIANTS][1:])
def test_a_variant_is_not_exported(name, folder):
    """Other code would load a variant's weights as a Backpack's, and compute something else."""
    with pytest.raises(UserError, match='model.py'):
        export(VARIANTS[name](CONFIG), GPT2 | {'merges': []}, 'x')
    assert os.listdir() == []


@pytest.mark.parametrize('name', VARIANTS)
def test_a_resumed_run_of_a_variant_ends_the_same(name, tiny):
    """A run of four steps, and one of two that is resumed, end in the same bits."""
    flags = [name, *SMALL, '--eval_interval=2']
    run([*flags, '--max_iters=4', '--out_dir=out/whole'])
    run([*flags, '--max_iters=2'])
    run([*flags, '--max_iters=4', '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')
    assert checkpoint()['model'].keys() == VARIANTS[name](CONFIG).state_dict().keys()
