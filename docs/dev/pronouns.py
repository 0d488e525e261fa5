"""Count the role nouns whose chosen sense is about pronouns (Table 13).

    python -m docs.dev.pronouns --from english
"""

import argparse

import torch

from rucksack.cli import run_cli
from rucksack.loaded import LoadedModel, load_model
from rucksack.paper.gender import choose_sense, pronouns
from rucksack.paper.lists import NOUNS
from rucksack.senses import extremes, separation
from rucksack.words import token_texts, word_ids

PRONOUNS = {'she', 'her', 'hers', 'herself', 'he', 'him', 'his', 'himself'}


@torch.no_grad()
def count_nouns(loaded: LoadedModel, nouns: list[str], sense: int) -> tuple[int, int]:
    """Count nouns of one token whose sense raises or lowers a pronoun, and is the strongest.

    The first number counts pronouns among the ten words that the sense raises most, and the ten
    that it lowers most; the second, that no other sense separates she from he more.
    """
    ids = torch.tensor(word_ids(loaded.encoding, nouns), device=loaded.device)  # (nouns,)
    C = loaded.model.senses(ids)[:, sense]  # (nouns, d)
    found, _ = extremes(loaded.model, C, 10)  # (nouns, 20)
    n_found = 0
    for row in found.tolist():
        words = {text.strip().lower() for text in token_texts(loaded.encoding, row)}
        n_found += not PRONOUNS.isdisjoint(words)
    she, he, _ = pronouns(loaded)
    strongest = separation(loaded.model, ids, she, he).abs().argmax(-1)  # (nouns,)
    return n_found, (strongest == sense).sum().item()


def run(argv: list[str]) -> None:
    """Print the counts of the sense that rucksack eval gender removes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--from', dest='source', default='english')
    loaded = load_model(parser.parse_args(argv).source, 'cpu')
    nouns = loaded.single_tokens(NOUNS)
    sense = choose_sense(loaded)
    n_found, n_strongest = count_nouns(loaded, nouns, sense)
    print(f'Sense {sense} has a pronoun among the ten words that it raises or lowers most for '
          f'{n_found} of {len(nouns)} single-token nouns (Table 13). It separates she from he '
          f'more than any other sense for {n_strongest}.')


if __name__ == '__main__':
    run_cli('pronouns.py', run)
