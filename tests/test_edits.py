"""Claims about edits as people type them: one a line, in flags and in files."""

from pathlib import Path

import pytest
import torch
from helpers import lively

from rucksack.edits import (
    Replacement,
    SensesOf,
    Topic,
    count_words,
    find_senses,
    parse_lines,
    parse_senses,
)
from rucksack.errors import UserError
from rucksack.senses import STRENGTHS, explain, separation
from rucksack.tokenizer import load_tokenizer, words_tokenizer

ENCODING = load_tokenizer(words_tokenizer(
    ['The nurse said that she met Apple and HP, and he met The nurse.']))
NURSE, SHE, HE, APPLE, HP = (ENCODING.encode_ordinary(f' {word}')[0]
                             for word in ('nurse', 'she', 'he', 'Apple', 'HP'))

# A vocabulary in which a word can be several tokens.
PIECES = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', 'Ġ a', 'Ġ x', 'h e']})
IST, A, X = 257, 258, 259  # 'ist', ' a', ' x'
X_AT_START = PIECES.encode_ordinary('x')[0]


def off(word: str, *numbers: int, factor: float = 0.0) -> SensesOf:
    """The edit that turns senses of a word off, or multiplies them."""
    return SensesOf(word, [*numbers], factor=factor)


@pytest.mark.parametrize('line, edits', [
    ('nurse:2', [off('nurse', 2)]),
    ('nurse: 2, 0-1', [off('nurse', 2, 0, 1)]),
    ('nurse,guard:3-5,10=0.5', [off(word, 3, 4, 5, 10, factor=0.5) for word in ('nurse', 'guard')]),
    ('nurse:1=-2', [off('nurse', 1, factor=-2.0)]),
    ('*:1=.5', [off('*', 1, factor=0.5)]),
    (',:3', [off(',', 3)]),
    ('::3', [off(':', 3)]),
    ('topic:3', [off('topic', 3)]),
    ('nurse: she / he ', [SensesOf('nurse', [], ('she', 'he'))]),
    ('MacBook: Apple -> HP', [Replacement('MacBook', 'Apple', 'HP')]),
    ('a,*:Apple->HP', [Replacement(word, 'Apple', 'HP') for word in ('a', '*')]),
    ('topic music', [Topic(['music'], STRENGTHS[2])]),
    ('topic film_tv_video=3', [Topic(['film', 'tv', 'video'], STRENGTHS[3])]),
    ('topic A, B = 2,1.5,1,.5', [Topic(['A', 'B'], (2, 1.5, 1, 0.5))]),
])
def test_a_line_is_one_edit_for_each_of_its_words(line, edits):
    """It scales senses, replaces a fact, or turns up a topic."""
    assert parse_lines([line]) == edits


def test_a_file_of_edits_stands_for_its_lines_in_order(folder):
    """A file named before senses is a list of words, and one after topic is a bag."""
    Path('words.txt').write_text('\ufeffnurse\r\n\n  guard \n', encoding='utf-8')
    Path('edits.txt').write_text('she:3\n\n@words.txt:1\ntopic @words.txt\n')
    assert parse_lines(['he:0', '@edits.txt', 'he:2']) == [
        off('he', 0), off('she', 3), off('nurse', 1), off('guard', 1),
        Topic(['nurse', 'guard'], STRENGTHS[2]), off('he', 2)]


@pytest.mark.parametrize('line', [
    ':1', 'nurse:', '*:she/he', 'nurse:one', 'nurse:1,', 'nurse:-1', 'nurse:2-1', 'nurse:1=nan',
    ': he -> she', 'topic music=1,2,3', 'topic music=1,1,1,-1', 'nurse:he/he', 'topic ,'])
def test_a_line_that_cannot_be_read_is_no_edit(line):
    """It is refused, and not read as something else."""
    with pytest.raises(UserError):
        parse_lines([line])


def test_prompts_choose_the_sense_of_a_pair():
    """It adds most to the log odds over those that have the word, and another does at weight 1."""
    model = lively(3, vocab_size=ENCODING.n_vocab, block_size=8)
    texts = [torch.tensor([ids]) for ids in ([NURSE, SHE, NURSE, HP], [APPLE, NURSE], [HE, APPLE])]
    total = torch.zeros(3)
    for idx in texts:
        alpha, scores = explain(model, idx, model.wte.weight[SHE] - model.wte.weight[HE])
        total += (alpha * scores)[idx == NURSE].sum(0)
    _, at_weight_1, _ = find_senses(parse_senses('nurse:she/he'), model, ENCODING, texts[2:])
    _, numbers, _ = find_senses(parse_senses('nurse:she/he'), model, ENCODING, texts)
    assert numbers == [total.abs().argmax().item()]
    assert numbers != at_weight_1


def test_a_word_of_several_tokens_is_edited_at_its_last():
    """A pair looks at the senses of that token."""
    model = lively(vocab_size=PIECES.n_vocab)
    best = separation(model, torch.tensor([IST]), A, X).abs().argmax().item()
    words, numbers, _ = find_senses(parse_senses('xist:a/x'), model, PIECES)
    assert words == [(X, IST), (X_AT_START, IST)]
    assert numbers == [best]


def test_tokens_of_a_word_inside_longer_words_are_counted_apart():
    """An edit of "a" touches "xa" too; every word, *, is not counted."""
    idx = torch.tensor([PIECES.encode_ordinary(' a, xa')])
    assert count_words([off('a', 0), off('*', 0)], PIECES, [idx]) == {'a': (2, 1)}
