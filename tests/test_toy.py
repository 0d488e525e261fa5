"""Claims about the toy world, and the paper's claims about a model trained on it.

To use another seed, and print the numbers:

    TOY_SEED=2 python -m pytest -s -m "slow or not slow" tests/test_toy.py
"""

import hashlib
import math
import os
import re
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
from rucksack.senses import STRENGTHS, replace_word, scale_senses, senses_after, separation, topic
from rucksack.tokenizer import load_tokenizer
from rucksack.vocabulary import BAGS, bag_ids, scores_of_bags
from rucksack.words import edit_targets, word_id

N_STORIES = world.N_TRAIN + world.N_VAL


@pytest.fixture(scope='module')
def stories():
    """Draw stories of the world, each with its surprisal in nats."""
    return world.toy_stories(7, 20_000)


def test_the_surprisal_is_that_of_the_choices(stories):
    """A topic story's surprisal sums over its kind, lines, words and topics (see WANDER)."""
    topic_of = {word: label for label, words in world.TOPICS.items() for word in words}
    stay = 1 - world.WANDER * 7 / 8
    n_lines = len(world.TOPIC_LINES)
    stays = []
    for story, nats in stories:
        topics = [[topic_of[word] for word in re.findall(r'\w+', sentence) if word in topic_of]
                  for sentence in story.split('.')[:-1]]
        if not any(topics):
            continue
        assert len(topics) == 6
        assert [len(set(of_sentence)) for of_sentence in topics] == [1] * 6
        n_words = sum(len(of_sentence) for of_sentence in topics)
        choices = math.log(8) + 6 * math.log(n_lines) + n_words * math.log(13)
        choices -= math.log(world.KINDS[world.topic_story])
        for before, after in zip(topics, topics[1:]):
            is_same = before[0] == after[0]
            choices -= math.log(stay if is_same else world.WANDER / 8)
            stays.append(is_same)
        assert nats == pytest.approx(choices)
    share_of_topic_stories = len(stays) / 5 / len(stories)
    assert np.mean(stays) == pytest.approx(stay, abs=0.01)
    assert share_of_topic_stories == pytest.approx(world.KINDS[world.topic_story], abs=0.01)


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
TEXTS = int(os.environ.get('TOY_TEXTS', 600))  # to generate on each topic at strength 2


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


@torch.no_grad()
def told(model, encoding, edit, n: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Generate n texts (n, 50), a mask up to each end (n, 50), and their loss without the edit."""
    torch.manual_seed(seed)
    first = torch.full((n, 1), encoding.eot_token)
    ids = model.generate(first, 50, edit=edit)  # (n, 51)
    texts = ids[:, 1:]
    ends = (texts == encoding.eot_token).int()
    ends_before = ends.cumsum(1) - ends
    is_story = ends_before == 0  # (n, 50), its end included
    loss = loss_of(model, ids)[is_story].mean().item()
    return texts, is_story, loss


@pytest.mark.slow
def test_topic_control_raises_the_share_of_the_topic(backpack):
    """Strength 2 raises the share by 3 standard errors, and the loss of texts by at most 5%."""
    model, encoding = backpack
    plain = told(model, encoding, None, 600, 0)
    labels = list(world.TOPICS)
    share = torch.zeros(len(labels), 4)
    error = torch.zeros(len(labels), 4)
    loss = torch.zeros(len(labels), 4)
    for i, label in enumerate(labels):
        of_topic = torch.tensor([word_id(encoding, word) for word in world.TOPICS[label]])
        bag = bag_ids(encoding, BAGS[label])
        scores = scores_of_bags(model, [bag])[0]
        for strength, weights in enumerate(STRENGTHS):
            n = TEXTS if strength == 2 else TEXTS // 4  # more for the claim
            texts, is_story, loss[i, strength] = plain
            if strength:
                edit = topic(model, scores, weights)
                texts, is_story, loss[i, strength] = told(model, encoding, edit, n, 1 + i)
            is_hit = torch.isin(texts, of_topic) & is_story
            hits = is_hit.sum(1) / is_story.sum()  # (n,), they sum to the share
            share[i, strength] = hits.sum()
            error[i, strength] = hits.std() * len(hits) ** 0.5
        columns = [f'{a:7.2%} {b:.2f}' for a, b in zip(share[i], loss[i])]
        print(f'\n{label:17}' + ''.join(columns), end='')
    mean = share.mean(0)  # (4,)
    spread = error.square().sum(0).sqrt() / len(labels)
    mean_loss = loss.mean(0)
    columns = [f'{a:.2%} +- {e:.2%}, loss {b:.2f};' for a, e, b in zip(mean, spread, mean_loss)]
    print('\nall:', *columns)
    assert mean_loss[2] < 1.05 * mean_loss[0]
    assert mean[2] - mean[0] > 3 * spread[[0, 2]].norm()
