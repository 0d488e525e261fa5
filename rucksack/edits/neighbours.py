"""Find what examples are about, and the prompts around them that an edit should leave alone.

Model editing has three measures (ROME, https://arxiv.org/abs/2202.05262, and MEMIT,
https://arxiv.org/abs/2210.07229): efficacy, whether an example is fulfilled; generalization,
whether its wish holds in other phrasings; and specificity, whether its neighbours stay as they
were. A neighbour has one word of the example's prompt replaced by a word that the model itself
would write there: the subject, or another word, so that the relation is another.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from os.path import commonprefix

import torch
from tiktoken import Encoding
from torch import Tensor
from torch.nn import functional as F

from rucksack.cli import HOME, progress
from rucksack.edits.examples import Example
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.loaded import LoadedModel
from rucksack.model import Backpack
from rucksack.paper.likelihood import Pair, windows
from rucksack.paper.loss import held_out
from rucksack.senses import occurrences
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

Span = tuple[int, int]  # where a word starts in a list of ids, and where it ends


@dataclass(frozen=True)
class Neighbour:
    """A prompt that differs from an example's in one word, and should keep its prediction."""

    kind: str
    prompt: list[int]
    example: Example

    @property
    def pair(self) -> Pair:
        """Give the prompt, and the first token of the example's A, which should not rise."""
        return self.prompt, self.example.a[:1]


# -----------------------------------------------------------------------------
# Other text.


def read_background(path: str | None, loaded: LoadedModel) -> list[Pair]:
    """Split the background into texts of up to TEXT_LENGTH tokens, after the token before each."""
    if path is None and loaded.is_toy:
        ids = loaded.encode('\n'.join(story for story, _ in toy_stories(seed=1, n=200)))
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
        starts += [ids[i:i + 3] for i in range(len(ids) - 2)]
    starts = random.Random(seed).choices(starts, k=WRITTEN)
    idx = torch.tensor(starts, device=model.wte.weight.device)  # (WRITTEN, 3)
    torch.manual_seed(seed)
    idx = Cached(model).generate(idx, n)  # (WRITTEN, 3 + n)
    prompts = [tuple(one.prompt) for one in examples]
    is_end = occurrences(idx, prompts)[:, 2:, 0, 0]  # (WRITTEN, 1 + n), from the end of a start
    n_held = (is_end.cumsum(1) == 0).sum(1)  # (WRITTEN,), up to the first end of a prompt
    texts = []
    for ids, n in zip(idx.tolist(), n_held.tolist()):
        if n > 0:
            start = ids[:3]
            texts.append((start, ids[3:3 + n]))
    return texts


def cut(texts: list[Pair], examples: list[Example]) -> tuple[list[Pair], list[Pair]]:
    """Split texts: what stands before the first subject of an example, and what follows one."""
    subjects = [one.subject for one in examples if one.subject]
    before = []
    after = []
    for context, rest in texts:
        ids = context + rest
        is_end = occurrences(torch.tensor([ids]), subjects).flatten()
        n = len(ids)
        if is_end.any():
            n = is_end.tolist().index(True) + 1
        n = max(n, len(context))
        if n > len(context):
            before.append((context, ids[len(context):n]))
        if n < len(ids):
            after.append((ids[:n], ids[n:]))
    return before, after


# -----------------------------------------------------------------------------
# What an example is about.


def words_of(encoding: Encoding, ids: list[int]) -> list[Span]:
    """Split a text into words: a letter continues one, except in scripts without spaces."""
    texts = token_texts(encoding, ids)
    starts = [i for i, text in enumerate(texts)
              if i == 0 or not text[0].isalpha() or re.match(WITHOUT_SPACES, text)]
    return list(zip(starts, [*starts[1:], len(ids)]))


@torch.no_grad()
def usual_logp(loaded: LoadedModel, background: list[Pair]) -> Tensor:
    """Compute ln of the mean p of each id (V,) over the positions of some background texts."""
    means = []
    for context, rest in background[:USUAL_TEXTS]:
        idx = torch.tensor([(context + rest)[:-1]], device=loaded.device)
        logits = loaded.model(idx)[0, :, :loaded.config.n_vocab]
        means.append(logits.softmax(-1).mean(0))
    return torch.stack(means).mean(0).log()


@torch.no_grad()
def information(loaded: LoadedModel, ids: list[int], usual: Tensor) -> dict[Span, float]:
    """Measure the information of each word of a text, in nats: how rare it is.

    It is -ln p of the first token in any text (usual, (V,)), and of its other tokens in this one.
    """
    idx = torch.tensor([ids], device=loaded.device)
    logp = loaded.model(idx)[0, :, :loaded.config.n_vocab].log_softmax(-1)
    found = {}
    for start, end in words_of(loaded.encoding, ids):
        nats = -usual[ids[start]]
        if start == 0:  # usually this word has a small letter, and a space before it
            word = loaded.encoding.decode(ids[:end]).strip().lower()
            inside = loaded.encoding.encode_ordinary(f' {word}')
            nats = -usual[inside[0]] if len(inside) == 1 else nats
        for i in range(start + 1, end):
            nats = nats - logp[i - 1, ids[i]]
        found[start, end] = nats.item()
    return found


def different(words: list, other: list) -> Span | None:
    """Find the one stretch in which words differ from others, if it is shorter than the rest."""
    start = len(commonprefix([words, other]))
    n_last = len(commonprefix([words[start:][::-1], other[start:][::-1]]))
    longest = max(len(words), len(other)) - start - n_last
    shortest = min(len(words), len(other)) - start - n_last
    return (start, len(words) - n_last) if start + n_last > longest and shortest > 0 else None


def find_subjects(loaded: LoadedModel, examples: list[Example], usual: Tensor) -> list[Example]:
    """Find the subjects of examples that mark none.

    They are the words in which prompts of one form differ or, in a prompt with a form of its own,
    the rarest name (a word with a capital letter that is not the first one) or the rarest word. A
    rarest word with less information than RARE is no subject.
    """
    spans = [words_of(loaded.encoding, one.prompt) for one in examples]
    words = [[tuple(one.prompt[i:j]) for i, j in of_one] for one, of_one in zip(examples, spans)]
    found = []
    for n, one in enumerate(examples):
        stretches = Counter(different(words[n], other) for other in words)
        del stretches[None]
        if one.subject is not None:
            found.append(one)
            continue
        if stretches:
            first, last = stretches.most_common(1)[0][0]
            span = spans[n][first][0], spans[n][last - 1][1]
        else:
            known = information(loaded, one.prompt, usual)
            names = [(i, j) for i, j in known
                     if i > 0 and loaded.encoding.decode(one.prompt[i:j]).strip()[:1].isupper()]
            span = max(names or known, key=known.get)
            if not names and known[span] < RARE:
                span = (0, 0)
        found.append(replace(one, subject=tuple(one.prompt[slice(*span)])))
    return found


def matched(others: list[Example], examples: list[Example]) -> list[Example]:
    """Give each of the others the subject of an example that stands in its prompt, if any does."""
    found = []
    for one in others:
        idx = torch.tensor([one.prompt])
        subjects = [other.subject for other in examples
                    if other.subject and occurrences(idx, [other.subject]).any()]
        found.append(replace(one, subject=subjects[0] if subjects else ()))
    return found


# -----------------------------------------------------------------------------
# Neighbours.


@torch.no_grad()
def replacements(loaded: LoadedModel, ids: list[int], span: Span) -> list[list[int]]:
    """Replace a word of a text by REPLACEMENTS tokens that the model finds likeliest there.

    The TRIED likeliest next tokens are tried, and ranked by the probability of the text.
    """
    V = loaded.config.n_vocab
    start, end = span
    old = loaded.encoding.decode(ids[start:end])
    idx = torch.tensor([[loaded.eot, *ids]], device=loaded.device)
    logits = loaded.model(idx[:, :start + 1])[0, -1, :V]
    texts = []
    for i in logits.argsort(descending=True).tolist():
        new = loaded.encoding.decode([i])
        is_word = new.strip().isalpha() and new[0].isspace() == old[0].isspace()
        if is_word and new != old and len(texts) < TRIED:
            texts.append([*ids[:start], i, *ids[end:]])
    idx = torch.tensor([[loaded.eot, *one] for one in texts], device=loaded.device)  # (TRIED, T)
    logits = loaded.model(idx[:, :-1])[:, start:, :V]
    nats = F.cross_entropy(logits.mT, idx[:, start + 1:], reduction='none').sum(1)  # (TRIED,)
    return [texts[i] for i in nats.argsort()[:REPLACEMENTS].tolist()]


def find_neighbours(loaded: LoadedModel, examples: list[Example], usual: Tensor
                    ) -> list[Neighbour]:
    """Replace the subject of each example, and its other words, except function words.

    Without a subject, each such word is replaced. Every second one of a kind is for counting only.
    """
    prompts = [one.prompt for one in examples]
    found = []
    for one in progress(examples, 'neighbours'):
        known = information(loaded, one.prompt, usual)
        n = len(one.subject or ())
        places = [i for i in range(len(one.prompt)) if tuple(one.prompt[i:i + n]) == one.subject]
        span = (places[0], places[0] + n) if n else (0, 0)
        others = [(i, j) for i, j in known if not span[0] <= i < span[1]]
        telling = [(i, j) for i, j in others if i > 0 and known[i, j] > COMMON]
        kinds = [(other, 'same subject' if n else 'another word') for other in telling or others]
        if n:
            kinds.append((span, 'another subject'))
        for place, kind in kinds:
            found += [Neighbour(kind, ids, one) for ids in replacements(loaded, one.prompt, place)
                      if ids not in prompts]
    return found
