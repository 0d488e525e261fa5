"""Claims about topics.py and pplm.py in docs/dev/: how texts are written and judged."""

import math
from functools import partial

import pytest
import torch
from helpers import toy_loaded
from torch.testing import assert_close

from docs.dev import control, pplm, topics
from rucksack import toy
from rucksack.loaded import LoadedModel
from rucksack.vocabulary import bag_ids, scores_of_bags, topic_scores

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
    music_and_more = [*music, *s.encode(' song')]
    writers = {label: lambda start, n, ids=ids: torch.tensor([ids])
               for label, ids in (('music', music_and_more), ('sports', neither))}
    row, _ = topics.measure(s, 0, writers, 1, 6)
    logp = log_probability(s, music) + log_probability(s, neither)
    assert row['on topic %'] == 50
    assert row['words of the bag %'] == pytest.approx(100 * 3 / (4 + 1 + 6))  # music, guitar; song
    assert row['perplexity'] == pytest.approx(math.exp(-logp / (4 + 1 + 6)), rel=1e-4)


def test_pplm_without_a_step_is_plain_sampling():
    """PPLM with step 0 draws what generate draws, and with step 9 it draws something else."""
    s = toy_loaded(k=0, n_layer=2)
    start = torch.full((5, 1), s.eot)
    steered = partial(pplm.pplm, s.model, start, bag=s.encode(' music guitar'), n=12)
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
    plain, _ = pplm.read_on(model, token, past)
    bag = s.encode(' music guitar')
    chances = []
    for step in (0.0, 0.05, 0.2):
        norms = torch.zeros(2, 5, 1, 1).double()
        moved = pplm.steer(model, token, past, bag, plain.softmax(-1), step, norms)
        logits, _ = pplm.read_on(model, token, moved)
        chances.append(logits.softmax(-1)[:, bag].sum(-1))
    none, small, large = chances
    assert_close(none, plain.softmax(-1)[:, bag].sum(-1))
    assert (small > none).all()
    assert (large > small).all()


def test_a_topic_leaves_end_of_text_alone():
    """As in the authors' code, end-of-text's senses score 0; all others score by Eq. 17."""
    s = toy_loaded()
    bag = ['music', 'guitar']
    wanted = scores_of_bags(s.model, [bag_ids(s.encoding, bag)])
    wanted[:, s.eot] = 0
    assert torch.equal(topic_scores(s.model, s.encoding, [bag]), wanted)


def test_strengths_and_steps_share_a_table():
    """docs.dev.control measures a Backpack's strengths and PPLM's steps; the other model judges."""
    models = [toy_loaded(), toy_loaded(k=0)]
    models[0].name = 'ours'
    models[1].name = 'theirs'
    rows = control.rows_of(models, [0.2], 1, 4)
    assert rows['strength or step'].tolist() == [0, 1, 2, 3, 0.2]
    assert rows['perplexity under theirs'].notna().tolist() == [True] * 4 + [False]
    assert rows['perplexity under ours'].notna().tolist() == [False] * 4 + [True]
