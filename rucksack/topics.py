"""Table 12: topic control, beside PPLM on the Transformer."""

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import senses
from model import Backpack, Cache
from rucksack import toy
from rucksack.common import progress
from rucksack.grammar import bag_of_words
from rucksack.likelihood import perplexity, score
from rucksack.table import Subject, Table
from senses import STRENGTHS, TOPICS

# The topics of Table 10 with the words that the judge counts. Those of the toy world are among them.
KEYWORDS = toy.TOPICS | {label: words.split() for label, words in {
    'arts_culture': 'arts culture artist artists museum gallery painting paintings sculpture theatre poetry',
    'business_entrepreneurs': 'business entrepreneurs company companies market investors profit sales',
    'celebrity_pop_culture': 'celebrity pop culture celebrities actress fans stars fame gossip hollywood',
    'diaries_daily_life': 'diaries daily life diary morning today woke breakfast bed routine sleep evening',
    'family': 'family mother father parents children son daughter brother sister grandmother baby',
    'news_social_concern': 'news social concern government police minister law protest rights election war',
    'other_hobbies': 'hobbies hobby garden gardening photography knitting collecting fishing crafts puzzle',
    'relationships': 'relationships relationship love boyfriend girlfriend dating marriage partner couple',
    'youth_student_life': 'youth student life students school college university teacher campus exam',
}.items()}
AT_ONCE = 50  # texts that are generated together
# Of PPLM, by their names in its code
NUM_ITERATIONS, KL_SCALE, GAMMA, GM_SCALE, WINDOW_LENGTH = 3, 0.01, 1.5, 0.9, 5
PPLM_STEPS = {False: (0.01, 0.04, 0.05, 0.06, 0.07), True: (0.2, 0.3, 0.5)}  # the paper's; for the toy world


class PerturbedCache(Cache):
    """A cache of keys and values, past (layers, 2, n, heads, t, size), that lets gradients through."""

    def __init__(self, past: Tensor):
        self.length, self.past, self.longer = past.shape[4], past.flatten(0, 1), []

    def extend(self, name: object, new: Tensor, dim: int) -> Tensor:
        """As in Cache, called in the order of the layers: (n, heads, 1, size) -> (n, heads, t + 1, size)."""
        self.longer.append(torch.cat([self.past[len(self.longer)], new], dim))
        return self.longer[-1]


def read_on(model: Backpack, token: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """A Transformer reads one more token (n,) of n texts, after t tokens whose keys and values are past
    (layers, 2, n, heads, t, size): logits (n, V), and past with those of t + 1 tokens.
    """
    cache = PerturbedCache(past)
    logits = model(token[:, None], cache=cache)[:, 0]  # (n, V)
    return logits[:, :model.config.n_vocab], torch.stack(cache.longer).unflatten(0, (-1, 2))


def steer(model: Backpack, token: Tensor, past: Tensor, bag: Tensor, plain: Tensor, step: float,
          norms: Tensor) -> Tensor:
    """The keys and values of n texts, moved against the gradient of a loss: the next token should be of the
    bag, its probabilities near the plain ones (n, V). As in the published code the first WINDOW_LENGTH
    positions move, and gradients are divided by the largest norm that any of the text had so far in their
    layer, which norms (layers, 1, n, 1, 1, 1) keeps.
    """
    delta, window = torch.zeros_like(past), torch.arange(past.shape[4], device=past.device) < WINDOW_LENGTH
    for _ in range(NUM_ITERATIONS):
        delta.requires_grad_()
        probs = read_on(model, token, past + delta)[0].softmax(-1).clamp(min=1e-20)  # (n, V)
        away = (probs * (probs / plain).log()).sum(-1)  # Kullback and Leibler's divergence, (n,)
        loss = KL_SCALE * away - probs[:, bag].sum(-1).log()  # (n,)
        gradient = torch.autograd.grad(loss.sum(), delta)[0] * window[:, None]  # as past
        torch.maximum(norms, gradient.square().sum((1, 3, 4, 5), keepdim=True).sqrt(), out=norms)
        delta = (delta - step * gradient / norms ** GAMMA).detach()
    return past + delta


def pplm(model: Backpack, idx: Tensor, bag: list[int], step: float, length: int) -> Tensor:
    """Texts idx (n, 1) continued to (n, 1 + length) by a Transformer under plug-and-play control (PPLM,
    Dathathri et al. 2020): before every token the keys and values of the text so far are steered, for good;
    the token is drawn from steered^0.9 * plain^0.1. Step 0 is no control.
    """
    c, bag = model.config, torch.tensor(bag, device=idx.device)
    past = torch.zeros(c.n_layer, 2, len(idx), c.n_head, 0, c.n_embd // c.n_head, device=idx.device)
    untouched, norms = past, torch.full((c.n_layer, 1, len(idx), 1, 1, 1), 1e-15, device=idx.device)
    for t in range(length):
        with torch.no_grad():
            logits, untouched = read_on(model, idx[:, -1], untouched)
        plain = logits.softmax(-1).clamp(min=1e-20)  # (n, V)
        if t and step:
            past = steer(model, idx[:, -1], past, bag, plain, step, norms)
        with torch.no_grad():
            logits, past = read_on(model, idx[:, -1], past)
        probs = logits.softmax(-1) ** GM_SCALE * plain ** (1 - GM_SCALE)
        idx = torch.cat([idx, torch.multinomial(probs, 1)], dim=1)  # (n, t + 2)
    return idx


def judge(words: list[str], topics: dict[str, list[str]]) -> str | None:
    """The topic that has more of the words of a text than any other; None where there is none."""
    counts = Counter({label: sum(word in own for word in words) for label, own in topics.items()})
    (label, most), (_, second) = counts.most_common(2)
    return label if most > second else None


def read_texts(subject: Subject, idx: Tensor, label: str, topics: dict[str, list[str]]
               ) -> tuple[Counter, str | None]:
    """What texts idx (n, 1 + length), each up to its end-of-text, have of the topic that they should have,
    and the first text that has it.
    """
    eot, found, first = subject.eot, Counter(texts=len(idx)), None
    rows = [row[1:row.index(eot, 1) + 1] if eot in row[1:] else row[1:] for row in idx.tolist()]
    for row in rows:
        text = subject.encoding.decode([token for token in row if token != eot], errors='replace')
        words = re.findall('[a-z]+', text.lower())
        right = judge(words, topics) == label
        first = text if right and first is None else first
        found.update(right=right, tokens=len(row))
    found['logp'] = score(subject, [([eot], row) for row in rows], 'judging')[0].sum().item()
    return found, first


def topic_row(subject: Subject, name: str, generate: dict[str, Callable[[Tensor], Tensor]], length: int,
              args: argparse.Namespace) -> tuple[list, list[str]]:
    """A row of the table: texts on each topic, which a function generates from their first tokens (n, 1); and
    lines with the first text that has its topic (Tables 16-18).
    """
    topics, found, lines = toy.TOPICS if subject.is_toy else KEYWORDS, Counter(), []
    for i, label in enumerate(progress(generate, f'{subject}{name}')):
        torch.manual_seed(args.seed + i)
        began, start = time.perf_counter(), torch.full((args.texts, 1), subject.eot, device=subject.device)
        with subject.autocast():
            idx = torch.cat([generate[label](part) for part in start.split(AT_ONCE)]).cpu()
        found['seconds'] += time.perf_counter() - began
        its, first = read_texts(subject, idx, label, topics)
        found.update(its)
        lines.append(f'{label}{name}: {"none has it" if first is None else first}')
    right = found['right'] / found['texts']
    return [f'{subject}{name}', 100 * right, 100 * (right * (1 - right) / found['texts']) ** 0.5,
            perplexity(torch.tensor(found['logp'], dtype=torch.float64), found['tokens']),
            1000 * found['seconds'] / (found['texts'] * length)], lines


def topic_table(subjects: list[Subject], args: argparse.Namespace) -> Table:
    """Table 12: how often a text has the topic it should have, and how good a text it still is."""
    own, topics, rows = subjects[0], toy.TOPICS if subjects[0].is_toy else TOPICS, []
    bags = {label: bag_of_words(own.encoding, TOPICS[label]) for label in topics}
    scores = senses.affinities(own.model, list(bags.values()))  # (bags, V, k)
    length = min(args.length, *(s.model.config.block_size - 1 for s in subjects))
    for strength, weights in enumerate(STRENGTHS):
        edits = [senses.topic(own.model, s, weights) if strength else None for s in scores]
        generate = {label: partial(own.model.generate, n=length, edit=e) for label, e in zip(bags, edits)}
        row, firsts = topic_row(own, f', strength {strength}', generate, length, args)
        rows.append(row)
    alone = {label: [i for word in TOPICS[label] if len(ids := own.encode(f' {word}')) == 1 for i in ids]
             for label in topics}  # PPLM's bags: words of one piece
    for s in subjects[1:]:
        for step in (0.0, *(args.step_sizes or PPLM_STEPS[own.is_toy])):
            generate = {label: partial(pplm, s.model, bag=bag or bags[label], step=step, length=length)
                        for label, bag in alone.items()}
            row, lines = topic_row(s, f', PPLM {step:g}', generate, length, args)
            rows.append(row)
        firsts += lines
    rule = 'the words of this world' if own.is_toy else 'lists of words (the paper: a RoBERTa classifier)'
    return Table(f'Topic control (Table 12): {len(bags)} topics, {args.texts} texts of up to {length} tokens '
                 'on each', {'': '', 'topic right %': '.1f', '+-': '.1f', 'perplexity': '.2f',
                             's per 1,000 tokens': '.2f'}, rows, [
        f'Right: more words of the topic asked for than of any other, by {rule}; +- is a standard',
        'error. The perplexity of a text is that under the same model without control. '
        f'{min(args.texts, AT_ONCE)} texts are generated at a time.',
        'The first text that has its topic (Tables 16-18):', *firsts])
