"""Claims about rucksack/topics.py: who judges a text, and PPLM."""

from functools import partial

import pytest
import torch
from subjects import toy_subject

from rucksack import topics
from rucksack.likelihood import score
from senses import affinities


def test_affinities_are_the_affinity_of_each_bag():
    """Several bags scored at once give each its own scores."""
    s, bags = toy_subject(), [[3, 7], [5], [260, 9, 11]]
    torch.testing.assert_close([*affinities(s.model, bags)], [affinities(s.model, [bag])[0] for bag in bags])


def test_texts_are_judged_up_to_their_end():
    """Up to its end-of-text, a text has the topic that more of its words are of than of any other."""
    s, lists = toy_subject(), {'music': ['music', 'guitar'], 'sports': ['song']}
    a, b = s.encode(' music guitar song the'), s.encode(' song music the nurse that said')
    idx = torch.tensor([[s.eot, *a, s.eot, a[0]], [s.eot, *b]])
    found, first = topics.read_texts(s, idx, 'music', lists)
    assert first == ' music guitar song the' and topics.read_texts(s, idx[1:], 'music', lists)[1] is None
    logp = score(s, [([s.eot], [*a, s.eot]), ([s.eot], b)], '')[0].sum().item()
    assert found == {'texts': 2, 'right': 1, 'tokens': 11, 'logp': pytest.approx(logp, abs=1e-4)}


def test_a_transformer_that_reads_token_by_token_is_the_same_transformer():
    """Logits from kept keys and values equal those of a pass over the whole text, to 1e-5."""
    s, past = toy_subject(k=0, n_layer=3), torch.zeros(3, 2, 2, 2, 0, 8)
    idx = torch.randint(s.encoding.n_vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    for t in range(9):
        logits, past = topics.read_on(s.model, idx[:, t], past)
        torch.testing.assert_close(logits, s.model(idx)[:, t], atol=1e-5, rtol=1e-5)


def test_pplm_without_a_step_is_plain_sampling_and_steps_raise_the_bag():
    """Step 0 draws what generate draws; steering raises the bag in every text, and a larger step more."""
    s, texts = toy_subject(k=0, n_layer=2), []
    start, bag = torch.full((5, 1), s.eot), s.encode(' music guitar')
    steered = partial(topics.pplm, s.model, start, bag, length=12)
    for draw in (partial(s.model.generate, start, 12), partial(steered, step=0), partial(steered, step=9)):
        torch.manual_seed(3)
        texts.append(draw())
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    past, token, mass = torch.randn(2, 2, 5, 2, 6, 8), texts[0][:, 3], []
    before = topics.read_on(s.model, token, past)[0].softmax(-1).detach()
    for step in (0.0, 0.05, 0.2):
        norms = torch.zeros(2, 1, 5, 1, 1, 1)
        moved = topics.steer(s.model, token, past, torch.tensor(bag), before, step, norms)
        mass.append(topics.read_on(s.model, token, moved)[0].softmax(-1)[:, bag].sum(-1))
    torch.testing.assert_close(mass[0], before[:, bag].sum(-1))
    assert (mass[1] > mass[0]).all() and (mass[2] > mass[1]).all()


def test_pplm_divides_by_the_largest_norm_so_far_and_moves_the_first_five_positions():
    """After a maximum of N, a gradient of norm n moves by step * n / N^1.5; the norms kept are maxima."""
    s, bag = toy_subject(k=0, n_layer=2), torch.tensor([258, 259])
    past, token, moves = torch.randn(2, 2, 3, 2, 8, 8).double(), torch.tensor([3, 4, 5]), []
    s.model.double()
    before = topics.read_on(s.model, token, past)[0].softmax(-1).detach()
    for start in (0.0, 7.0):
        norms = torch.full((2, 1, 3, 1, 1, 1), start).double()
        moves.append((topics.steer(s.model, token, past, bag, before, 1e-6, norms) - past, norms))
    (free, norms), (held, kept) = moves  # the steps are so small that the gradient stays as it is
    assert (0 < norms).all() and (norms < 7).all() and (kept == 7).all()
    assert (free[..., :5, :] != 0).any() and not free[..., 5:, :].any()
    torch.testing.assert_close(held, free * (norms / 7) ** topics.GAMMA, atol=1e-12, rtol=0.01)
