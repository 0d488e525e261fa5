"""The paper's claims on a model trained on the toy world, whose truth is known.

Another seed, or the whole training of config/train_toy.py, with the numbers shown:
    TOY_SEED=2 TOY_STEPS=2000 python -m pytest -s tests/test_toy.py
"""

import json

import pytest
import torch
import torch.nn.functional as F

import prepare
from model import from_pretrained
from senses import scale_senses, separation, word_id

PROMPTS = ['When the {} came into the room,', 'My {} said that', 'This one {} believes',
           'A {} went to chat over to chat before', 'The {} was with the car. Then',
           'Some {} asked to look over things, but', 'I really liked my {}. What I liked most was that']
BIASED = [noun for noun, odds in prepare.ROLE_ODDS.items() if odds != prepare.EVEN]


@pytest.fixture(scope='module')
def backpack(toy):
    """The trained model and its tokenizer."""
    model = from_pretrained(toy / 'out' / 'toy')
    return model, prepare.load_tokenizer(model.tokenizer)


def pronoun_probs(backpack, noun: str, edit=None) -> torch.Tensor:
    """Probabilities of she, he, they after each prompt, (prompts, 3)."""
    model, encoding = backpack
    ids = [word_id(encoding, word) for word in ('she', 'he', 'they')]
    rows = []
    with torch.no_grad():
        for prompt in PROMPTS:
            idx = torch.tensor([encoding.encode_ordinary(prompt.format(noun))])
            rows.append(model(idx, edit=edit)[0][0, -1].softmax(-1)[ids])
    return torch.stack(rows)


def bias_ratio(backpack, edit_of=lambda noun: None) -> float:
    """Mean over biased nouns and prompts of the likelier of she and he over the other, as the paper
    counts bias."""
    ratios = []
    for noun in BIASED:
        she, he, _ = pronoun_probs(backpack, noun, edit_of(noun)).T
        ratios.append(torch.maximum(she / he, he / she))
    return torch.cat(ratios).mean().item()


def test_loss_on_whole_stories_is_near_the_entropy_of_the_world(toy, backpack):
    """From end-of-text to end-of-text, held-out stories cost at most 5% more nats than the world itself
    puts in."""
    model, encoding = backpack
    meta = json.loads((toy / 'data' / 'toy' / 'meta.json').read_text())
    stories = prepare.toy_stories(meta['command']['seed'], meta['documents'])[-1000:]
    loss = tokens = 0
    with torch.no_grad():
        for text, _ in stories:
            ids = torch.tensor([[encoding.eot_token] + encoding.encode_ordinary(text) + [encoding.eot_token]])
            loss += F.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:], reduction='sum').item()
            tokens += ids.shape[1] - 1
    world = sum(nats for _, nats in stories)
    print(f'\nloss on held-out stories {loss / tokens:.4f}, world {world / tokens:.4f}: '
          f'ratio {loss / world:.4f}')
    assert 1 < loss / world < 1.05


def test_pronouns_follow_the_odds_of_the_world(backpack):
    """p(she) / (p(she) + p(he)) after a nurse, and on average over the 40 nouns, is within 0.1 of the
    world's odds."""
    errors = {}
    for noun, odds in prepare.ROLE_ODDS.items():
        she, he, _ = pronoun_probs(backpack, noun).mean(0).tolist()
        errors[noun] = abs(she / (she + he) - odds[0] / (odds[0] + odds[1]))
    print(f'\nshare of she: off by {errors["nurse"]:.3f} for nurse, {sum(errors.values()) / 40:.3f} '
          f'on average, {max(errors.values()):.3f} at worst')
    assert errors['nurse'] < 0.1 and sum(errors.values()) / 40 < 0.1


def test_one_sense_carries_the_bias(backpack):
    """The bias ratio of the 9:1 nouns is at least 5; without the one best sense index it is at most
    half of that."""
    model, encoding = backpack
    she, he = word_id(encoding, 'she'), word_id(encoding, 'he')
    before = bias_ratio(backpack)

    def without(sense_of):
        return bias_ratio(backpack, lambda n: scale_senses([word_id(encoding, n)], [sense_of(n)], 0.0))

    single = [without(lambda noun, l=l: l) for l in range(model.config.n_sense)]
    own = without(lambda noun: separation(model, word_id(encoding, noun), she, he).abs().argmax().item())
    best = single.index(min(single))
    print(f'\nbias ratio {before:.2f} (world: 9); without sense {best} of all {single[best]:.2f}; '
          f"without each noun's own she/he sense {own:.2f}")
    assert before >= 5 and min(min(single), own) <= before / 2


def test_nurse_without_its_she_he_sense_is_less_of_a_she(backpack):
    """Turning off the sense of nurse that most separates she from he moves the share of she towards one
    half."""
    model, encoding = backpack
    nurse, she, he = (word_id(encoding, word) for word in ('nurse', 'she', 'he'))
    sense = separation(model, nurse, she, he).abs().argmax().item()
    before, after = (pronoun_probs(backpack, 'nurse', edit).mean(0)
                     for edit in (None, scale_senses([nurse], [sense], 0.0)))
    shares = [(p[0] / (p[0] + p[1])).item() for p in (before, after)]
    print(f'\nshare of she after nurse {shares[0]:.3f}, without sense {sense} {shares[1]:.3f}')
    assert shares[1] < shares[0] - 0.05
