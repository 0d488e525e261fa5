"""How texts on a topic are written by a Backpack, and measured (Table 12)."""

import re
import time
from collections.abc import Callable
from functools import partial

import torch

from rucksack import toy
from rucksack.cli import progress
from rucksack.fast import Cached
from rucksack.loaded import LoadedModel
from rucksack.paper.likelihood import Pair, score
from rucksack.senses import STRENGTHS, topic
from rucksack.vocabulary import BAGS, bag_ids, topic_scores

# Topic -> a function that continues first tokens (B, 1) by n tokens: (B, 1 + n).
Writers = dict[str, Callable]

# What has_topic counts as words of a topic. The other eight topics are those of the toy world.
OTHER_TOPICS = {
    'arts_culture': 'arts culture artist artists museum gallery painting paintings sculpture '
                    'theatre poetry',
    'business_entrepreneurs': 'business entrepreneurs company companies market investors profit '
                              'sales',
    'celebrity_pop_culture': 'celebrity pop culture celebrities actress fans stars fame gossip '
                             'hollywood',
    'diaries_daily_life': 'diaries daily life diary morning today woke breakfast bed routine sleep '
                          'evening',
    'family': 'family mother father parents children son daughter brother sister grandmother baby',
    'news_social_concern': 'news social concern government police minister law protest rights '
                           'election war',
    'other_hobbies': 'hobbies hobby garden gardening photography knitting collecting fishing '
                     'crafts puzzle',
    'relationships': 'relationships relationship love boyfriend girlfriend dating marriage partner '
                     'couple',
    'youth_student_life': 'youth student life students school college university teacher campus '
                          'exam'}
WORDS = toy.TOPICS | {label: words.split() for label, words in OTHER_TOPICS.items()}
TOPICS = {label: WORDS[label] for label in BAGS}  # in the order of Table 10

TEXTS_AT_ONCE = 50


def topics_of(loaded: LoadedModel) -> dict[str, list[str]]:
    """Return the topics that a model can write about, each with the words that has_topic counts."""
    return toy.TOPICS if loaded.is_toy else TOPICS


def has_topic(text: str, label: str, topics: dict[str, list[str]]) -> bool:
    """Tell whether a text has more words of the topic called label than of any other topic."""
    words = re.findall('[a-z]+', text.lower())
    counts = {name: sum(word in topics[name] for word in words) for name in topics}
    own = counts.pop(label)
    return own > max(counts.values())


def measure(loaded: LoadedModel, control: float, writers: Writers, texts: int, length: int
            ) -> tuple[dict, list[Pair]]:
    """Write texts on each topic under a strength or step, and measure them.

    Returns a row, and the texts: pairs of an end-of-text and what follows, up to the next one.
    """
    start = time.monotonic()
    topics = topics_of(loaded)
    length = min(length, loaded.config.block_size - 1)
    first_tokens = torch.full((texts, 1), loaded.eot, device=loaded.device)
    pairs = []
    on_topic = 0
    in_bag = 0
    for i, label in enumerate(progress(writers, f'topic, {loaded.name}, {control:g}')):
        torch.manual_seed(i)
        write = writers[label]
        with loaded.autocast():
            parts = [write(part, n=length) for part in first_tokens.split(TEXTS_AT_ONCE)]
        bag = bag_ids(loaded.encoding, BAGS[label])
        for ids in torch.cat(parts)[:, 1:].tolist():
            end = [*ids, loaded.eot].index(loaded.eot)
            pairs.append(([loaded.eot], ids[:end + 1]))
            text = loaded.encoding.decode(ids[:end])
            on_topic += has_topic(text, label, topics)
            in_bag += sum(v in bag for v in ids[:end])
    seconds = time.monotonic() - start
    scores = score(loaded, pairs, 'judging')
    row = {
        'strength or step': control,
        'texts': len(pairs),
        'on topic %': 100 * on_topic / len(pairs),
        'words of the bag %': 100 * in_bag / scores.n_tokens,
        'perplexity': scores.perplexity(),
        'seconds a text': seconds / len(pairs)}
    print(f'{loaded}:', row, flush=True)  # the whole table may take hours
    return row, pairs


def strength_writers(loaded: LoadedModel) -> list[Writers]:
    """List a Backpack's writers at each strength, from 0."""
    labels = topics_of(loaded)
    bags = [BAGS[label] for label in labels]
    scores = topic_scores(loaded.model, loaded.encoding, bags)  # (topics, V, k)
    generate = Cached(loaded.model).generate
    writers = []
    for factors in STRENGTHS:
        edits = [topic(loaded.model, of_bag, factors) for of_bag in scores]
        writers.append({label: partial(generate, edit=edit) for label, edit in zip(labels, edits)})
    return writers
