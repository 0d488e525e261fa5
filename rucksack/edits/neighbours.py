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
    texts = Cached(model).generate(idx, n).tolist()
    prompts = [replace(one, subject=tuple(one.prompt)) for one in examples]
    before, _ = cut([(ids[:3], ids[3:]) for ids in texts], prompts)
    return before


def cut(texts: list[Pair], examples: list[Example]) -> tuple[list[Pair], list[Pair]]:
    """Split texts: what stands before the first subject of an example, and what follows one."""
    subjects = [one.subject for one in examples if one.subject]
    before = []
    after = []
    for context, rest in texts:
        ids = context + rest
        is_end = occurrences(torch.tensor([ids]), subjects).flatten()  # (T,)
        ends = is_end.nonzero().flatten().tolist()
        n = len(ids)
        if ends:
            n = max(ends[0] + 1, len(context))
        before.append((context, ids[len(context):n]))
        after.append((ids[:n], ids[n:]))
    before = [pair for pair in before if pair[1]]
    after = [pair for pair in after if pair[1]]
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
        logits = loaded.model(idx)[0, :, :loaded.config.n_vocab]  # (T, V)
        means.append(logits.softmax(-1).mean(0))
    return torch.stack(means).mean(0).log()


def information(loaded: LoadedModel, ids: list[int], usual: Tensor) -> dict[Span, float]:
    """Measure the information of each word of a text, in nats: how rare it is.

    It is -ln p of the first token in any text (usual, (V,)), and of its other tokens in this one.
    """
    found = {}
    for start, end in words_of(loaded.encoding, ids):
        first = ids[start]
        if start == 0:  # usually this word has a small letter, and a space before it
            word = loaded.encoding.decode(ids[:end]).strip().lower()
            inside = loaded.encode(f' {word}')
            if len(inside) == 1:
                first = inside[0]
        found[start, end] = -usual[first].item()
        if end > start + 1:
            rest = score(loaded, [(ids[:start + 1], ids[start + 1:end])], 'words')
            found[start, end] -= rest.logp.item()
    return found


def different(words: list, other: list) -> Span | None:
    """Find the one stretch in which words differ from others, if it is shorter than the rest."""
    start = len(commonprefix([words, other]))
    rest = [words[start:][::-1], other[start:][::-1]]
    n_last = len(commonprefix(rest))
    lengths = [len(part) - n_last for part in rest]
    if 0 < min(lengths) and max(lengths) < start + n_last:
        return start, start + lengths[0]
    return None


def find_subject(ids: list[int], prompts: list[list[int]], known: dict[Span, float],
                 encoding: Encoding) -> Span:
    """Find the subject of a prompt that marks none, (0, 0) if it has none.

    It is the words in which prompts of one form differ or, in a prompt with a form of its own, the
    rarest name (a word with a capital letter that is not the first one) or the rarest word. A
    rarest word with less information (known) than RARE is no subject.
    """
    def words(ids: list[int]) -> list[str]:
        return [encoding.decode(ids[i:j]) for i, j in words_of(encoding, ids)]

    spans = list(known)
    stretches = Counter(different(words(ids), words(other)) for other in prompts)
    del stretches[None]
    if stretches:
        first, end = max(stretches, key=stretches.get)
        return spans[first][0], spans[end - 1][1]
    names = []
    for span, word in zip(spans, words(ids)):
        if span != spans[0] and word.strip()[:1].isupper():
            names.append(span)
    rarest = max(names or spans, key=known.get)
    if names or known[rarest] >= RARE:
        return rarest
    return 0, 0


def matched(others: list[Example], examples: list[Example]) -> list[Example]:
    """Give each of the others the subject of an example that stands in its prompt, if any does."""
    found = []
    for one in others:
        idx = torch.tensor([one.prompt])
        subject = ()
        for other in examples:
            if other.subject and occurrences(idx, [other.subject]).any():
                subject = other.subject
        found.append(replace(one, subject=subject))
    return found


# -----------------------------------------------------------------------------
# Neighbours.


def replacements(loaded: LoadedModel, ids: list[int], span: Span) -> list[list[int]]:
    """Replace a word of a text by REPLACEMENTS tokens that the model finds likeliest there.

    The TRIED likeliest next tokens are tried, and ranked by the probability of the text.
    """
    start, end = span
    old = loaded.encoding.decode(ids[start:end])
    context = [loaded.eot, *ids[:start]]
    idx = torch.tensor([context], device=loaded.device)  # (1, T)
    probs = next_word_probs(loaded.model, idx)[0]  # (V,)
    tried = []
    for i in probs.argsort(descending=True).tolist():
        new = loaded.encoding.decode([i])
        is_word = new.strip().isalpha() and new[0].isspace() == old[0].isspace()
        if is_word and new != old:
            tried.append([i, *ids[end:]])
    tried = tried[:TRIED]
    pairs = [(context, rest) for rest in tried]
    logp = score(loaded, pairs, 'neighbours').logp
    best = logp.argsort(descending=True)[:REPLACEMENTS]
    return [ids[:start] + tried[i] for i in best]


def neighbours_of(loaded: LoadedModel, examples: list[Example], background: list[Pair]
                  ) -> tuple[list[Example], list[Neighbour]]:
    """Give examples their subjects, and find their neighbours.

    The subject of each example is replaced, and its other words, except function words. Without a
    subject, each such word is replaced. Every second one of a kind is for counting only.
    """
    usual = usual_logp(loaded, background)
    prompts = [one.prompt for one in examples]
    with_subjects = []
    found = []
    for one in progress(examples, 'neighbours'):
        ids = one.prompt
        known = information(loaded, ids, usual)
        subject = one.subject
        if subject is None:
            start, end = find_subject(ids, prompts, known, loaded.encoding)
            subject = tuple(ids[start:end])
        one = replace(one, subject=subject)
        with_subjects.append(one)
        n = len(subject)
        spans = [tuple(ids[i:i + n]) for i in range(len(ids))]
        start = spans.index(subject)
        others = [(i, j) for i, j in known if not start <= i < start + n]
        telling = [span for span in others if span[0] > 0 and known[span] > COMMON]
        kinds = dict.fromkeys(telling or others, 'another word')
        if n:
            kinds = dict.fromkeys(kinds, 'same subject')
            kinds[start, start + n] = 'another subject'
        for span, kind in kinds.items():
            for new in replacements(loaded, ids, span):
                if new not in prompts:
                    found.append(Neighbour(kind, new, one))
    return with_subjects, found
