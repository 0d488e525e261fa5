"""Claims about docs/dev/variants.py: each variant is what it says."""

import pytest
import torch
from helpers import SMALL, assert_same_run, checkpoint, text
from torch.testing import assert_close

from docs.dev.variants import VARIANTS, measure_scores, run
from rucksack.fast import Cached
from rucksack.model import Config, weighted_sum
from rucksack.senses import scale_senses, senses_after

CONFIG = Config(block_size=12, vocab_size=40, n_layer=2, n_head=2, n_embd=24, n_sense=3)


def test_scores_with_qk_norm_are_at_most_scale_sqrt_d_over_k():
    """With QK-norm, scale * sqrt(d/k) bounds a score, however large queries and keys are."""
    model = VARIANTS['qk_norm'](CONFIG)
    model.sense_weights.c_attn.weight.data *= 1e4
    model.sense_weights.c_attn.scale.data[:] = 3
    largest = measure_scores(model, text())['largest_score']
    assert 3 < largest < 3.01 * 8 ** 0.5  # rounding


def test_wide_scores_start_as_wide_as_with_qk_norm():
    """The scores of wide and wide_qk_norm start with a standard deviation of about 4."""
    for name in ('wide', 'wide_qk_norm'):
        model = VARIANTS[name](CONFIG)
        idx = torch.randint(40, (32, 12))
        assert 3 < measure_scores(model, idx)['widest_scores'] < 6


def test_uniform_weights_average_the_senses_so_far():
    """Position i sums the senses of each token and averages them over tokens 0 to i."""
    model = VARIANTS['uniform'](CONFIG)
    sums = model.senses(text()).sum(2)  # (B, T, d)
    averages = sums.cumsum(1) / torch.arange(1, 11)[:, None]
    assert_close(model(text()), model.project(averages))


@pytest.mark.parametrize('name, table, is_changed', [
    ('own_table', 'senses', True), ('own_table', 'alpha', False),
    ('untied', 'senses', True), ('untied', 'alpha', True)])
def test_what_reads_the_second_table(name, table, is_changed):
    """Other embeddings in the second table change senses and, if untied, alpha."""
    model = VARIANTS[name](CONFIG)
    before = getattr(model, table)(text())
    model.second.weight.data.normal_()
    assert torch.equal(getattr(model, table)(text()), before) is not is_changed


@pytest.mark.parametrize('name', ['none', 'qk_norm', 'uniform', 'own_table', 'untied'])
def test_the_logits_of_a_variant_are_its_senses_its_alpha_and_e(name):
    """The logits are E^T of the sum of senses(idx), weighted by alpha(idx)."""
    model = VARIANTS[name](CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    o = weighted_sum(model.alpha(text()), model.senses(text()))
    assert_close(model(text()), o @ model.wte.weight.T)


@torch.no_grad()
@pytest.mark.parametrize('name', VARIANTS)
def test_a_cache_changes_no_logits_of_a_variant(name):
    """Cached gives the variant's own logits after every token, with and without an edit."""
    model = VARIANTS[name](CONFIG).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    edit = scale_senses(None, [0, 2], 0.3)
    cached = Cached(model)
    edited = Cached(model)
    for n in range(4, 11):
        idx = text()[:, :n]
        C = edit(idx, edited.senses(idx))
        expected = model(idx)[:, -1:]
        assert_close(cached(idx), expected, rtol=0, atol=1e-4)
        expected = model(idx, C=senses_after(model, idx, edit))[:, -1:]
        assert_close(edited(idx, C=C), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize('name, is_changed', [('own_table', False), ('untied', True)])
def test_the_measured_scores_are_those_of_alpha(name, is_changed):
    """Other embeddings in the second table change the scores only if alpha reads it."""
    model = VARIANTS[name](CONFIG)
    before = measure_scores(model, text())
    model.second.weight.data.normal_()
    assert (measure_scores(model, text()) == before) is not is_changed


@pytest.mark.parametrize('name', VARIANTS)
def test_a_resumed_run_of_a_variant_ends_the_same(name, tiny):
    """A run of four steps, and one of two that is resumed, end in the same bits."""
    flags = [name, *SMALL, '--eval_interval=2']
    run([*flags, '--max_iters=4', '--out_dir=out/whole'])
    run([*flags, '--max_iters=2'])
    run([*flags, '--max_iters=4', '--init_from=resume'])
    assert_same_run('out/whole', 'out/run')
    assert checkpoint()['model'].keys() == VARIANTS[name](CONFIG).state_dict().keys()
