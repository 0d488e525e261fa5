"""Score the whole vocabulary, also for a bag of words such as a topic of Table 10."""

import re
from collections.abc import Callable

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.cli import progress
from rucksack.device import is_bfloat16_fast
from rucksack.errors import UserError
from rucksack.model import Backpack
from rucksack.senses import affinities
from rucksack.words import tokens_of, word_list

TOPIC_LABELS = """arts_culture business_entrepreneurs celebrity_pop_culture
    diaries_daily_life family fashion_style film_tv_video fitness_health food_dining gaming music
    news_social_concern other_hobbies relationships sports travel_adventure
    youth_student_life""".split()
# Table 10: label -> bag of words
BAGS = {label: label.removeprefix('other_').split('_') for label in TOPIC_LABELS}

IDS_AT_ONCE = 128  # in Eq. 17, 128 ids of Small have 103M logits


def parse_bag(text: str) -> list[str]:
    """Parse the words in "A, B", A B or @FILE, or take the words of a topic of Table 10."""
    if text.startswith('@'):
        return word_list(text)
    words = BAGS.get(text, re.findall(r'[^\s,+]+', text))
    if not words:
        raise UserError(f'{text!r} has no words; give some, as in music, guitar')
    return words


def bag_ids(encoding: Encoding, words: list[str]) -> list[int]:
    """Find the ids of a bag of words, each once; a word of several tokens gives all of them.

    The published code takes only a word's first token. Raises UserError for an unknown word.
    """
    ids = {i for word in words for i in tokens_of(encoding, word)}
    return sorted(ids)


def over_vocabulary(model: Backpack, score: Callable[..., Tensor], **options) -> Tensor:
    """Compute score(model, ids, **options) for all V ids, a slice (n,) at a time: (V, ..)."""
    ids = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (V,)
    slices = progress(ids.split(IDS_AT_ONCE), 'vocabulary')
    return torch.cat([score(model, some_ids, **options) for some_ids in slices])


def scores_of_bags(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Compute Eq. 17 for all ids, (bags, V, k); in bfloat16 for many ids, if that is fast."""
    device = model.wte.weight.device
    in_bfloat16 = model.config.n_vocab > 1 << 14 and is_bfloat16_fast(str(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
        scores = over_vocabulary(model, affinities, bags=bags)  # (V, k, bags)
    return scores.movedim(-1, 0).contiguous()  # (bags, V, k)


def topic_scores(model: Backpack, encoding: Encoding, bags: list[list[str]]) -> Tensor:
    """Compute Eq. 17 for topic edits, (bags, V, k).

    End-of-text has the score 0, as in the authors' code, so topics leave its senses alone.
    """
    scores = scores_of_bags(model, [bag_ids(encoding, bag) for bag in bags])
    scores[:, encoding.eot_token] = 0
    return scores
