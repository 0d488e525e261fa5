"""Claims about docs/dev/canonical.py: what it measures is what the models predict."""

from bisect import bisect_right

import pytest
import torch
from helpers import lively, text
from torch.testing import assert_close

from docs.dev.canonical import (
    FACTORS,
    choose_beta,
    factor_within,
    mean_loss,
    setter,
)
from rucksack.edits.lending import Lent
from rucksack.senses import scale_senses

OFF = scale_senses(list(range(20)), [0, 2], 0.0)
TEXTS = [ids.tolist() for ids in text(9, batch=6)]
pytestmark = pytest.mark.usefixtures('in_float64')  # as the models are


def lent(strength: float) -> Lent:
    """Lend a Transformer the senses of a Backpack."""
    return Lent(lively(1, n_sense=0), lively(2), strength).requires_grad_(False)


def test_a_mean_loss_counts_each_token_once():
    """Longer texts weigh more: the mean is over tokens, as cross entropy averages a batch."""
    model = lively(2)
    texts = [TEXTS[0][:3], TEXTS[1]]
    nats = [(len(ids) - 1) * mean_loss(model, [ids]) for ids in texts]
    assert_close(mean_loss(model, texts), sum(nats) / 10)


def test_beta_is_the_largest_of_the_grid_within_the_budget():
    """A budget of exactly the price at 0.6 gives 0.6, and one a little smaller gives less."""
    model = lent(0.6)
    price = mean_loss(model, TEXTS, OFF) - mean_loss(model, TEXTS)
    assert price > 0
    betas = [choose_beta(lent(1.0), TEXTS, OFF, price + change) for change in (1e-9, -1e-9)]
    assert betas == [0.6, 0.5]


def test_a_factor_is_where_the_price_reaches_the_budget():
    """The grid's factor below costs at most the budget, the one above more; 0 restores the bits."""
    model = lively(1, n_sense=0).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    apply = setter(model, before, {'wte.weight': torch.randn(40, 24)})
    prices = []
    for factor in FACTORS:
        apply(factor)
        prices.append(mean_loss(model, TEXTS))
    assert prices == sorted(prices)
    for budget in (3, 0.6, 0.1, 0.03, 0.01):
        found = factor_within(model, TEXTS, apply, budget)
        n = bisect_right(FACTORS, found)
        assert prices[n - 1] - prices[0] <= budget < prices[n] - prices[0]
    apply(0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
