"""Find what examples are about, and the prompts around them that an edit should leave alone.

Model editing has three measures (ROME, https://arxiv.org/abs/2202.05262, and MEMIT,
https://arxiv.org/abs/2210.07229): efficacy, whether an example is fulfilled; generalization,
whether its wish holds in other phrasings; and specificity, whether its neighbours stay as they
were. A neighbour has one word of the example's prompt replaced by a word that the model itself
would write there: the subject, or another word, so that the relation is another. Or it begins a
text that the model writes about the subject.
"""

import random
import re
from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter
from os.path import commonprefix
from statistics import mode

import torch
from torch import Tensor

from rucksack.cli import HOME, progress
from rucksack.edits.examples import Example
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.loaded import LoadedModel
from rucksack.model import Backpack
from rucksack.paper.likelihood import Pair, score, windows
from rucksack.paper.loss import held_out
from rucksack.senses import next_word_probs, occurrences
from rucksack.toy import toy_stories
from rucksack.words import WITHOUT_SPACES, token_texts

BACKGROUND = 'docs/tour.txt'  # no bundled model was trained on it
TEXT_LENGTH = 128     # tokens per background text
MOST_TEXTS = 400
WRITTEN = 32          # texts that the model writes
WRITTEN_LENGTH = 128  # tokens in each
USUAL_TEXTS = 16      # background texts that tell which words are rare
COMMON = 6.5          # a word with less information, in nats, is a function word
RARE = 9.0            # a noun has at least this, unless it is a name
REPLACEMENTS = 8      # for a word
TRIED = 32            # candidates for these
CONTINUED = 8         # texts about a subject, and the tokens of the longest

# -----------------------------------------------------------------------------
# Other text.


def read_background(path: str | None, loaded: LoadedModel) -> list[Pair]:
    """Split the background into texts of up to TEXT_LENGTH tokens, after the token before each."""
    if path is None and loaded.is_toy:
        stories = [story for story, _ in toy_stories(seed=1, n=200)]
        ids = loaded.encode('\n'.join(stories))
    else:
        ids, _ = held_out(loaded, path or str(HOME / BACKGROUND))
    pairs = windows(ids, loaded.eot, min(TEXT_LENGTH, loaded.config.block_size))
    if len(pairs) < 2:
        raise UserError(f'{path} has only {len(ids)} tokens; give a longer background')
    return pairs[::ceil(len(pairs) / MOST_TEXTS)]  # spread over a long file


@torch.no_grad()
def write_texts(model: Backpack, examples: list[Example], eot: int, seed: int = 0
                ) -> list[Pair]:
    """Have the model write texts that begin like examples: pairs (start, rest) of ids.

    A start is three consecutive tokens of an example, with two end-of-texts (eot) before it. The
    rest ends at any whole prompt, because the prediction there is meant to change.
    """
    n = min(WRITTEN_LENGTH, model.config.block_size // 2)
    starts = []
    for one in examples:
        ids = [eot, eot, *one.prompt, *one.a]
        starts += zip(ids, ids[1:], ids[2:])
    starts = random.Random(seed).choices(starts, k=WRITTEN)
    idx = torch.tensor(starts, device=model.wte.weight.device)  # (WRITTEN, 3)
    torch.manual_seed(seed)
    texts = Cached(model).generate(idx, n).tolist()
    prompts = [replace(one, subject=tuple(one.prompt)) for one in examples]
    pairs = [(ids[:3], ids[3:]) for ids in texts]
    return cut(pairs, prompts)[0]


def cut(texts: list[Pair], examples: list[Example]) -> list[list[Pair]]:
    """Split texts: what stands before the first subject of an example, and what follows one."""
    subjects = [one.subject for one in examples if one.subject]
    before = []
    after = []
    for context, rest in texts:
        ids = context + rest
        is_end = occurrences(torch.tensor([ids]), subjects).flatten()  # (T,)
        n = len(context)
        while n < len(ids) and not is_end[:n].any():
            n += 1
        before.append((context, ids[len(context):n]))
        after.append((ids[:n], ids[n:]))
    return [[pair for pair in part if pair[1]] for part in (before, after)]


# -----------------------------------------------------------------------------
# What an example is about.


@dataclass(frozen=True)
class Word:
    """A word of a prompt."""

    place: slice  # of the prompt's ids
    text: str
    nats: float    # its information: how rare it is
    is_name: bool  # whether it has a capital letter, and is not the first word


@torch.no_grad()
def usual_nats(loaded: LoadedModel, background: list[Pair]) -> Tensor:
    """Compute -ln of the mean p of each id (V,) over the positions of some background texts."""
    means = []
    for context, rest in background[:USUAL_TEXTS]:
        idx = torch.tensor([context + rest[:-1]], device=loaded.device)  # (1, T)
        logits = loaded.model(idx)[0, :, :loaded.config.n_vocab]  # (T, V)
        means.append(logits.softmax(-1).mean(0))
    return -torch.stack(means).mean(0).log()


def read_words(loaded: LoadedModel, ids: list[int], usual: Tensor) -> list[Word]:
    """Split a text into words: a letter continues one, except in scripts without spaces.

    The information of a word is -ln p of its first token in any text (usual, (V,)), and of its
    other tokens in this one.
    """
    encoding = loaded.encoding
    starts = [
        i
        for i, text in enumerate(token_texts(encoding, ids))
        if i == 0 or not text[0].isalpha() or re.match(WITHOUT_SPACES, text)]
    ends = [*starts[1:], len(ids)]
    first = usual[ids]  # (T,)
    word = encoding.decode(ids[:ends[0]]).strip().lower()
    inside = loaded.encode(f' {word}')  # usually it has a small letter, and a space before it
    if len(inside) == 1:
        first[0] = usual[inside]
    pair = (ids[:1], [*ids[1:], loaded.eot])
    rest = score(loaded, [pair], 'words').nats[0]  # (T,), of the next
    words = []
    for i, j in zip(starts, ends):
        text = encoding.decode(ids[i:j])
        nats = first[i] + rest[i:j - 1].sum()
        is_name = i > 0 and text.strip()[:1].isupper()
        words.append(Word(slice(i, j), text, nats.item(), is_name))
    return words


def different(words: list[str], other: list[str]) -> tuple[int, int] | None:
    """Find the one stretch in which words differ from others, if it is shorter than the rest."""
    start = len(commonprefix([words, other]))
    n_same = start + len(commonprefix([words[::-1], other[::-1]]))
    lengths = [len(words), len(other)]
    if max(lengths) / 2 < n_same < min(lengths):
        return start, start + len(words) - n_same
    return None


def find_subject(words: list[Word], prompts: list[list[str]]) -> slice:
    """Find the subject of a prompt that marks none, slice(0) if it has none.

    It is the words in which prompts (the texts of their words) of one form differ or, in a prompt
    with a form of its own, the rarest name (a word with a capital letter that is not the first
    one) or the rarest word. A rarest word with less information than RARE is no subject.
    """
    texts = [word.text for word in words]
    found = [different(texts, other) for other in prompts]
    if any(found):
        first, end = mode(filter(None, found))
        return slice(
            words[first].place.start,
            words[end - 1].place.stop)
    rarest = max(words, key=attrgetter('is_name', 'nats'))
    if rarest.is_name or rarest.nats >= RARE:
        return rarest.place
    return slice(0)


def matched(others: list[Example], examples: list[Example]) -> list[Example]:
    """Give each of the others the subject of an example that stands in its prompt, if any does."""
    subjects = [one.subject for one in examples if one.subject]
    found = []
    for one in others:
        idx = torch.tensor([one.prompt])
        subject = ()
        for ids in subjects:
            if occurrences(idx, [ids]).any():
                subject = ids
        found.append(replace(one, subject=subject, measure='generalization'))
    return found


# -----------------------------------------------------------------------------
# Neighbours.


def replacements(loaded: LoadedModel, one: Example, place: slice, kind: str) -> list[Example]:
    """Make neighbours of an example: replace a word by the REPLACEMENTS likeliest tokens there.

    The TRIED likeliest next tokens are tried, and ranked by the probability of the text.
    """
    encoding = loaded.encoding
    old = encoding.decode(one.prompt[place])
    before = one.prompt[:place.start]
    context = [loaded.eot, *before]
    idx = torch.tensor([context], device=loaded.device)  # (1, T)
    probs = next_word_probs(loaded.model, idx)[0]  # (V,)
    tried = []
    for i in probs.argsort(descending=True).tolist():
        new = encoding.decode([i])
        is_word = new.strip().isalpha() and new[0].isspace() == old[0].isspace()
        if is_word and new != old:
            tried.append((context, [i, *one.prompt[place.stop:]]))
    tried = tried[:TRIED]
    logp = score(loaded, tried, 'neighbours').logp
    best = logp.argsort(descending=True)[:REPLACEMENTS]
    return [
        neighbour(loaded, one, before + tried[i][1], kind)
        for i in best]


def neighbour(loaded: LoadedModel, one: Example, prompt: list[int], kind: str) -> Example:
    """Make a neighbour of an example, with another prompt."""
    line = repr(loaded.encoding.decode(prompt))
    return replace(
        one,
        line=line,
        prompt=prompt,
        a=one.a[:1],
        b=[],
        wish='more',
        subject=(),
        measure='specificity',
        kind=kind)


def write_about(loaded: LoadedModel, examples: list[Example], seed: int = 0) -> list[Example]:
    """Have the model continue each subject CONTINUED times, by 1 token, by 2, and so on.

    Neighbours with a replaced word have an example's form, and understate what an edit does in
    other texts. These do not, and none of them is held: they are only counted.
    """
    torch.manual_seed(seed)
    generate = Cached(loaded.model).generate
    found = []
    for one in filter(attrgetter('subject'), examples):
        start = [loaded.eot, *one.subject]
        idx = torch.tensor([start] * CONTINUED, device=loaded.device)  # (CONTINUED, T)
        texts = generate(idx, CONTINUED).tolist()
        for n, ids in enumerate(texts, 1):
            prompt = ids[1:len(start) + n]
            if loaded.eot not in prompt:
                found.append(neighbour(loaded, one, prompt, 'same subject, other texts'))
    return found


def neighbours_of(loaded: LoadedModel, examples: list[Example], background: list[Pair]
                  ) -> tuple[list[Example], list[Example]]:
    """Give examples their subjects, and find their neighbours.

    The subject of each example is replaced, and its other words, except function words. Without a
    subject, each such word is replaced. Every second one of a kind is for counting only.
    """
    usual = usual_nats(loaded, background)
    prompts = [one.prompt for one in examples]
    words = [read_words(loaded, ids, usual) for ids in prompts]
    texts = [[word.text for word in its_words] for its_words in words]
    with_subjects = []
    near = []
    for one, its_words in zip(progress(examples, 'neighbours'), words):
        ids = one.prompt
        if one.subject is None:
            place = find_subject(its_words, texts)
            one = replace(one, subject=tuple(ids[place]))
        with_subjects.append(one)
        n = len(one.subject)
        stretches = [tuple(ids[i:i + n]) for i in range(len(ids))]
        start = stretches.index(one.subject)
        others = [
            word for word in its_words
            if not start <= word.place.start < start + n]
        telling = [
            word for word in others
            if word.place.start > 0 and word.nats > COMMON]
        kind = 'same subject' if n else 'another word'
        for word in telling or others:
            near += replacements(loaded, one, word.place, kind)
        if n:
            near += replacements(loaded, one, slice(start, start + n), 'another subject')
    return with_subjects, [one for one in near if one.prompt not in prompts]
