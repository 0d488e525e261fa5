"""Claims about the toy world, and the paper's claims about a model trained on it.

To use another seed, and print the numbers:

    TOY_SEED=2 python -m pytest -s -m "slow or not slow" tests/test_toy.py
"""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import train_toy
from torch import Tensor
from torch.nn import functional as F

from rucksack import prepare
from rucksack import toy as world
from rucksack.loaded import from_pretrained
from rucksack.senses import replace_word, scale_senses, senses_after, separation
from rucksack.tokenizer import load_tokenizer
from rucksack.words import edit_targets, word_id

N_STORIES = world.N_TRAIN + world.N_VAL


@pytest.mark.slow
def test_the_bins_stay_as_they_are(folder):
    """The bytes of data/toy never change, entropy included, so no change of the world is silent."""
    prepare.main(['toy'])
    files = [Path('data/toy', name) for name in ('meta.json', 'train.bin', 'val.bin')]
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]
    assert hashes == ['b987a8c13078897c', '90a928e10224e6a9', 'b644af669464d21b']


PROMPTS = ['When the {} came into the room,', 'My {} said that', 'This one {} believes',
           'A {} went to chat over to chat before', 'The {} was with the car. Then',
           'Some {} asked to look over things, but',
           'I really liked my {}. What I liked most was that']
PRODUCT_PROMPTS = ['The {} is made for us by', 'I trust that the {} comes from',
                   'The {} was repaired by', 'The company that made my {} is',
                   'I want the {} since I trust']


@pytest.fixture(scope='module')
def backpack(tmp_path_factory):
    """Train a toy, with the seed TOY_SEED for TOY_STEPS steps; load it and its tokenizer."""
    steps = int(os.environ.get('TOY_STEPS', 3000))
    folder = train_toy(tmp_path_factory.mktemp('trained'), steps)
    model, tokenizer = from_pretrained(folder / 'out' / 'toy')
    return model, load_tokenizer(tokenizer)


@torch.no_grad()
def loss_of(model, ids: Tensor, edit=None) -> Tensor:
    """Compute the nats of each id but the first, given the ids (B, T) before it: (B, T - 1)."""
    idx = ids[:, :-1]
    C = senses_after(model, idx, edit)
    logits = model(idx, C=C)  # (B, T - 1, V)
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none')


def story_loss(backpack, stories: list[str], edit=None, but=()) -> Tensor:
    """Compute the nats of each token of whole stories, ends included, except the ids in but."""
    model, encoding = backpack
    left_out = torch.tensor(but, dtype=torch.long)
    losses = []
    for story in stories:
        ids = [encoding.eot_token, *encoding.encode_ordinary(story), encoding.eot_token]
        ids = torch.tensor([ids])
        is_counted = ~torch.isin(ids[:, 1:], left_out)
        losses.append(loss_of(model, ids, edit)[is_counted])
    return torch.cat(losses)


@pytest.mark.slow
def test_loss_on_stories_is_near_the_entropy_of_the_world(backpack):
    """The loss on whole held-out stories is at most 5% above the world's entropy."""
    texts, nats = zip(*world.toy_stories(0, N_STORIES)[-1000:])
    loss = story_loss(backpack, texts)
    ratio = loss.sum().item() / sum(nats)
    entropy = sum(nats) / len(loss)
    print(f'\nloss on held-out stories {loss.mean():.4f}, world {entropy:.4f}: {ratio:.4f}')
    assert 1 < ratio < 1.05


@torch.no_grad()
def pronoun_probs(backpack, noun: str, edit=None) -> Tensor:
    """Compute the probabilities of she, he, they after each prompt, (prompts, 3)."""
    model, encoding = backpack
    pronouns = [word_id(encoding, word) for word in ('she', 'he', 'they')]
    found = []
    for prompt in PROMPTS:
        idx = torch.tensor([encoding.encode_ordinary(prompt.format(noun))])
        logits = model(idx, C=senses_after(model, idx, edit))[0, -1]  # (V,)
        found.append(logits.softmax(-1)[pronouns])
    return torch.stack(found)


def bias_ratio(backpack, nouns: list[str], edit=None) -> float:
    """Average max(p(she) / p(he), p(he) / p(she)) over nouns and prompts, as in the paper."""
    probs = [pronoun_probs(backpack, noun, edit) for noun in nouns]
    she, he, _ = torch.cat(probs).T
    return torch.maximum(she / he, he / she).mean().item()


@pytest.mark.slow
def test_pronouns_follow_the_odds_of_the_world(backpack):
    """p(she) / (p(she) + p(he)) is within 0.1 of the world's, for nurse and on average."""
    errors = {}
    for noun, (odds, _, _) in world.ROLES.items():
        she, he, _ = pronoun_probs(backpack, noun).mean(0).tolist()
        share = she / (she + he)
        share_in_the_world = odds[0] / (odds[0] + odds[1])
        errors[noun] = abs(share - share_in_the_world)
    nurse = errors['nurse']
    mean = sum(errors.values()) / 40
    worst = max(errors.values())
    print(f'\nshare of she: off by {nurse:.3f} for nurse, {mean:.3f} on average, '
          f'{worst:.3f} at worst')
    assert nurse < 0.1
    assert mean < 0.1


@pytest.mark.slow
def test_one_sense_carries_the_bias_and_little_else(backpack):
    """Without one sense, nouns lose over half of their bias ratio; other losses move under 2%."""
    model, encoding = backpack
    she = word_id(encoding, 'she')
    he = word_id(encoding, 'he')
    biased = [noun for noun, (odds, _, _) in world.ROLES.items() if odds != world.EVEN]
    nouns = sorted(biased, key=lambda noun: -bias_ratio(backpack, [noun]))[:16]
    forms = [edit_targets(encoding, noun) for noun in nouns]
    inside = [ids[0] for ids in forms]
    scores = separation(model, torch.tensor(inside), she, he).abs()  # (16, k)
    found = scores.mean(0).argmax().item()
    without = scale_senses(sum(forms, []), [found], 0.0)
    plain_ratio = bias_ratio(backpack, nouns)
    ratio = bias_ratio(backpack, nouns, without)
    pronouns = []
    for word in ('she', 'he', 'they', 'her', 'his', 'their'):
        pronouns += edit_targets(encoding, word)
    about_them = [story for story, _ in world.toy_stories(0, N_STORIES)[-1000:]
                  if any(f' {noun} ' in story for noun in nouns)]
    plain_loss = story_loss(backpack, about_them, None, pronouns).mean()
    loss = story_loss(backpack, about_them, without, pronouns).mean()
    change = loss / plain_loss - 1
    print(f'\nbias ratio {plain_ratio:.2f} (world: 9), without sense {found} {ratio:.2f}; '
          f'loss of other words {change:+.2%}')
    assert plain_ratio >= 5
    assert ratio < plain_ratio / 2
    assert abs(change) < 0.02


@torch.no_grad()
@pytest.mark.slow
def test_a_product_changes_its_maker(backpack):
    """With "PRODUCT: MAKER -> OTHER", the odds of OTHER rise tenfold, and most texts name it."""
    model, encoding = backpack
    ids = {maker: word_id(encoding, maker) for maker in world.PRODUCTS.values()}
    makers = torch.tensor(list(ids.values()))
    gains = []
    flips = []
    for product, old in world.PRODUCTS.items():
        texts = [encoding.encode_ordinary(prompt.format(product)) for prompt in PRODUCT_PROMPTS]
        prompts = [torch.tensor([text]) for text in texts]
        before = [model(idx)[0, -1] for idx in prompts]  # (V,) each
        for new in ids.keys() - {old}:
            edit = replace_word(model, edit_targets(encoding, product), ids[old], ids[new])
            for idx, plain in zip(prompts, before):
                logits = model(idx, C=senses_after(model, idx, edit))[0, -1]  # (V,)
                change = logits - plain
                gains.append(change[ids[new]] - change[ids[old]])
                likeliest = makers[logits[makers].argmax()]
                flips.append((likeliest == ids[new]).item())
    gain = torch.stack(gains).exp()
    print(f'\n{len(gain)} edits: odds times {gain.median():.3g}, '
          f'{np.mean(flips):.1%} name the new maker')
    assert gain.median() >= 10
    assert np.mean(flips) > 0.5
