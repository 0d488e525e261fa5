"""Claims about rucksack/paper/topics.py: how texts are judged, and PPLM."""

import math
from functools import partial

import pytest
import torch
from helpers import toy_loaded
from torch.testing import assert_close

from rucksack import toy
from rucksack.loaded import LoadedModel
from rucksack.paper import topics
from rucksack.paper_lists import BAGS
from rucksack.senses import STRENGTHS, topic
from rucksack.words import bag_ids, scores_of_bags, topic_scores

MUSIC_AND_SPORTS = {'music': ['music', 'guitar'], 'sports': ['song']}


def log_probability(loaded: LoadedModel, ids: list[int]) -> float:
    """Compute the log-probability of the tokens of a text after its first."""
    logits = loaded.model(torch.tensor([ids]))[0]  # (T, V)
    logp = logits.log_softmax(-1)
    return sum(logp[i, ids[i + 1]].item() for i in range(len(ids) - 1))


@pytest.mark.parametrize('label', MUSIC_AND_SPORTS)
@pytest.mark.parametrize('text, topic', [
    ('music guitar song the', 'music'), ('song the song music', 'sports'), ('song music', None),
    ('the nurse', None), ('', None)])
def test_the_topic_of_a_text_has_more_words_than_any_other(text, topic, label):
    """A word counts as often as it occurs, and a tie between two topics means no topic."""
    assert topics.has_topic(text, label, MUSIC_AND_SPORTS) == (label == topic)


def test_a_row_has_the_shares_and_the_perplexity_of_its_texts(monkeypatch):
    """A row covers the texts of all topics, each up to its end-of-text, which is scored too."""
    monkeypatch.setattr(toy, 'TOPICS', MUSIC_AND_SPORTS)
    monkeypatch.setattr(topics, 'BAGS', MUSIC_AND_SPORTS)
    s = toy_loaded()
    music = [s.eot, *s.encode(' music guitar song the'), s.eot]
    neither = [s.eot, *s.encode(' song music the nurse that said')]
    generators = [lambda start, n: torch.tensor([[*music, *s.encode(' song')]]),
                  lambda start, n: torch.tensor([neither])]
    row = topics.topic_row(s, ', by hand', generators, list(MUSIC_AND_SPORTS), 1, 6)
    _, right, in_bag, perplexity, _ = row
    logp = log_probability(s, music) + log_probability(s, neither)
    assert right == 50
    assert in_bag == pytest.approx(100 * 3 / (4 + 1 + 6))  # music, guitar; song
    assert perplexity == pytest.approx(math.exp(-logp / (4 + 1 + 6)), rel=1e-4)


def test_pplm_without_a_step_is_plain_sampling():
    """PPLM with step 0 draws what generate draws, and with step 9 it draws something else."""
    s = toy_loaded(k=0, n_layer=2)
    start = torch.full((5, 1), s.eot)
    steered = partial(topics.pplm, s.model, start, bag=s.encode(' music guitar'), n=12)
    torch.manual_seed(3)
    plain = s.model.generate(start, 12)
    torch.manual_seed(3)
    assert torch.equal(steered(step=0), plain)
    torch.manual_seed(3)
    assert not torch.equal(steered(step=9), plain)


def test_steering_raises_the_bag_in_every_text():
    """Step 0 leaves the bag's probability as it is, and a larger step raises it more."""
    s = toy_loaded(k=0, n_layer=2)
    model = s.model.double()
    torch.manual_seed(3)
    token = torch.randint(s.encoding.n_vocab, (5,))
    past = torch.randn(2, 5, 8, 48).double()  # layers, texts, tokens, 3 * d
    plain, _ = topics.read_on(model, token, past)
    bag = s.encode(' music guitar')
    chances = []
    for step in (0.0, 0.05, 0.2):
        norms = torch.zeros(2, 5, 1, 1).double()
        moved = topics.steer(model, token, past, bag, plain.softmax(-1), step, norms)
        logits, _ = topics.read_on(model, token, moved)
        chances.append(logits.softmax(-1)[:, bag].sum(-1))
    none, small, large = chances
    assert_close(none, plain.softmax(-1)[:, bag].sum(-1))
    assert (small > none).all()
    assert (large > small).all()


def test_each_row_has_its_strength_and_each_text_its_topic():
    """Row s of Table 12 has texts under edits of strength s, each with the bag of its topic."""
    s = toy_loaded()
    *_, table = topics.topic_tables([s], 3, 6, None)
    for strength, factors in enumerate(STRENGTHS):
        generators = []
        for label in toy.TOPICS:
            scores, = topic_scores(s.model, s.encoding, [BAGS[label]])
            generators.append(partial(s.model.generate, edit=topic(s.model, scores, factors)))
        row = topics.topic_row(s, f', strength {strength}', generators, list(toy.TOPICS), 3, 6)
        assert table.rows[strength][:-1] == pytest.approx(row[:-1], nan_ok=True)


def test_a_topic_leaves_end_of_text_alone():
    """As in the authors' code, end-of-text's senses score 0; all others score by Eq. 17."""
    s = toy_loaded()
    bag = ['music', 'guitar']
    wanted = scores_of_bags(s.model, [bag_ids(s.encoding, bag)])
    wanted[:, s.eot] = 0
    assert torch.equal(topic_scores(s.model, s.encoding, [bag]), wanted)
