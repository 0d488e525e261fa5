"""Measure what control costs in quality (Figure 2), without MAUVE.

    python -m docs.dev.control 20 50 docs/dev/control.csv docs/control.svg

Each of the 17 topics gets 20 texts of up to 50 tokens at each strength of Table 11 (english) and at
each step of PPLM (english_gpt). A row has the share of texts on the topic, the share of tokens in
the topic's bag, and the perplexity of the texts under each model without control. The first text on
each topic is printed (Tables 16 to 18).
"""

import sys
from collections.abc import Callable
from functools import partial

import pandas
import torch

from rucksack.fast import Cached
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.likelihood import perplexity, score
from rucksack.paper.topics import TOPICS, has_topic, pplm
from rucksack.senses import STRENGTHS, topic
from rucksack.vocabulary import BAGS, bag_ids, topic_scores

STEPS = (0, 0.04, 0.07, 0.1, 0.2, 0.5, 1)


def writers(loaded: LoadedModel) -> dict[float, list[Callable]]:
    """Map a strength or step to a function for each topic: (first tokens (B, 1), n) -> texts."""
    model = loaded.model
    bags = list(BAGS.values())
    by_control = {}
    if loaded.config.n_sense:
        scores = topic_scores(model, loaded.encoding, bags)  # (topics, V, k)
        for strength, factors in enumerate(STRENGTHS):
            edits = [topic(model, of_bag, factors) for of_bag in scores]
            by_control[strength] = [partial(Cached(model).generate, edit=edit) for edit in edits]
        return by_control
    ids = [bag_ids(loaded.encoding, loaded.single_tokens(bag) or bag) for bag in bags]
    for step in STEPS:
        by_control[step] = [partial(pplm, model, bag=bag, step=step) for bag in ids]
    return by_control


def measure(write_topics: list[Callable], judges: list[LoadedModel], n_texts: int, length: int
            ) -> dict[str, float]:
    """Write texts on each topic, print the first that is on it, and measure all."""
    encoding = judges[0].encoding
    eot = encoding.eot_token
    first_tokens = torch.full((n_texts, 1), eot)
    pairs = []
    on_topic = 0
    in_bag = 0
    for i, (label, write) in enumerate(zip(BAGS, write_topics)):
        torch.manual_seed(i)
        bag = bag_ids(encoding, BAGS[label])
        successes = []
        for ids in write(first_tokens, n=length)[:, 1:].tolist():
            end = [*ids, eot].index(eot)
            pairs.append(([eot], ids[:end + 1]))
            in_bag += sum(v in bag for v in ids[:end])
            text = encoding.decode(ids[:end])
            if has_topic(text, label, TOPICS):
                successes.append(text)
        on_topic += len(successes)
        print(label, successes[:1])
    n = sum(len(ids) for _, ids in pairs)
    row = {'texts': len(pairs), 'on_topic': on_topic / len(pairs), 'in_bag': in_bag / n}
    for judge in judges:
        row[f'perplexity_under_{judge.name}'] = perplexity(score(judge, pairs, 'judging').logp, n)
    return row


def draw(rows: pandas.DataFrame, svg: str) -> None:
    """Plot the perplexity of texts under the other model against how many are on the topic."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout='constrained')
    backpack, transformer = rows.model.unique()
    for name, other, style in ((backpack, transformer, 'o-'), (transformer, backpack, 's--')):
        points = rows[rows.model == name]
        x = 100 * points.on_topic
        y = points[f'perplexity_under_{other}']
        axes.plot(x, y, style, label=name)
        for place in zip(points.control, x, y):
            axes.annotate(f' {place[0]:g}', place[1:])
    axes.set(xlabel='% of texts on the topic', ylabel='perplexity under the other model')
    axes.legend()
    figure.savefig(svg)


def main(n_texts: str, length: str, csv: str, svg: str) -> None:
    """Write a row for each control to a CSV file, and draw them."""
    judges = [load_model(name, 'cpu') for name in ('english', 'english_gpt')]
    rows = []
    for loaded in judges:
        for control, write_topics in writers(loaded).items():
            print(f'{loaded.name}, {control}', flush=True)
            measured = measure(write_topics, judges, int(n_texts), int(length))
            rows.append({'model': loaded.name, 'control': control, **measured})
    frame = pandas.DataFrame(rows)
    frame.to_csv(csv, index=False, float_format='%.5g')
    draw(frame, svg)


if __name__ == '__main__':
    main(*sys.argv[1:])
