"""Claims about rucksack/topics.py: who judges a text, and PPLM."""

import pytest
import torch
from subjects import toy_subject

from rucksack import topics
from rucksack.grammar import word_id
from rucksack.likelihood import score
from senses import affinities, affinity


def test_affinities_are_the_affinity_of_each_bag():
    """Several bags scored at once give each its own scores."""
    s, bags = toy_subject(), [[3, 7], [5], [260, 9, 11]]
    each = torch.stack([affinity(s.model, bag) for bag in bags])
    torch.testing.assert_close(affinities(s.model, bags), each)


def test_texts_are_judged_up_to_their_end():
    """A text has the topic of most of its words, where one has more than any other; shares are over the words
    before end-of-text, log-probabilities over the tokens, the end included."""
    s, lists = toy_subject(), {'music': ['music', 'guitar'], 'sports': ['song']}
    text = s.encode(' music guitar song the')
    assert topics.judge(['music', 'song'], lists) is None and topics.judge(['the'], lists) is None
    idx = torch.tensor([[s.eot, *text, s.eot, text[0]], [s.eot, *text[2:] * 3]])
    found = topics.read_texts(s, idx, 'music', lists)
    logp = score(s, [([s.eot], [*text, s.eot]), ([s.eot], text[2:] * 3)], '')[0].sum().item()
    assert found == {'texts': 2, 'right': 1, 'words': 10, 'tokens': 11, 'of_topic': 2, 'of_bag': 1,
                     'logp': pytest.approx(logp, abs=1e-4)}


def test_a_transformer_that_reads_token_by_token_is_the_same_transformer():
    """Logits from kept keys and values equal those of a pass over the whole text, to 1e-5."""
    s, past = toy_subject(k=0, n_layer=3), torch.zeros(3, 2, 2, 2, 0, 8)
    idx = torch.randint(s.encoding.n_vocab, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for t in range(9):
            logits, past = topics.read_on(s.model, idx[:, t], past)
            torch.testing.assert_close(logits, s.model(idx)[:, t], atol=1e-5, rtol=1e-5)


def test_pplm_without_a_step_is_plain_sampling_and_steps_raise_the_bag():
    """At step 0 the draws are those of generate with the same seed; steering raises the probability of the
    bag in every text, a larger step more, and changes the draws."""
    s = toy_subject(k=0, n_layer=2)
    start, bag = torch.full((5, 1), s.eot), [word_id(s.encoding, word) for word in ('music', 'guitar')]

    def drawn(generate, *args) -> torch.Tensor:
        torch.manual_seed(3)
        return generate(*args)

    plain = drawn(topics.pplm, s.model, start, bag, 0.0, 12)
    assert torch.equal(plain, drawn(s.model.generate, start, 12))
    assert not torch.equal(plain, drawn(topics.pplm, s.model, start, bag, 10.0, 12))
    past, token, mass = torch.randn(2, 2, 5, 2, 6, 8), plain[:, 3], []
    before = topics.read_on(s.model, token, past)[0].softmax(-1).detach()
    for step in (0.0, 0.05, 0.2):
        moved = topics.steer(s.model, token, past, torch.tensor(bag), before, step)
        mass.append(topics.read_on(s.model, token, moved)[0].softmax(-1)[:, bag].sum(-1).detach())
    torch.testing.assert_close(mass[0], before[:, bag].sum(-1))
    assert (mass[1] > mass[0]).all() and (mass[2] > mass[1]).all()
