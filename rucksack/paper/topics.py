"""Table 12: topic control, compared with PPLM on the Transformer."""

import re
import time
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
from rucksack.senses import STRENGTHS, topic
from rucksack.vocabulary import BAGS, bag_ids, topic_scores

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
    V = model.config.n_vocab
    logits = F.linear(h[:, 0], model.wte.weight[:V])  # (n, V)
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
        log_ratio = (probs / plain).log()
        divergence = (probs * log_ratio).sum(-1)  # (n,), Kullback-Leibler
        p_bag = probs[:, bag].sum(-1)  # (n,)
        loss = KL_SCALE * divergence - p_bag.log()
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
        steered = logits.softmax(-1)
        probs = steered ** GM_SCALE * plain ** (1 - GM_SCALE)
        drawn = torch.multinomial(probs, 1)  # (B, 1)
        idx = torch.cat([idx, drawn], dim=1)  # one token longer
    return idx


# -----------------------------------------------------------------------------
# The table.


def has_topic(text: str, label: str, topics: dict[str, list[str]]) -> bool:
    """Tell whether a text has more words of the topic called label than of any other topic."""
    words = re.findall('[a-z]+', text.lower())
    counts = {name: sum(word in topics[name] for word in words) for name in topics}
    own = counts.pop(label)
    return own > max(counts.values())


def writer_of(loaded: LoadedModel, words: list[str], scores: Tensor | None, control: float
              ) -> Callable:
    """Make a function that continues first tokens (B, 1) by n tokens on a topic: (B, 1 + n).

    control is the strength for a Backpack, whose senses have scores (V, k), or a step of PPLM.
    """
    if loaded.config.n_sense:
        edit = topic(loaded.model, scores, STRENGTHS[control])
        return partial(Cached(loaded.model).generate, edit=edit)
    bag = bag_ids(loaded.encoding, loaded.single_tokens(words) or words)
    return partial(pplm, loaded.model, bag=bag, step=control)


def topic_rows(loaded: LoadedModel, texts: int, length: int, step_sizes: list[float] | None
               ) -> list[dict]:
    """Topic control (Table 12): a Backpack at four strengths, a Transformer at steps of PPLM.

    On topic: a text has more words of its topic than of any other, by word lists (the paper uses a
    RoBERTa classifier). Words of the bag: the share of tokens that are in the topic's bag of words
    (Table 10). Perplexity is measured with the same model without control.
    """
    topics = TOPICS
    steps = STEP_SIZES
    if loaded.is_toy:
        topics = toy.TOPICS
        steps = TOY_STEP_SIZES
    controls = [0.0, *(step_sizes or steps)]
    scores = [None] * len(topics)
    if loaded.config.n_sense:
        controls = range(len(STRENGTHS))
        bags = [BAGS[label] for label in topics]
        scores = topic_scores(loaded.model, loaded.encoding, bags)  # (topics, V, k)
    length = min(length, loaded.config.block_size - 1)
    first_tokens = torch.full((texts, 1), loaded.eot, device=loaded.device)
    rows = []
    for control in controls:
        start = time.monotonic()
        pairs = []
        on_topic = in_bag = 0
        for i, label in enumerate(progress(topics, f'topic, {loaded.name}, {control:g}')):
            torch.manual_seed(i)
            write = writer_of(loaded, BAGS[label], scores[i], control)
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
        logp = score(loaded, pairs, 'judging').logp
        n_tokens = sum(len(ids) for _, ids in pairs)
        rows.append({
            'strength or step': control,
            'texts': len(pairs),
            'on topic %': 100 * on_topic / len(pairs),
            'words of the bag %': 100 * in_bag / n_tokens,
            'perplexity': perplexity(logp, n_tokens),
            'seconds a text': seconds / len(pairs)})
        print(f'{loaded}:', rows[-1], flush=True)  # the whole table may take hours
    return rows
