"""Claims about docs/dev/canonical.py: what it measures is what the models predict."""

import pytest
import torch
from helpers import lively, text
from torch.testing import assert_close

from docs.dev.canonical import choose_beta, factors_within, last_logits, mean_loss, setter
from rucksack.lending import Lent
from rucksack.senses import scale_senses

OFF = scale_senses(list(range(20)), [0, 2], 0.0)
TEXTS = [ids.tolist() for ids in text(9, batch=6)]


@pytest.fixture(autouse=True)
def in_float64():
    """Keep losses in float64, as the models are."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def lent(strength: float) -> Lent:
    """Lend a Transformer the senses of a Backpack."""
    return Lent(lively(1, n_sense=0), lively(2), strength).requires_grad_(False)


@pytest.mark.parametrize('model', [lively(2), lively(1, n_sense=0), lent(0.7)])
def test_last_logits_are_the_models(model):
    """The logits at the last positions are the model's, under an edit if it has senses."""
    idx = text(batch=1)
    edit, C = None, {}
    if model.config.n_sense:
        edit, C = OFF, {'C': OFF(idx, model.senses(idx))}
    assert_close(last_logits(model, idx, 4, edit), model(idx, **C)[0, -4:])


def test_beta_is_the_largest_of_the_grid_within_the_budget():
    """A budget of exactly the price at 0.6 gives 0.6, and one a little smaller gives less."""
    model = lent(0.6)
    price = mean_loss(model, TEXTS, OFF) - mean_loss(model, TEXTS)
    assert price > 0
    assert choose_beta(lent(1.0), TEXTS, OFF, [price + 1e-9, price - 1e-9]) == [0.6, 0.5]


def test_a_factor_costs_the_budget_and_zero_restores_the_bits():
    """The factor of an update costs at most its budget, and factor 0 gives the parameters back."""
    model = lively(1, n_sense=0).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    apply = setter(model, before, {'wte.weight': torch.randn_like(before['wte.weight'])})
    base = mean_loss(model, TEXTS)
    budgets = [0.3, 0.1, 0.03, 0.01, 0.003]
    for budget, factor in zip(budgets, factors_within(model, TEXTS, apply, budgets)):
        apply(factor)
        assert 0.3 * budget < mean_loss(model, TEXTS) / base - 1 <= budget
    apply(0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
