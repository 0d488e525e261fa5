"""Claims about what people type: words, bags, WORD:SENSES, replacements, strengths, prompts."""

import pytest
from conftest import VOCABULARY
from test_model import lively

from rucksack import grammar
from rucksack.common import UserError
from rucksack.data import load_tokenizer
from rucksack.grammar import parse_factor, parse_replacement, parse_strength, read_prompt, word_forms, words_of_bag
from rucksack.toy import toy_tokenizer
from senses import TOPICS, separation

TOY = load_tokenizer(toy_tokenizer(['The nurse said that she met Apple and HP, and he met The nurse.']))
NURSE, SHE, HE, APPLE, HP = (TOY.encode_ordinary(f' {word}')[0] for word in ('nurse', 'she', 'he', 'Apple', 'HP'))


def senses_of(text: str) -> tuple:
    """parse_word_senses with a model of 3 senses."""
    return grammar.parse_word_senses(text, lively(vocab_size=TOY.n_vocab), TOY)


def test_word_senses_are_parsed():
    """WORD:SENSES takes numbers, ranges, * for every word, and A/B for the sense that separates most, for or
    against; a word goes by the id it has at the start of a text too."""
    assert word_forms(TOY, 'nurse') == [NURSE] and len(word_forms(TOY, 'The')) == 2
    for given, chosen in (('2', [2]), ('0,2', [0, 2]), ('0-2', [0, 1, 2]), (' 2, 0-1', [2, 0, 1])):
        assert senses_of(f'nurse:{given}')[:2] == ([NURSE], chosen)
    scores = separation(lively(vocab_size=TOY.n_vocab), NURSE, SHE, HE).tolist()
    best, second, _ = sorted(range(3), key=lambda l: -abs(scores[l]))
    assert senses_of('*:1')[:2] == (None, [1]) and senses_of('nurse:he/she')[1] == [best]
    assert f'(by {scores[best]:+.2f} logits; sense {second}: {scores[second]:+.2f})' in senses_of('nurse:she/he')[2]


def test_edits_and_bags_are_parsed():
    """WORD:SENSES=F; "WORD: OLD -> NEW"; a row of Table 11 by number or as four numbers; bags with commas, +
    or spaces between words, or a topic of Table 10 by name: each id once, and every piece of a word."""
    assert parse_factor('nurse:1-2=0.5') == ('nurse:1-2', 0.5) and parse_factor('*:she/he=-2')[1] == -2
    assert parse_replacement('nurse: Apple -> HP', TOY) == parse_replacement('nurse:Apple->HP', TOY) == (
        [NURSE], APPLE, HP)
    assert parse_strength('3') == (3.3, 3.3, 3, 1) and parse_strength('2,1.5,1,.5') == (2, 1.5, 1, 0.5)
    assert words_of_bag('film, tv,video') == words_of_bag('film+tv video') == words_of_bag('film_tv_video')
    assert words_of_bag('film_tv_video') == ['film', 'tv', 'video'] and len(TOPICS) == 17
    assert grammar.bag_of_words(TOY, ['she', 'nurse', 'she']) == sorted([SHE, NURSE])
    pieces = TOY.encode_ordinary(' nurse-she')
    assert len(pieces) > 2 and grammar.bag_of_words(TOY, ['nurse-she']) == sorted(set(pieces))


@pytest.mark.parametrize('parse, given, message', [
    *((senses_of, text, 'is not WORD:SENSES') for text in ('nurse', ':1', 'nurse:', '*:she/he')),
    *((senses_of, f'nurse:{text}', 'is neither sense numbers') for text in ('one', '1,', '²', '-1', '9' * 5000)),
    *((senses_of, f'nurse:{text}', 'senses 0 to 2') for text in ('3', '1-3', '2-1')),
    *((senses_of, f'nurse:{text}', 'is not A/B') for text in ('she/', 'he/he')), (senses_of, 'nurse:a/she', "'a'"),
    (senses_of, 'zebra:1', "'zebra' is no single word of this vocabulary but ' ' \\+ 'z' \\+ 'e'"),
    *((parse_factor, text, 'is not WORD:SENSES=FACTOR') for text in ('nurse:1', 'nurse:1=nan', '=1')),
    *((parse_strength, text, 'is neither 0, 1, 2 or 3 nor') for text in ('4', '1,2,3', '1,1,1,-1', '1,1,1,inf')),
    *((lambda text: parse_replacement(text, TOY), text, 'WORD: OLD -> NEW') for text in ('nurse: he', ': he -> she')),
    (lambda text: parse_replacement(text, TOY), 'nurse: he -> zebra', "'zebra'"), (words_of_bag, ' , ', 'empty'),
    (lambda word: grammar.bag_of_words(TOY, [word]), 'zebra', "'zebra' is no word of this vocabulary; .* others$"),
    (lambda word: grammar.bag_of_words(TOY, [word]), 'sport', "'sport' is no word .* a topic of Table 10: sports$")])
def test_what_does_not_parse_is_refused(parse, given, message):
    """What is malformed, or names what is not there, is an error that says so, and what is near."""
    with pytest.raises(UserError, match=message):
        parse(given)


@pytest.mark.skipif(not VOCABULARY.is_dir(), reason="GPT-2's vocabulary is not at hand")
def test_gpt2_words_and_prompts_of_any_length():
    """Words of several ids are refused in pieces, or bags of them; a prompt is encoded in pieces as tiktoken
    does it whole, and where that gives up: a million spaces."""
    gpt2 = load_tokenizer({'name': 'gpt2'})
    assert grammar.bag_of_words(gpt2, ['hairdresser']) == sorted(gpt2.encode_ordinary(' hairdresser'))
    with pytest.raises(UserError, match="' hair' \\+ "):
        word_forms(gpt2, 'hairdresser')
    text = 'The nurse\r\n\n  said, "I\'m here".\t' * 5000  # 145,000 characters
    assert read_prompt(text, gpt2, 10 ** 7) == (gpt2.encode_ordinary(text), [])
    assert len(read_prompt(' ' * 1_000_000 + 'x', gpt2, 10 ** 7)[0]) == 1_000_000
