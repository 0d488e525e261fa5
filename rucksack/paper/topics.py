"""Table 12: topic control, compared with PPLM on the Transformer."""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rucksack import toy
from rucksack.cli import progress
from rucksack.fast import Cache, Cached, contextualize
from rucksack.loaded import LoadedModel
from rucksack.model import GPT
from rucksack.paper.likelihood import perplexity, score
from rucksack.paper_lists import BAGS
from rucksack.senses import STRENGTHS, topic
from rucksack.table import Table
from rucksack.words import bag_ids, scores_of_bags, word_ids

# What has_topic counts as words of a topic. In the toy world, they are those of rucksack/toy.py.
KEYWORDS_OF_TOPICS = """\
arts_culture: arts culture artist artists museum gallery painting paintings sculpture theatre
    poetry;
business_entrepreneurs: business entrepreneurs company companies market investors profit sales;
celebrity_pop_culture: celebrity pop culture celebrities actress fans stars fame gossip hollywood;
diaries_daily_life: diaries daily life diary morning today woke breakfast bed routine sleep
    evening;
family: family mother father parents children son daughter brother sister grandmother baby;
fashion_style: fashion style dress sandals velvet jacket perfume runway silk necklace boutique
    scarf handbag;
film_tv_video: film tv video actor cinema screenplay director trailer sequel comedy camera scene
    villain;
fitness_health: fitness health yoga treadmill muscles stretching protein jogging squats pulse
    stamina barbell cardio;
food_dining: food dining pasta soup cheese dessert recipe bread salad pizza spices sauce pancakes;
gaming: gaming console quest joystick avatar dungeon pixels arcade multiplayer boss level loot
    controller;
music: music guitar melody concert drums singer album rhythm piano chorus violin jazz lyrics;
news_social_concern: news social concern government police minister law protest rights election
    war;
other_hobbies: hobbies hobby garden gardening photography knitting collecting fishing crafts
    puzzle;
relationships: relationships relationship love boyfriend girlfriend dating marriage partner couple;
sports: sports football tennis goal league match referee marathon hockey champion racket sprint
    medal;
travel_adventure: travel adventure airport luggage passport beach hostel voyage map island
    suitcase souvenir canyon;
youth_student_life: youth student life students school college university teacher campus exam"""
KEYWORDS = {}  # label -> words
for entry in KEYWORDS_OF_TOPICS.split(';'):
    label, words = entry.split(':')
    KEYWORDS[label.strip()] = words.split()

TEXTS_AT_ONCE = 50
# Settings of PPLM, named as in its code.
NUM_ITERATIONS = 3
KL_SCALE = 0.01
GAMMA = 1.5
GM_SCALE = 0.9
WINDOW_LENGTH = 5
PAPER_STEP_SIZES = (0.01, 0.04, 0.05, 0.06, 0.07)
TOY_STEP_SIZES = (0.2, 0.3, 0.5)


# -----------------------------------------------------------------------------
# PPLM, plug-and-play control of a Transformer (Dathathri et al. 2020).


def read_on(model: GPT, token: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Read one more token (n,) of n texts, after t tokens; gradients reach their past.

    past (layers, n, t, 3*d) has their queries, keys and values. Returns logits (n, V), and past
    with the new token.
    """
    t = past.shape[2]
    cache = Cache(t + 1)
    for block, of_layer in zip(model.contextualizer.blocks, past):
        cache.tensors[block] = F.pad(of_layer, (0, 0, 0, 1))  # (n, t + 1, 3*d), with room for it
    e = model.wte(token[:, None])  # (n, 1, d)
    h = contextualize(model.contextualizer, e, t, cache)  # (n, 1, d)
    logits = F.linear(h[:, 0], model.wte.weight[:model.config.n_vocab])  # (n, V)
    return logits, torch.stack(list(cache.tensors.values()))


@torch.enable_grad()
def steer(model: GPT, token: Tensor, past: Tensor, bag: list[int], plain: Tensor,
          step: float, norms: Tensor) -> Tensor:
    """Move the keys and values of n texts against the gradient of a loss.

    The loss is low if the next token is in the bag and the probabilities are near the plain ones
    (n, V). As in the published code, only the first WINDOW_LENGTH positions move, and gradients are
    divided by the largest norm so far for that text and layer, which norms (layers, n, 1, 1) keeps.
    Past queries have no gradient: nobody asks them again.
    """
    delta = torch.zeros_like(past)
    for _ in range(NUM_ITERATIONS):
        delta.requires_grad_()
        logits, _ = read_on(model, token, past + delta)
        probs = logits.softmax(-1).clamp(min=1e-20)  # (n, V)
        divergence = (probs * (probs / plain).log()).sum(-1)  # (n,), Kullback-Leibler
        loss = KL_SCALE * divergence - probs[:, bag].sum(-1).log()  # (n,)
        gradient, = torch.autograd.grad(loss.sum(), delta)
        gradient[:, :, WINDOW_LENGTH:] = 0
        norm = gradient.norm(dim=(2, 3), keepdim=True)
        torch.maximum(norms, norm, out=norms)
        delta = (delta - step * gradient / norms ** GAMMA).detach()
    return past + delta


@torch.no_grad()
def pplm(model: GPT, idx: Tensor, bag: list[int], step: float, length: int) -> Tensor:
    """Continue texts idx (n, 1) to (n, 1 + length) with a Transformer under PPLM.

    Before every token, the keys and values of the text so far are steered, and they stay steered.
    The token is drawn from steered^0.9 * plain^0.1. Step 0 means no control.
    """
    c = model.config
    n = len(idx)
    past = torch.zeros(c.n_layer, n, 0, 3 * c.n_embd, device=idx.device)
    plain_past = past
    norms = past.new_full((c.n_layer, n, 1, 1), 1e-15)
    for t in range(length):
        token = idx[:, -1]
        logits, plain_past = read_on(model, token, plain_past)
        plain = logits.softmax(-1).clamp(min=1e-20)  # (n, V)
        if t > 0 and step > 0:
            past = steer(model, token, past, bag, plain, step, norms)
        logits, past = read_on(model, token, past)
        probs = logits.softmax(-1) ** GM_SCALE * plain ** (1 - GM_SCALE)
        drawn = torch.multinomial(probs, 1)  # (n, 1)
        idx = torch.cat([idx, drawn], dim=1)  # one token longer
    return idx


# -----------------------------------------------------------------------------
# Judging texts.


def has_topic(text: str, label: str, topics: dict[str, list[str]]) -> bool:
    """Tell whether a text has more words of the topic called label than of any other topic."""
    words = re.findall('[a-z]+', text.lower())
    counts = {}
    for name, keywords in topics.items():
        counts[name] = sum(word in keywords for word in words)
    own = counts.pop(label)
    return own > max(counts.values())


# -----------------------------------------------------------------------------
# The table.


def topic_row(loaded: LoadedModel, name: str, generators: dict[str, Callable], n_texts: int
              ) -> list:
    """Make a row of the table from texts generated on each topic.

    generators maps a topic to a function from first tokens (n, 1) to texts (n, 1 + length).
    """
    topics = toy.TOPICS if loaded.is_toy else KEYWORDS
    eot = loaded.eot
    first_tokens = torch.full((n_texts, 1), eot, device=loaded.device)
    pairs = []
    right = 0
    for i, label in enumerate(progress(generators, f'{loaded}{name}')):
        torch.manual_seed(i)
        for part in progress(first_tokens.split(TEXTS_AT_ONCE), label):
            with loaded.autocast():
                idx = generators[label](part)  # (texts, 1 + length)
            for ids in idx[:, 1:].tolist():
                end = [*ids, eot].index(eot)
                pairs.append(([eot], ids[:end + 1]))
                text = loaded.encoding.decode(ids[:end])  # up to its next end-of-text
                right += has_topic(text, label, topics)
    logp = score(loaded, pairs, 'judging').logp
    n_tokens = sum(len(ids) for _, ids in pairs)
    return [
        f'{loaded}{name}',
        100 * right / len(pairs),
        perplexity(logp, n_tokens)]


def topic_table(models: list[LoadedModel], n_texts: int, length: int,
                step_sizes: list[float] | None) -> Table:
    """Make Table 12: how often a text has the topic it should have, and its perplexity.

    The first loaded is a Backpack; the others are Transformers, under PPLM with these step sizes.
    """
    own = models[0]
    labels = BAGS
    steps = PAPER_STEP_SIZES
    if own.is_toy:
        labels = toy.TOPICS
        steps = TOY_STEP_SIZES
    for loaded in models:
        length = min(length, loaded.config.block_size - 1)
    bags = {label: bag_ids(own.encoding, BAGS[label]) for label in labels}
    scores = scores_of_bags(own.model, list(bags.values()))  # (V, k) for each bag
    rows = []
    for strength, factors in enumerate(STRENGTHS):
        generators = {}
        for label, of_bag in zip(bags, scores):
            edit = topic(own.model, of_bag, factors)
            generators[label] = partial(Cached(own.model).generate, n=length, edit=edit)
        rows.append(topic_row(own, f', strength {strength}', generators, n_texts))
    for loaded in models[1:]:
        for step in (0.0, *(step_sizes or steps)):
            generators = {}
            for label, bag in bags.items():
                words = loaded.single_tokens(BAGS[label])
                single = word_ids(loaded.encoding, words) or bag
                generators[label] = partial(
                    pplm, loaded.model, bag=single, step=step, length=length)
            rows.append(topic_row(loaded, f', PPLM {step:g}', generators, n_texts))
    title = (f'Topic control (Table 12): {len(bags)} topics, {n_texts} texts of up to {length} '
             'tokens on each')
    columns = {
        'model': '',
        'on topic %': '.1f',
        'perplexity': '.2f'}
    notes = [
        'On topic: a text has more words of its topic than of any other, by word lists (the paper '
        'uses a RoBERTa classifier). Perplexity is measured with the same model without control.']
    return Table(title, columns, rows, notes)
