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


@pytest.mark.parametrize('label', MUSIC_AND_SPORTS)
@pytest.mark.parametrize('text, topic', [
    ('music guitar song the', 'music'), ('song the song music', 'sports'), ('song music', None),
    ('the nurse', None), ('', None)])
def test_the_topic_of_a_text_has_more_words_than_any_other(text, topic, label):
    """A word counts as often as it stands there; where two topics are equal there is none."""
    assert topics.has_topic(text.split(), label, MUSIC_AND_SPORTS) == (label == topic)


def test_a_row_has_the_share_and_the_perplexity_of_its_texts(monkeypatch):
    """They are over the texts of all topics, each up to its end-of-text, which is scored too."""
    monkeypatch.setattr(toy, 'TOPICS', MUSIC_AND_SPORTS)
    s = toy_subject()
    music = [s.eot, *s.encode(' music guitar song the'), s.eot]
    neither = [s.eot, *s.encode(' song music the nurse that said')]
    generators = {'music': lambda start: torch.tensor([[*music, *s.encode(' song')]]),
                  'sports': lambda start: torch.tensor([neither])}
    row, lines = topics.topic_row(s, ', by hand', generators, n_texts=1, seed=0)
    _, right, standard_error, perplexity, _ = row
    logp = log_probability(s, music) + log_probability(s, neither)
    assert right == 50
    assert standard_error == pytest.approx(100 * 0.125 ** 0.5)
    assert perplexity == pytest.approx(math.exp(-logp / (4 + 1 + 6)), rel=1e-4)
    assert lines[0] == 'music, by hand:  music guitar song the'


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


class Texts:
    """Five texts of 8 tokens that a random Transformer has read, and a bag of words for them."""

    def __init__(self):
        subject = transformer(n_layer=2)
        self.model = subject.model.double()
        torch.manual_seed(3)
        self.token = torch.randint(subject.encoding.n_vocab, (5,))
        self.past = torch.randn(2, 5, 8, 48).double()
        self.plain = self.probs(self.past)
        self.bag = torch.tensor(subject.encode(' music guitar'))

    def probs(self, past: Tensor) -> Tensor:
        """The probabilities (5, V) after one more token."""
        logits, _ = topics.read_on(self.model, self.token, past)
        return logits.softmax(-1)

    def steered(self, step: float, norm: float = 0.0) -> Tensor:
        """The past moved by a step, where the largest norm of a gradient so far is norm."""
        norms = torch.full((2, 5, 1, 1), norm).double()
        return topics.steer(self.model, self.token, self.past, self.bag, self.plain, step, norms)


def test_steering_raises_the_bag_in_every_text():
    """Step 0 leaves its probability as it is, and a larger step raises it more."""
    texts = Texts()
    none, small, large = (
        texts.probs(texts.steered(step))[:, texts.bag].sum(-1) for step in (0.0, 0.05, 0.2))
    assert_close(none, texts.plain[:, texts.bag].sum(-1))
    assert (small > none).all()
    assert (large > small).all()


def test_pplm_divides_by_the_largest_norm_so_far():
    """A step moves by step * n / N^1.5, for a gradient of norm n and the largest norm N so far.

    The steps are so small that the gradient stays as it is.
    """
    texts = Texts()
    free = texts.steered(1e-6) - texts.past
    held = texts.steered(1e-6, norm=7.0) - texts.past
    n = (free.norm(dim=(2, 3), keepdim=True) / (3 * 1e-6)) ** -2  # three steps, n / n^1.5 each
    assert_close(held, free * (n / 7) ** 1.5, atol=1e-12, rtol=0.01)


def test_pplm_moves_the_first_five_positions():
    """Keys and values of later ones stay where they are."""
    texts = Texts()
    is_moved = texts.steered(0.1) != texts.past
    assert is_moved[:, :, :5, 16:].all()
    assert not is_moved[:, :, 5:].any()


def test_pplm_draws_from_the_fusion_and_stays_steered(monkeypatch):
    """A token is drawn from steered^0.9 * plain^0.1; each steering begins at the last one's end."""
    s = transformer(n_layer=2)
    monkeypatch.setattr(topics, 'steer', lambda model, token, past, *rest: past + 0.5)
    torch.manual_seed(0)
    idx = topics.pplm(s.model, torch.full((200, 1), s.eot), [3], step=1.0, length=3)
    torch.manual_seed(0)
    past = torch.zeros(2, 200, 0, 48)
    plain_past = past
    for t in range(3):
        plain, plain_past = topics.read_on(s.model, idx[:, t], plain_past)
        steered, past = topics.read_on(s.model, idx[:, t], past)
        fusion = steered.softmax(-1) ** 0.9 * plain.softmax(-1) ** 0.1
        assert torch.equal(torch.multinomial(fusion, 1)[:, 0], idx[:, t + 1])
        past = past + 0.5


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
