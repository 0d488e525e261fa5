"""Claims about rucksack/paper/topics.py: who judges a text, and PPLM."""

import math
from functools import partial

import pytest
import torch
from helpers import toy_subject
from torch import Tensor
from torch.testing import assert_close

from rucksack import toy
from rucksack.loaded import Subject
from rucksack.paper import topics
from rucksack.paper.lists import TOPICS
from rucksack.senses import STRENGTHS
from rucksack.words import bag_ids, scores_of_bags

MUSIC_AND_SPORTS = {'music': ['music', 'guitar'], 'sports': ['song']}


def transformer(n_layer: int) -> Subject:
    """A random Transformer with two heads of size 8."""
    subject = toy_subject(k=0, n_layer=n_layer)
    subject.model.requires_grad_(False)
    return subject


def log_probability(subject: Subject, ids: list[int]) -> float:
    """That of the tokens of a text after its first."""
    logits = subject.model(torch.tensor([ids]))[0]  # (T, V)
    logp = logits.log_softmax(-1)
    return sum(logp[i, ids[i + 1]].item() for i in range(len(ids) - 1))


# -----------------------------------------------------------------------------
# Judging.


def test_affinities_are_the_affinity_of_each_bag():
    """Several bags scored at once give each its own scores."""
    model = toy_subject().model
    bags = [[3, 7], [5], [260, 9, 11]]
    together = scores_of_bags(model, bags)
    for i, bag in enumerate(bags):
        assert_close(together[..., i], scores_of_bags(model, [bag])[..., 0])


@pytest.mark.parametrize('label', MUSIC_AND_SPORTS)
@pytest.mark.parametrize('text, topic', [
    ('music guitar song the', 'music'), ('song the song music', 'sports'), ('song music', None),
    ('the nurse', None), ('', None)])
def test_the_topic_of_a_text_has_more_words_than_any_other(text, topic, label):
    """A word counts as often as it stands there; where two topics are equal there is none."""
    assert topics.has_topic(text.split(), label, MUSIC_AND_SPORTS) == (label == topic)


def test_texts_are_judged_up_to_their_end(monkeypatch):
    """What follows the end-of-text is not read; how likely it is that it ends there counts."""
    monkeypatch.setattr(toy, 'TOPICS', MUSIC_AND_SPORTS)
    s = toy_subject()
    music = s.encode(' music guitar song the')
    neither = s.encode(' song music the nurse that said')
    idx = torch.tensor([[s.eot, *music, s.eot, *s.encode(' song')], [s.eot, *neither]])
    pairs, right = topics.read_texts(s, idx, 'music')
    assert pairs == [([s.eot], [*music, s.eot]), ([s.eot], neither)]
    assert right == [' music guitar song the']


def test_a_row_has_the_share_and_the_perplexity_of_its_texts(monkeypatch):
    """They are over the texts of all topics, whose first text with its topic is shown."""
    monkeypatch.setattr(toy, 'TOPICS', MUSIC_AND_SPORTS)
    s = toy_subject()
    music = s.encode(' music guitar song the')
    neither = s.encode(' song music the nurse that')
    generators = {'music': lambda start: torch.tensor([[s.eot, *music, s.eot]]),
                  'sports': lambda start: torch.tensor([[s.eot, *neither]])}
    row, lines = topics.topic_row(s, ', by hand', generators, n_texts=1, seed=0)
    logp = log_probability(s, [s.eot, *music, s.eot]) + log_probability(s, [s.eot, *neither])
    name, right, standard_error, perplexity, _ = row
    assert name == 'Backpack toy, by hand'
    assert right == 50
    assert standard_error == pytest.approx(100 * 0.125 ** 0.5)
    assert perplexity == pytest.approx(math.exp(-logp / (4 + 1 + 5)), rel=1e-4)
    assert lines == ['music, by hand:  music guitar song the',
                     'sports, by hand: (no text has this topic)']


# -----------------------------------------------------------------------------
# PPLM.


def test_a_bag_of_pplm_has_the_words_that_are_one_token():
    """Words that the vocabulary spells out are left out."""
    s = toy_subject()
    assert s.single_tokens(['music', 'zebra', 'guitar']) == ['music', 'guitar']


def test_a_transformer_that_reads_token_by_token_is_the_same():
    """Logits from kept keys and values equal those of a pass over the whole text, to 1e-5."""
    s = transformer(n_layer=3)
    idx = torch.randint(s.encoding.n_vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    past = torch.zeros(3, 2, 0, 48)
    whole = s.model(idx)
    for t in range(9):
        logits, past = topics.read_on(s.model, idx[:, t], past)
        assert_close(logits, whole[:, t], atol=1e-5, rtol=1e-5)


def test_pplm_without_a_step_is_plain_sampling():
    """Step 0 draws what generate draws, and a step something else."""
    s = transformer(n_layer=2)
    start = torch.full((5, 1), s.eot)
    steered = partial(topics.pplm, s.model, start, s.encode(' music guitar'), length=12)
    torch.manual_seed(3)
    plain = s.model.generate(start, 12)
    torch.manual_seed(3)
    assert torch.equal(steered(step=0), plain)
    torch.manual_seed(3)
    assert not torch.equal(steered(step=9), plain)


def test_steering_raises_the_bag_in_every_text():
    """Step 0 leaves its probability as it is, and a larger step raises it more."""
    s = transformer(n_layer=2)
    bag = s.encode(' music guitar')
    torch.manual_seed(3)
    token = torch.randint(s.encoding.n_vocab, (5,))
    past = torch.randn(2, 5, 6, 48)
    logits, _ = topics.read_on(s.model, token, past)
    plain = logits.softmax(-1)

    def mass_of_bag(step: float) -> Tensor:
        norms = torch.zeros(2, 5, 1, 1)
        moved = topics.steer(s.model, token, past, torch.tensor(bag), plain, step, norms)
        logits, _ = topics.read_on(s.model, token, moved)
        return logits.softmax(-1)[:, bag].sum(-1)  # (5,)

    none = mass_of_bag(0.0)
    small = mass_of_bag(0.05)
    large = mass_of_bag(0.2)
    assert_close(none, plain[:, bag].sum(-1))
    assert (small > none).all()
    assert (large > small).all()


def test_pplm_divides_by_the_largest_norm_so_far():
    """After a maximum of N, a gradient of norm n moves by step * n / N^1.5; maxima are kept.

    The steps are so small that the gradient stays as it is.
    """
    s = transformer(n_layer=2)
    s.model.double()
    bag = torch.tensor(s.encode(' music guitar'))
    token = torch.tensor([3, 4, 5])
    torch.manual_seed(0)
    past = torch.randn(2, 3, 8, 48).double()
    logits, _ = topics.read_on(s.model, token, past)
    plain = logits.softmax(-1)

    def move(norms: Tensor) -> Tensor:
        return topics.steer(s.model, token, past, bag, plain, 1e-6, norms) - past

    norms = torch.zeros(2, 3, 1, 1).double()
    held_norms = torch.full_like(norms, 7)
    free = move(norms)
    held = move(held_norms)
    assert (norms > 0).all()
    assert (norms < 7).all()
    assert (held_norms == 7).all()
    assert_close(held, free * (norms / 7) ** topics.GAMMA, atol=1e-12, rtol=0.01)


def test_pplm_moves_the_first_five_positions():
    """Keys and values of later ones stay where they are."""
    s = transformer(n_layer=2)
    token = torch.tensor([3, 4, 5])
    torch.manual_seed(0)
    past = torch.randn(2, 3, 8, 48)
    logits, _ = topics.read_on(s.model, token, past)
    bag = torch.tensor(s.encode(' music guitar'))
    norms = torch.zeros(2, 3, 1, 1)
    moved = topics.steer(s.model, token, past, bag, logits.softmax(-1), 0.1, norms)
    is_moved = moved != past
    assert is_moved[:, :, :5, 16:].all()
    assert not is_moved[:, :, 5:].any()


def test_pplm_draws_from_the_fusion_and_stays_steered(monkeypatch):
    """A token is drawn from steered^0.9 * plain^0.1; each steering begins at the last one's end."""
    s = transformer(n_layer=2)
    multinomial = torch.multinomial
    drawn = []

    def watched(probs, n):
        drawn.append(probs)
        return multinomial(probs, n)

    monkeypatch.setattr(topics, 'steer', lambda model, token, past, *rest: past + 0.5)
    monkeypatch.setattr(torch, 'multinomial', watched)
    idx = topics.pplm(s.model, torch.full((2, 1), s.eot), [3], step=1.0, length=3)
    past = torch.zeros(2, 2, 0, 48)
    plain_past = past
    for t in range(3):
        if t > 0:
            past = past + 0.5
        plain, plain_past = topics.read_on(s.model, idx[:, t], plain_past)
        steered, past = topics.read_on(s.model, idx[:, t], past)
        fusion = steered.softmax(-1) ** 0.9 * plain.softmax(-1) ** 0.1
        assert_close(drawn[t], fusion)


def test_steering_stays_near_the_plain_text(monkeypatch):
    """With a large KL_SCALE, the divergence from plain probabilities falls in every text."""
    monkeypatch.setattr(topics, 'KL_SCALE', 1e4)
    s = transformer(n_layer=2)
    torch.manual_seed(3)
    token = torch.randint(s.encoding.n_vocab, (8,))
    past = torch.randn(2, 8, 5, 48)
    plain = topics.read_on(s.model, token, past + 0.5 * torch.randn_like(past))[0].softmax(-1)

    def divergence(past: Tensor) -> Tensor:
        probs = topics.read_on(s.model, token, past)[0].softmax(-1)
        return (probs * (probs / plain).log()).sum(-1)  # (8,)

    norms = torch.zeros(2, 8, 1, 1)
    steered = topics.steer(s.model, token, past, torch.tensor([3]), plain, 0.1, norms)
    assert (divergence(steered) < divergence(past)).all()


def test_each_row_has_its_strength_and_each_text_its_topic(monkeypatch):
    """Row s of Table 12 has strength s; an edit has the scores of the topic it is for."""
    rows = []

    def topic_row(subject, name, generators, *more):
        edits = {label: generator.keywords['edit'] for label, generator in generators.items()}
        rows.append(edits)
        return [name, 1.0, 1.0, 1.0, 1.0], []

    monkeypatch.setattr(topics, 'topic', lambda model, scores, weights: (scores, weights))
    monkeypatch.setattr(topics, 'topic_row', topic_row)
    s = toy_subject()
    topics.topic_table([s], 1, 4, None, 0)
    assert set(rows[0].values()) == {None}
    for weights, edits in zip(STRENGTHS[1:], rows[1:], strict=True):
        for label, (scores, found) in edits.items():
            assert found == weights
            bag = bag_ids(s.encoding, TOPICS[label])
            assert_close(scores, scores_of_bags(s.model, [bag])[..., 0])
