"""Claims about what people type: words, bags, WORD:SENSES, replacements, strengths, prompts."""

from functools import partial

import pytest
from conftest import VOCABULARY
from test_model import lively

from rucksack import grammar
from rucksack.common import UserError
from rucksack.data import load_tokenizer
from rucksack.grammar import parse_factor, parse_strength, words_of_bag
from rucksack.toy import toy_tokenizer
from senses import TOPICS, separation

TOY = load_tokenizer(toy_tokenizer(['The nurse said that she met Apple and HP, and he met The nurse.']))
NURSE, SHE, HE, APPLE, HP = (TOY.encode_ordinary(f' {word}')[0] for word in 'nurse she he Apple HP'.split())
senses_of = partial(grammar.parse_word_senses, model=lively(vocab_size=TOY.n_vocab), encoding=TOY)
replaced, bag = partial(grammar.parse_replacement, encoding=TOY), partial(grammar.bag_of_words, TOY)


def test_word_senses_are_parsed():
    """WORD:SENSES takes numbers, ranges, * for every word, and A/B for the sense that separates most."""
    assert grammar.word_forms(TOY, 'nurse') == [NURSE] and len(grammar.word_forms(TOY, 'The')) == 2
    for given, chosen in (('2', [2]), ('0,2', [0, 2]), ('0-2', [0, 1, 2]), (' 2, 0-1', [2, 0, 1])):
        assert senses_of(f'nurse:{given}')[:2] == ([NURSE], chosen)
    scores = separation(lively(vocab_size=TOY.n_vocab), NURSE, SHE, HE).tolist()
    best, second, _ = sorted(range(3), key=lambda l: -abs(scores[l]))
    assert senses_of('*:1')[:2] == (None, [1]) and senses_of('nurse:he/she')[1] == [best]
    line = senses_of('nurse:she/he')[2]
    assert f'(by {scores[best]:+.2f} logits' in line and f'sense {second}: {scores[second]:+.2f}' in line


def test_a_word_of_several_pieces_is_edited_in_its_last_and_that_is_said():
    """Its form is all its pieces; A/B looks at the senses of the last; a phrase is such a word too."""
    encoding = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', '\u0120 a', '\u0120 x', 'h e']})
    model, a, x, ist = lively(vocab_size=encoding.n_vocab), 258, 259, 257
    assert grammar.parse_word_senses('xist:1', model, encoding) == (
        [(x, ist), (ord('x') - 33, ist)], [1], "sense 1 of xist (its last piece 'ist', after ' x')")
    assert grammar.word_forms(encoding, 'a xist')[0] == (a, x, ist)
    assert grammar.word_forms(encoding, 'a')[0] == a
    best = separation(model, ist, a, x).abs().argmax().item()
    assert grammar.parse_word_senses('xist:a/x', model, encoding)[1] == [best]


def test_edits_and_bags_are_parsed():
    """Factors, replacements, strengths of a row or four numbers, and bags by words or by topic."""
    assert parse_factor('nurse:1-2=0.5') == ('nurse:1-2', 0.5) and parse_factor('*:she/he=-2')[1] == -2
    assert replaced('nurse: Apple -> HP') == replaced('nurse:Apple->HP') == ('nurse', APPLE, HP)
    assert parse_strength('3') == (3.3, 3.3, 3, 1) and parse_strength('2,1.5,1,.5') == (2, 1.5, 1, 0.5)
    for text in ('film, tv,video', 'film+tv video', 'film_tv_video'):
        assert words_of_bag(text) == ['film', 'tv', 'video']
    assert len(TOPICS) == 17 and TOPICS['other_hobbies'] == ['hobbies']
    assert bag(['nurse-she', 'nurse']) == sorted(set(TOY.encode_ordinary(' nurse-she')))


@pytest.mark.parametrize('parse, texts, message', [
    (senses_of, ('nurse', ':1', 'nurse:', '*:she/he'), 'is not WORD:SENSES'),
    (senses_of, ('nurse:one', 'nurse:1,', 'nurse:²', 'nurse:-1', 'nurse:' + '9' * 5000), 'is neither sense'),
    (senses_of, ('nurse:3', 'nurse:1-3', 'nurse:2-1'), 'senses 0 to 2'),
    (senses_of, ('nurse:she/', 'nurse:he/he'), 'is not A/B'), (senses_of, ('nurse:a/she',), "'a'"),
    (senses_of, ('zebra:1',), "'zebra' is no single word of this vocabulary but ' ' \\+ 'z' \\+ 'e'"),
    (parse_factor, ('nurse:1', 'nurse:1=nan', '=1'), 'is not WORD:SENSES=FACTOR'),
    (parse_strength, ('4', '1,2,3', '1,1,1,-1', '1,1,1,inf'), 'is neither 0, 1, 2 or 3 nor four numbers'),
    (replaced, ('nurse: he', ': he -> she'), 'WORD: OLD -> NEW'), (replaced, ('nurse: he -> yak',), "'yak'"),
    (words_of_bag, (' , ',), 'empty'), (bag, (['zebra'],), "'zebra' is no word of this .* others$"),
    (bag, (['sport'],), "'sport' is no word .* take sports$")])
def test_what_does_not_parse_is_refused(parse, texts, message):
    """What is malformed, or names what is not there, is an error that says so, and what is near."""
    for text in texts:
        with pytest.raises(UserError, match=message):
            parse(text)


@pytest.mark.skipif(not VOCABULARY.is_dir(), reason="GPT-2's vocabulary is not at hand")
def test_a_prompt_of_any_length_is_read():
    """It is encoded in pieces as tiktoken does it whole, and where that gives up: a million spaces."""
    gpt2, text = load_tokenizer({'name': 'gpt2'}), 'The nurse\r\n\n  said, "I\'m here".\t' * 5000
    assert grammar.read_prompt(text, gpt2, 10 ** 7) == (gpt2.encode_ordinary(text), [])
    assert len(grammar.read_prompt(' ' * 1_000_000 + 'x', gpt2, 10 ** 7)[0]) == 1_000_000
