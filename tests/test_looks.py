"""Claims about the verbs that look at a toy: they print what the model and its senses say."""

import ast
import math
import re
from pathlib import Path

import pandas
import pytest
import torch
from helpers import World, say
from torch.nn import functional as F

from rucksack.looks import explain, find, probs, show, similar, sweep
from rucksack.senses import scale_senses, senses_after

SENSES = range(16)
ROUNDED = 0.0051  # scores of words are written with two digits


def ask(verb, capsys, *argv: str) -> list[list[str]]:
    """Return the rows of a verb's tables as --csv writes them, without their names."""
    say(verb, capsys, *argv, '--csv', 'tables.csv')
    found = pandas.read_csv('tables.csv', dtype=str, keep_default_na=False)
    return found.drop(columns='rucksack_table').to_numpy().tolist()


def ask_words(verb, capsys, *argv: str) -> list[list[str]]:
    """Return the rows of a verb's tables of words, a row for each word and its score."""
    rows = []
    for *cells, words in ask(verb, capsys, *argv):
        for word, score in re.findall(r'(\S.*?) ([+-][\d.]+)(?:  |$)', words):
            rows.append([*cells, ast.literal_eval(word), score])
    return rows


def assert_same(found: list[list[str]], expected: list[list], atol: float = 1e-4) -> None:
    """Assert that two tables are the same, with numbers equal to within atol."""
    wanted = pandas.DataFrame(expected)
    found = pandas.DataFrame(found).astype(wanted.dtypes)
    pandas.testing.assert_frame_equal(found, wanted, rtol=0, atol=atol)


def ranked(cells: list, words: list[tuple[str, float]]) -> list[list]:
    """Make the rows of a line: its first cells with each word and score of World.top."""
    return [[*cells, *word] for word in words]


def test_show_has_the_senses_asked_for_as_edits_leave_them(world, capsys):
    """show lists the words with the largest and smallest C . E; -2 C raises what C lowered."""
    C = world.model.senses(torch.tensor(world.id('nurse')))  # (k, d)
    expected = []
    for l, own in ((9, -2 * C[9]), (3, C[3])):
        scores = world.E @ own
        lowered = [(word, -score) for word, score in world.top(-scores, 10)]
        expected += ranked([l, '+'], world.top(scores, 10))
        expected += ranked([l, '-'], lowered)
    assert_same(ask_words(show, capsys, 'nurse:9,3', '--edit', 'nurse:9=-2'), expected, ROUNDED)


def test_show_of_a_pair_has_the_sense_that_an_edit_turns_off(out, capsys):
    """The pair chooses sense 10 after the prompt, and 11 at weight 1."""
    rows = ask(show, capsys, 'nurse:she/he', '--from', 'english')
    assert {sense for sense, *_ in rows} == {'10'}


@pytest.mark.parametrize('pairs', ['she/he', '@pairs.txt'])
def test_find_has_the_senses_that_most_separate_two_words(pairs, world, capsys):
    """Senses are ranked by mean size over all words, divided by the std of a sense's logits."""
    Path('pairs.txt').write_text('she/he\nher/his\n')
    apart = world.E[world.id('she')] - world.E[world.id('he')]  # (d,)
    if pairs == '@pairs.txt':  # on average over the pairs
        apart = (apart + world.E[world.id('her')] - world.E[world.id('his')]) / 2
    C = world.model.senses(torch.arange(len(world.E)))  # (V, k, d)
    scores = C @ apart  # (V, k)
    mean_size = scores.abs().mean(0)
    ratio = mean_size / (C @ world.E.T).std(-1).mean(0)
    expected = []
    for l in ratio.argsort(descending=True).tolist():
        for w in scores[:, l].abs().topk(8).indices.tolist():
            cells = [l, mean_size[l].item(), ratio[l].item()]
            expected.append([*cells, world.word(w), scores[w, l].item()])
    assert_same(ask_words(find, capsys, pairs), expected, ROUNDED)


def test_similar_has_the_nearest_words_in_each_sense(world, capsys):
    """Words are ranked by cosine (last row: its minimum over senses), without the word itself."""
    quick = world.id('quick')
    C = world.model.senses(torch.arange(len(world.E)))  # (V, k, d)
    alike = F.cosine_similarity(C, C[quick], dim=-1)  # (V, k)
    alike[quick] = -1
    expected = []
    for l in SENSES:
        expected += ranked([str(l)], world.top(alike[:, l], 8))
    expected += ranked(['min'], world.top(alike.amin(-1), 8))
    assert_same(ask_words(similar, capsys, 'quick'), expected, ROUNDED)


def test_sweep_has_the_next_words_at_five_weights(world, capsys):
    """sweep scales senses from 0 to 1, on top of the edit."""
    nurse = world.id('nurse')
    edit = scale_senses([nurse], [9], -2.0)
    columns = []
    for factor in (0, 0.25, 0.5, 0.75, 1):
        columns.append(world.probs(edit, scale_senses([nurse], list(SENSES), factor)))
    rows = ask(sweep, capsys, 'nurse', '--edit', 'nurse:9=-2')
    assert_same(rows, world.next_words(*columns))


@pytest.mark.parametrize('asked, words', [('she', ['she']), ('she/he', ['she', 'he']), ('', [])])
def test_explain_has_all_terms_the_largest_first(asked, words, world, capsys):
    """explain lists alpha * C . E for a word, the difference of two, or the likeliest word."""
    model = world.model
    edit = scale_senses([world.id('nurse')], [0, 1, 2, 3], 0.5)
    C = senses_after(model, world.idx, edit)  # (1, T, k, d)
    logits = model(world.idx, C=C)[0, -1, :len(world.E)]
    ids = [world.id(word) for word in words] or [logits.argmax().item()]
    v = world.E[ids[0]]
    for other in ids[1:]:
        v = v - world.E[other]
    alpha = model.alpha(world.idx)[0, :, -1].T  # (T, k)
    scores = C[0] @ v  # (T, k)
    terms = alpha * scores
    expected = []
    for place in terms.abs().flatten().argsort(descending=True).tolist():
        j, l = divmod(place, len(SENSES))
        numbers = [x[j, l].item() for x in (terms, alpha, scores)]
        expected.append([*numbers, world.word(world.ids[j]), j, l])
    assert_same(ask(explain, capsys, *asked.split(), '--edit', 'nurse:0-3=0.5'), expected)


def test_probs_are_those_of_each_prompt(out, capsys):
    """Each prompt has a row with the log odds of two words, before and after the edit."""
    expected = []
    for word in ('nurse', 'sheriff', 'nurse'):
        row = [f'My {word} said that']
        world = World(prompt=row[0])
        edit = scale_senses([world.id('nurse')], [3, 5], 0.0)
        for p in (world.probs(), world.probs(edit)):
            she, he = p[[world.id('she'), world.id('he')]].tolist()
            row += [she, he, math.log(she / he)]
        expected.append(row)
    start = ['--start', 'My {} said that', '--words', 'nurse,sheriff', '--words', 'nurse']
    assert_same(ask(probs, capsys, 'she,he', 'she', *start, '--edit', 'nurse:3,5'), expected)


def test_log_odds_are_the_difference_of_logits(world, capsys):
    """Log odds are finite where both probabilities round to 0."""
    edit = scale_senses([world.id('nurse')], list(SENSES), 1000.0)
    C = senses_after(world.model, world.idx, edit)
    logits = world.model(world.idx, C=C)[0, -1]
    ranks = logits.argsort()[:2]  # far below the likeliest word
    words = [world.word(w).strip() for w in ranks.tolist()]
    (*_, odds), = ask(probs, capsys, *words, '--edit', 'nurse:0-15=1000')
    low, next_to_low = logits[[world.id(word) for word in words]].tolist()
    assert float(odds) == pytest.approx(low - next_to_low, rel=1e-4)


@pytest.mark.parametrize('start, words, prompt', [
    ('@prompts.txt', [], '@nurse said'), ('A {}', [], 'A {}'), ('{}', ['--words', 'A {}'], 'A {}'),
    ('The nurse\rsaid that', [], 'The nurse\rsaid that')])
def test_a_prompt_may_hold_braces_an_at_or_a_return(start, words, prompt, out, capsys):
    """Without --words, braces stand for themselves, and so does @ in a file of prompts."""
    Path('prompts.txt').write_text('@nurse said')
    (found, _), = ask(probs, capsys, 'she', '--start', start, *words)
    assert found == prompt
