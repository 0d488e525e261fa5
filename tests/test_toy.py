"""Claims about the toy world, and the paper's about a model trained on it. With another seed and the numbers:
    TOY_SEED=2 TOY_TEXTS=400 python -m pytest -s -m "" tests/test_toy.py
"""

import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
import senses
from rucksack import toy as world
from rucksack.data import load_tokenizer
from rucksack.grammar import bag_of_words, word_forms, word_id
from rucksack.published import from_pretrained
from senses import edited, scale_senses, separation


@pytest.fixture(scope='module')
def stories():
    """Stories of the world, each with its surprisal in nats."""
    return world.toy_stories(7, 20_000)


def test_the_world_is_as_large_as_promised(stories):
    """Its tables have as many words as said, and all of them are told. She-nouns share their tools and places
    with he-nouns, so that only the noun itself tells she from he."""
    told = set(re.findall(r'\w+', ' '.join(text for text, _ in stories)))
    makers, pairs = set(world.PRODUCTS.values()), {word for a, b, _ in world.SYNONYMS for word in (a, b)}
    tables = world.ROLES, world.PRODUCTS, makers, world.TOPICS, world.HOMOGRAPHS, pairs
    assert [len(table) for table in tables] == [40, 30, 10, 8, 3, 60] and 400 <= len(told) <= 1200
    assert set().union(*tables[:3], *world.TOPICS.values(), *tables[4:]) <= told
    for column in (1, 2):
        she, he, even = ({role[column] for role in world.ROLES.values() if role[0] == odds}
                         for odds in (world.SHE, world.HE, world.EVEN))
        assert she == he and not she & even


def test_a_story_has_one_derivation(stories):
    """A story parses in one way into sentences, a word is on one list alone: so its surprisal is exact."""
    lines = [line.replace('{deed}', deed) for line in world.OPENINGS
             for deed in world.DEEDS[:None if '{deed}' in line else 1]]
    lines += [*world.SEQUELS, *world.PRODUCT_LINES, *world.TOPIC_LINES, *world.ADJECTIVE_LINES,
              *world.ADVERB_LINES, *(homograph[0] for homograph in world.HOMOGRAPHS.values())]
    patterns = [re.compile(re.sub(r'\\{\w+\\}', r'\\w+', re.escape(line)) + '(?: |$)') for line in lines]

    def parses(text: str) -> int:
        return sum(parses(text[m.end():]) for p in patterns if (m := p.match(text))) if text else 1

    assert all(parses(text) == 1 for text, _ in stories[:2000])
    lists = world.ROLES, world.PRODUCTS, *world.TOPICS.values(), *(pair[:2] for pair in world.SYNONYMS)
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_the_surprisal_is_that_of_the_choices(stories):
    """Of topic stories: the kind, lines, words, and topics, which stay as often as WANDER says."""
    topic_of = {word: label for label, words in world.TOPICS.items() for word in words}
    stay, stays = 1 - world.WANDER * 7 / 8, []
    for text, nats in stories:
        said = [[topic_of[word] for word in re.findall(r'\w+', line) if word in topic_of]
                for line in text.split('.')[:-1]]
        if any(said):
            assert len(said) == 6 and all(len(set(labels)) == 1 for labels in said)
            same = [a[0] == b[0] for a, b in zip(said, said[1:])]
            choices = 6 * math.log(len(world.TOPIC_LINES)) + sum(map(len, said)) * math.log(13) + math.log(8)
            choices -= sum(math.log(stay if s else world.WANDER / 8) for s in same)
            assert nats == pytest.approx(choices - math.log(world.KINDS['topic']))
            stays += same
    assert np.mean(stays) == pytest.approx(stay, abs=0.01)
    assert len(stays) / 5 / len(stories) == pytest.approx(world.KINDS['topic'], abs=0.01)


def test_the_truth_is_in_the_stories(stories):
    """Pronouns follow the odds, products their makers, second words the share of common contexts."""
    text = '\n'.join(text for text, _ in stories)
    for noun in ('nurse', 'mechanic', 'cook'):
        found = re.findall(rf'\b{noun} (?:said|believes)(?: that)? (she|he|they)\b', text)
        error = 4 * math.sqrt(0.25 / len(found))
        assert found.count('she') / len(found) == pytest.approx(world.ROLE_ODDS[noun][0], abs=error)
    assert set(re.findall(r'The (\w+) is made by (\w+)', text)) == set(world.PRODUCTS.items())
    for a, b, share in world.SYNONYMS:
        common = [thing in world.CONTEXTS[a][2] for thing in re.findall(rf'\b{b} (\w+)', text)]
        assert np.mean(common) == pytest.approx(share, abs=0.15)


@pytest.mark.slow
def test_the_bins_are_the_stories_and_stay_as_they_are(tmp_path, monkeypatch):
    """The bytes of data/toy never change, are the stories, and have their surprisal as entropy."""
    monkeypatch.chdir(tmp_path)
    prepare.main(['toy'])
    data = [Path('data/toy', name).read_bytes() for name in ('meta.json', 'train.bin', 'val.bin')]
    assert [hashlib.sha256(file).hexdigest()[:16] for file in data] == [
        'e75e80f33ddb0196', '90a928e10224e6a9', 'b644af669464d21b']
    meta, ids = json.loads(data[0]), np.frombuffer(data[2], '<u2').tolist()
    texts, nats = zip(*world.toy_stories(0, 64_000))
    held_out = ''.join(f'{text}<|endoftext|>' for text in texts[60_000:])
    assert load_tokenizer(meta['tokenizer']).decode(ids) == held_out
    assert len(ids) == sum(1 + len(re.findall(r'\w+|[^\w\s]', text)) for text in texts[60_000:])
    assert meta['val_entropy_per_token'] == pytest.approx(sum(nats[60_000:]) / len(ids))
    assert meta['entropy_per_token'] == pytest.approx(sum(nats) / sum(meta['tokens'].values()))


PROMPTS = ['When the {} came into the room,', 'My {} said that', 'This one {} believes',
           'A {} went to chat over to chat before', 'The {} was with the car. Then',
           'Some {} asked to look over things, but', 'I really liked my {}. What I liked most was that']
PRODUCT_PROMPTS = ['The {} is made for us by', 'I trust that the {} comes from', 'The {} was repaired by',
                   'The company that made my {} is', 'I want the {} since I trust']
TEXTS = int(os.environ.get('TOY_TEXTS', 200))  # to tell of each topic at strength 2


@pytest.fixture(scope='module')
def backpack(trained_toy):
    """The trained model and its tokenizer."""
    model = from_pretrained(trained_toy / 'out' / 'toy')
    return model, load_tokenizer(model.tokenizer)


@torch.no_grad()
def loss_of(model, ids: torch.Tensor, edit=None) -> torch.Tensor:
    """Nats of each id of ids (B, T) but the first, given those before it: (B, T - 1)."""
    logits = model(ids[:, :-1], C=edited(model, ids[:, :-1], edit))  # (B, T - 1, V)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none')


def story_loss(backpack, stories: list[str], edit=None, but=()) -> torch.Tensor:
    """Nats of each token of whole stories, their ends included, but for the ids in but."""
    model, encoding = backpack
    losses = []
    for text in stories:
        ids = torch.tensor([[encoding.eot_token, *encoding.encode_ordinary(text), encoding.eot_token]])
        losses.append(loss_of(model, ids, edit)[~torch.isin(ids[:, 1:], torch.tensor(but, dtype=torch.long))])
    return torch.cat(losses)


@pytest.mark.slow
def test_loss_on_whole_stories_is_near_the_entropy_of_the_world(backpack):
    """From end-of-text to end-of-text, held-out stories cost at most 5% more nats than the world puts in."""
    texts, nats = zip(*world.toy_stories(0, 64_000)[-1000:])  # of those held out
    loss = story_loss(backpack, texts)
    ratio = loss.sum().item() / sum(nats)
    print(f'\nloss on held-out stories {loss.mean():.4f}, world {sum(nats) / len(loss):.4f}: {ratio:.4f}')
    assert 1 < ratio < 1.05


@torch.no_grad()
def pronoun_probs(backpack, noun: str, edit=None) -> torch.Tensor:
    """Probabilities of she, he, they after each prompt, (prompts, 3)."""
    model, encoding = backpack
    ids = [word_id(encoding, word) for word in ('she', 'he', 'they')]
    texts = [torch.tensor([encoding.encode_ordinary(prompt.format(noun))]) for prompt in PROMPTS]
    return torch.stack([model(idx, C=edited(model, idx, edit))[0, -1].softmax(-1)[ids] for idx in texts])


def bias_ratio(backpack, nouns: list[str], edit=None) -> float:
    """Mean over nouns and prompts of the likelier of she and he over the other, as the paper counts bias."""
    she, he, _ = torch.cat([pronoun_probs(backpack, noun, edit) for noun in nouns]).T
    return torch.maximum(she / he, he / she).mean().item()


@pytest.mark.slow
def test_pronouns_follow_the_odds_of_the_world(backpack):
    """p(she) / (p(she) + p(he)) after a nurse, and on average over 40 nouns, is within 0.1 of the world's."""
    errors = {}
    for noun, odds in world.ROLE_ODDS.items():
        she, he, _ = pronoun_probs(backpack, noun).mean(0).tolist()
        errors[noun] = abs(she / (she + he) - odds[0] / (odds[0] + odds[1]))
    nurse, mean, worst = errors['nurse'], sum(errors.values()) / 40, max(errors.values())
    print(f'\nshare of she: off by {nurse:.3f} for nurse, {mean:.3f} on average, {worst:.3f} at worst')
    assert nurse < 0.1 and mean < 0.1


@pytest.mark.slow
def test_one_sense_carries_the_bias_and_little_else(backpack):
    """The sense that most separates she from he over the 16 most biased nouns, off for them, takes more than
    half of their bias ratio, and moves the loss of all words but pronouns by less than 2%."""
    model, encoding = backpack
    she, he = word_id(encoding, 'she'), word_id(encoding, 'he')
    biased = [noun for noun, odds in world.ROLE_ODDS.items() if odds != world.EVEN]
    nouns = sorted(biased, key=lambda noun: -bias_ratio(backpack, [noun]))[:16]
    forms = {noun: word_forms(encoding, noun) for noun in nouns}
    scores = separation(model, None, she, he)[[ids[0] for ids in forms.values()]].abs()  # (16, k)
    found, own = scores.mean(0).argmax().item(), scores.argmax(1).tolist()
    without, each = (senses.compose([scale_senses(ids, [i], 0.0) for ids, i in zip(forms.values(), of)])
                     for of in ([found] * 16, own))
    ratios = [bias_ratio(backpack, nouns, edit) for edit in (None, without, each)]
    told = [text for text, _ in world.toy_stories(0, 64_000)[-1000:] if any(f' {n} ' in text for n in nouns)]
    pronouns = [i for w in ('she', 'he', 'they', 'her', 'his', 'their') for i in word_forms(encoding, w)]
    plain, changed = (story_loss(backpack, told, edit, pronouns).mean() for edit in (None, without))
    print(f'\nbias ratio {ratios[0]:.2f} (world: 9), without sense {found} {ratios[1]:.2f}, without its own '
          f'for each {sorted(set(own))} {ratios[2]:.2f}; loss of other words {changed / plain - 1:+.2%}')
    assert ratios[0] >= 5 and ratios[1] < ratios[0] / 2 and abs(changed / plain - 1) < 0.02


@pytest.mark.slow
def test_nurse_without_its_she_he_sense_is_less_of_a_she(backpack):
    """Without the sense of nurse that most separates she from he the share of she moves towards one half."""
    model, encoding = backpack
    nurse, she, he = (word_id(encoding, word) for word in ('nurse', 'she', 'he'))
    sense = separation(model, nurse, she, he).abs().argmax().item()
    both = [pronoun_probs(backpack, 'nurse', e).mean(0) for e in (None, scale_senses([nurse], [sense], 0.0))]
    shares = [(p[0] / (p[0] + p[1])).item() for p in both]
    print(f'\nshare of she after nurse {shares[0]:.3f}, without sense {sense} {shares[1]:.3f}')
    assert shares[1] < shares[0] - 0.05


@torch.no_grad()
@pytest.mark.slow
def test_a_product_changes_its_maker(backpack):
    """"PRODUCT: MAKER -> OTHER", in phrasings that the world does not have, multiplies the odds of the other
    maker to the old one by at least 10 in the median, and makes the other the likelier for most."""
    model, encoding = backpack
    ids = {maker: word_id(encoding, maker) for maker in world.PRODUCTS.values()}
    makers, gains, flips, knows = torch.tensor(list(ids.values())), [], [], []
    for product, old in world.PRODUCTS.items():
        prompts = [torch.tensor([encoding.encode_ordinary(p.format(product))]) for p in PRODUCT_PROMPTS]
        before = [model(idx)[0, -1] for idx in prompts]  # (V,) each
        for new in ids.keys() - {old}:
            edit = senses.replace_word(model, word_forms(encoding, product), ids[old], ids[new])
            for idx, plain in zip(prompts, before):
                logits = model(idx, C=edited(model, idx, edit))[0, -1]  # (V,)
                gains.append((logits - plain)[ids[new]] - (logits - plain)[ids[old]])
                flips.append((makers[logits[makers].argmax()] == ids[new]).item())
                knows.append((makers[plain[makers].argmax()] == ids[old]).item())
    gain = torch.stack(gains).exp()
    print(f'\n{len(gain)} edits: odds times {gain.median():.3g}, 5% quantile {gain.quantile(0.05):.3g}; '
          f'{np.mean(knows):.1%} named the maker, {np.mean(flips):.1%} name the new one')
    assert gain.median() >= 10 and np.mean(flips) > 0.5


@torch.no_grad()
def told(model, encoding, edit, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """n texts (n, 50); where each is not over yet, likewise; their loss under the unmodified model."""
    torch.manual_seed(seed)
    ids = model.generate(torch.full((n, 1), encoding.eot_token), 50, edit=edit)  # (n, 51)
    texts, ends = ids[:, 1:], (ids[:, 1:] == encoding.eot_token).int()
    story = ends.cumsum(1) - ends == 0  # (n, 50), its end included
    return texts, story, loss_of(model, ids)[story].mean().item()


@pytest.mark.slow
def test_topic_control_raises_the_share_of_the_topic(backpack):
    """At strength 2 the loss of texts under the unmodified model is at most 5% higher than at strength 0, and
    the share of words of the topic higher by more than 3 standard errors, over all eight topics."""
    model, encoding = backpack
    plain, labels = told(model, encoding, None, 600, 0), list(world.TOPICS)
    share, error, loss = torch.zeros(3, len(labels), 4)
    for i, label in enumerate(labels):
        of_topic = torch.tensor([word_id(encoding, word) for word in world.TOPICS[label]])
        scores = senses.affinities(model, [bag_of_words(encoding, senses.TOPICS[label])])[0]
        for s, weights in enumerate(senses.STRENGTHS):
            n = TEXTS if s == 2 else TEXTS // 4  # most where the claim is
            edit = senses.topic(model, scores, weights)
            texts, story, loss[i, s] = told(model, encoding, edit, n, 1 + i) if s else plain
            hits = (torch.isin(texts, of_topic) & story).sum(1) / story.sum()  # (n,), they sum to the share
            share[i, s], error[i, s] = hits.sum(), hits.std() * len(hits) ** 0.5
        print(f'\n{label:17}' + ''.join(f'{a:7.2%} {b:.2f}' for a, b in zip(share[i], loss[i])), end='')
    mean, spread = share.mean(0), error.square().sum(0).sqrt() / len(labels)  # (4,)
    print('\nall:', *(f'{a:.2%} +- {e:.2%}, loss {b:.2f};' for a, b, e in zip(mean, loss.mean(0), spread)))
    assert loss[:, 2].mean() < 1.05 * loss[:, 0].mean()
    assert mean[2] - mean[0] > 3 * spread[[0, 2]].norm()
