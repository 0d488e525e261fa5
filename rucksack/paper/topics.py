"""Table 12: topic control, compared with PPLM on the Transformer."""

import re
import time
from collections.abc import Callable, Iterator
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
from rucksack.words import bag_ids, topic_scores, word_ids

# What has_topic counts as words of a topic. The other eight topics are those of the toy world.
OTHER_TOPICS = """\
arts_culture: arts culture artist artists museum gallery painting paintings sculpture theatre
    poetry;
business_entrepreneurs: business entrepreneurs company companies market investors profit sales;
celebrity_pop_culture: celebrity pop culture celebrities actress fans stars fame gossip hollywood;
diaries_daily_life: diaries daily life diary morning today woke breakfast bed routine sleep
    evening;
family: family mother father parents children son daughter brother sister grandmother baby;
news_social_concern: news social concern government police minister law protest rights election
    war;
other_hobbies: hobbies hobby garden gardening photography knitting collecting fishing crafts
    puzzle;
relationships: relationships relationship love boyfriend girlfriend dating marriage partner couple;
youth_student_life: youth student life students school college university teacher campus exam"""
KEYWORDS = dict(toy.TOPICS)  # label -> words
for entry in OTHER_TOPICS.split(';'):
    label, words = entry.split(':')
    KEYWORDS[label.strip()] = words.split()

TEXTS_AT_ONCE = 50
# Settings of PPLM, named as in its code.
NUM_ITERATIONS = 3
KL_SCALE = 0.01
GAMMA = 1.5
GM_SCALE = 0.9
WINDOW_LENGTH = 5
STEP_SIZES = (0.01, 0.04, 0.05, 0.06, 0.07, 0.2, 0.5, 1.0)  # the paper's five, and larger ones
TOY_STEP_SIZES = (0.2, 0.3, 0.5)


# -----------------------------------------------------------------------------
# PPLM, plug-and-play control of a Transformer (Dathathri et al. 2020).


def read_on(model: GPT, token: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Read one more token (n,) of n texts, after t tokens; gradients flow to the past.

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
    Past queries get no gradient, because they are not used again.
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
def pplm(model: GPT, idx: Tensor, n: int, bag: list[int], step: float) -> Tensor:
    """Continue texts idx (B, 1) to (B, 1 + n) with a Transformer under PPLM.

    Before every token, the keys and values of the text so far are steered, and they stay steered.
    The token is drawn from steered^0.9 * plain^0.1. Step 0 means no control.
    """
    c = model.config
    B = len(idx)
    past = torch.zeros(c.n_layer, B, 0, 3 * c.n_embd, device=idx.device)
    plain_past = past
    norms = past.new_full((c.n_layer, B, 1, 1), 1e-15)
    for t in range(n):
        token = idx[:, -1]
        logits, plain_past = read_on(model, token, plain_past)
        plain = logits.softmax(-1).clamp(min=1e-20)  # (B, V)
        if t > 0 and step > 0:
            past = steer(model, token, past, bag, plain, step, norms)
        logits, past = read_on(model, token, past)
        probs = logits.softmax(-1) ** GM_SCALE * plain ** (1 - GM_SCALE)
        drawn = torch.multinomial(probs, 1)  # (B, 1)
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


COLUMNS = {
    'model': '',
    'on topic %': '.1f',
    'words of the bag %': '.2f',
    'perplexity': '.2f',
    'seconds a text': '.2f'}


def generators_of(models: list[LoadedModel], labels: list[str], steps: list[float]
                  ) -> list[tuple[LoadedModel, str, list[Callable]]]:
    """List what the rows need: a model, the name of its control, and a generator for each topic.

    A generator takes first tokens (B, 1) and n, and returns texts (B, 1 + n).
    """
    own = models[0]
    bags = [BAGS[label] for label in labels]
    scores = topic_scores(own.model, own.encoding, bags)  # (bags, V, k)
    rows = []
    for strength, factors in enumerate(STRENGTHS):
        generators = []
        for of_bag in scores:
            edit = topic(own.model, of_bag, factors)
            generators.append(partial(Cached(own.model).generate, edit=edit))
        rows.append((own, f', strength {strength}', generators))
    for loaded in models[1:]:
        for step in (0.0, *steps):
            generators = []
            for bag in bags:
                single = word_ids(loaded.encoding, loaded.single_tokens(bag))
                ids = single or bag_ids(loaded.encoding, bag)
                generators.append(partial(pplm, loaded.model, bag=ids, step=step))
            rows.append((loaded, f', PPLM {step:g}', generators))
    return rows


def topic_row(loaded: LoadedModel, name: str, generators: list[Callable], labels: list[str],
              n_texts: int, length: int) -> list:
    """Make a row of the table from texts generated on each topic."""
    topics = toy.TOPICS if loaded.is_toy else KEYWORDS
    eot = loaded.eot
    first_tokens = torch.full((n_texts, 1), eot, device=loaded.device)
    pairs = []
    on_topic = 0
    in_bag = 0
    seconds = 0.0
    with loaded.autocast():
        generators[0](first_tokens[:1], n=1)  # a first call is slower, so it isn't timed
    for i, label in enumerate(progress(labels, f'{loaded}{name}')):
        torch.manual_seed(i)
        bag = bag_ids(loaded.encoding, BAGS[label])
        for part in first_tokens.split(TEXTS_AT_ONCE):
            start = time.monotonic()
            with loaded.autocast():
                idx = generators[i](part, n=length)  # (texts, 1 + length)
            texts = idx[:, 1:].tolist()  # waits for the device
            seconds += time.monotonic() - start
            for ids in texts:
                end = [*ids, eot].index(eot)
                pairs.append(([eot], ids[:end + 1]))
                text = loaded.encoding.decode(ids[:end])  # up to its next end-of-text
                on_topic += has_topic(text, label, topics)
                in_bag += sum(v in bag for v in ids[:end])
    logp = score(loaded, pairs, 'judging').logp
    n_tokens = sum(len(ids) for _, ids in pairs)
    n = len(pairs)
    return [f'{loaded}{name}', 100 * on_topic / n, 100 * in_bag / n_tokens,
            perplexity(logp, n_tokens), seconds / n]


def topic_tables(models: list[LoadedModel], n_texts: int, length: int,
                 step_sizes: list[float] | None) -> Iterator[Table]:
    """Yield Table 12 after each row: how often texts have their topic, and their perplexity.

    The first model is a Backpack; the others are Transformers, under PPLM with these step sizes.
    """
    own = models[0]
    labels = list(toy.TOPICS if own.is_toy else BAGS)
    steps = step_sizes or (TOY_STEP_SIZES if own.is_toy else STEP_SIZES)
    for loaded in models:
        length = min(length, loaded.config.block_size - 1)
    title = (f'Topic control (Table 12): {len(labels)} topics, {n_texts} texts of up to {length} '
             'tokens for each')
    notes = [
        'On topic: a text has more words of its topic than of any other, by word lists (the paper '
        'uses a RoBERTa classifier).',
        "Words of the bag: the share of tokens that are in the topic's bag of words (Table 10).",
        'Perplexity is measured with the same model without control.']
    rows = []
    for loaded, name, generators in progress(generators_of(models, labels, steps), 'topic'):
        rows.append(topic_row(loaded, name, generators, labels, n_texts, length))
        yield Table(title, COLUMNS, rows, notes)
