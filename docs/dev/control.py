"""Measure what topic control costs in quality (Table 12; Figure 2, without MAUVE).

    python -m docs.dev.control --csv docs/dev/control.csv --svg docs/control.svg
    python -m docs.dev.control english_gpt --steps 0 .01 .04 .05 .06 .07
    python -m docs.dev.control out/toy out/toy_gpt --texts 100 --length 100

A Backpack writes at each strength of Table 11. A Transformer writes under PPLM at each step size
(pplm.py). On topic: a text has more words of its topic than of any other, by word lists (the paper
uses a trained classifier). Words of the bag: the share of tokens that are in the topic's bag of
words (Table 10). Perplexity is that of the texts under the model itself, and under each other
model, without control. The first text that is on each topic is printed (Tables 16 to 18).
"""

import argparse

import pandas

from docs.dev.pplm import pplm_writers
from docs.dev.topics import Writers, has_topic, measure, strength_writers, topics_of
from rucksack.cli import run_cli
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.likelihood import Pair, score

CONTROL = 'strength or step'


def writers_of(loaded: LoadedModel, steps: list[float] | None) -> dict[float, Writers]:
    """Map strengths or step sizes to a model's writers on each topic."""
    if loaded.config.n_sense:
        return dict(enumerate(strength_writers(loaded)))
    return pplm_writers(loaded, steps)


def print_first_texts(loaded: LoadedModel, pairs: list[Pair]) -> None:
    """Print the first text that is on its topic, for each topic; each has as many of the pairs."""
    topics = topics_of(loaded)
    n = len(pairs) // len(topics)
    for i, label in enumerate(topics):
        texts = [loaded.encoding.decode(ids) for _, ids in pairs[i * n:(i + 1) * n]]
        successes = [text for text in texts if has_topic(text, label, topics)]
        print(label, successes[:1])


def rows_of(models: list[LoadedModel], steps: list[float] | None, n_texts: int, length: int
            ) -> pandas.DataFrame:
    """Measure each model at each strength or step; all models judge all texts."""
    rows = []
    for loaded in models:
        for control, writers in writers_of(loaded, steps).items():
            row, pairs = measure(loaded, control, writers, n_texts, length)
            print_first_texts(loaded, pairs)
            for judge in models:
                if judge is not loaded:
                    scores = score(judge, pairs, 'judging')
                    row[f'perplexity under {judge.name}'] = scores.perplexity()
            rows.append({'model': loaded.name, **row})
    return pandas.DataFrame(rows)


def draw(rows: pandas.DataFrame, svg: str) -> None:
    """Plot the perplexity of texts under the other of two models against how many are on topic."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout='constrained')
    first, second = rows.model.unique()
    for name, other, style in ((first, second, 'o-'), (second, first, 's--')):
        points = rows[rows.model == name]
        x = points['on topic %']
        y = points[f'perplexity under {other}']
        axes.plot(x, y, style, label=name)
        for place in zip(points[CONTROL], x, y):
            axes.annotate(f' {place[0]:g}', place[1:])
    axes.set(xlabel='% of texts on the topic', ylabel='perplexity under the other model')
    axes.legend()
    figure.savefig(svg)


def run(argv: list[str]) -> None:
    """Print a row for each model and control; perhaps write them to a CSV file, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('models', nargs='*', default=['english', 'english_gpt'], metavar='MODEL')
    add('--texts', type=int, default=20, help='texts for each topic [20]')
    add('--length', type=int, default=50, help='tokens per text [50]')
    add('--steps', type=float, nargs='+', metavar='S', help='step sizes of PPLM [those of pplm.py]')
    add('--device', default='cpu')
    add('--csv')
    add('--svg', help='for two models')
    args = parser.parse_args(argv)
    models = [load_model(name, args.device) for name in args.models]
    rows = rows_of(models, args.steps, args.texts, args.length)
    print(rows.to_string(index=False, float_format='{:.4f}'.format, na_rep='-'))
    if args.csv:
        without_times = rows.drop(columns='seconds a text')
        without_times.to_csv(args.csv, index=False, float_format='%.5g')
    if args.svg:
        draw(rows, args.svg)


if __name__ == '__main__':
    run_cli('control.py', run)
