"""Claims about what people type: words, pairs, bags, WORD:SENSES, replacements, strengths, prompts."""

import pytest
import tiktoken
from conftest import VOCABULARY
from test_model import lively

from rucksack.common import UserError
from rucksack.data import load_tokenizer
from rucksack.grammar import (
    bag_of_words,
    pair_of,
    parse_factor,
    parse_replacement,
    parse_strength,
    parse_word_senses,
    read_prompt,
    sense_numbers,
    word_forms,
    word_id,
    words_of_bag,
)
from rucksack.toy import toy_tokenizer
from senses import separation


@pytest.fixture
def toy_words() -> tiktoken.Encoding:
    """A tokenizer whose words are those of one sentence."""
    return load_tokenizer(toy_tokenizer(['The nurse said that she met Apple and HP, and he met The nurse.']))


def test_word_senses_are_parsed(toy_words):
    """WORD:SENSES takes numbers, ranges, * for every word, and A/B for the sense that separates most, for or
    against; a word goes by the id it has at the start of a text too."""
    model, nurse = lively(vocab_size=toy_words.n_vocab), word_forms(toy_words, 'nurse')
    assert nurse == toy_words.encode_ordinary(' nurse') and len(word_forms(toy_words, 'The')) == 2
    for given, chosen in (('nurse:2', [2]), ('nurse:0,2', [0, 2]), ('nurse:0-2', [0, 1, 2]),
                          (' nurse : 2, 0-1', [2, 0, 1])):
        assert parse_word_senses(given, model, toy_words)[:2] == (nurse, chosen)
    assert parse_word_senses('*:1', model, toy_words)[:2] == (None, [1])
    scores = separation(model, nurse[0], *pair_of(toy_words, 'she/he')).tolist()
    best, second = sorted(range(3), key=lambda l: -abs(scores[l]))[:2]
    for pair, sign in (('she/he', 1), ('he/she', -1)):
        ids, chosen, line = parse_word_senses(f'nurse:{pair}', model, toy_words)
        assert (ids, chosen) == (nurse, [best]) and f'(by {sign * scores[best]:+.2f} logits' in line
        assert f'sense {best} of nurse' in line and f'sense {second}: {sign * scores[second]:+.2f})' in line


def test_factors_replacements_and_strengths_are_parsed(toy_words):
    """WORD:SENSES=F, "WORD: OLD -> NEW" and a row of Table 11, by number or as four numbers."""
    assert parse_factor('nurse:1-2=0.5') == ('nurse:1-2', 0.5) and parse_factor('*:she/he=-2')[1] == -2
    apple, hp = (word_id(toy_words, word) for word in ('Apple', 'HP'))
    for text in ('nurse: Apple -> HP', 'nurse:Apple->HP'):
        assert parse_replacement(text, toy_words) == (word_forms(toy_words, 'nurse'), apple, hp)
    assert parse_strength('3') == (3.3, 3.3, 3, 1) and parse_strength('2,1.5,1,.5') == (2, 1.5, 1, 0.5)


def test_bags_take_every_piece_once(toy_words):
    """Commas, + and spaces are the same between words, and a topic of Table 10 goes by its name; a bag holds
    each id once, and every piece of a word of several."""
    assert words_of_bag('music, guitar') == words_of_bag('music+guitar') == ['music', 'guitar']
    assert words_of_bag('film_tv_video') == words_of_bag('film tv video') == ['film', 'tv', 'video']
    she, nurse = (word_id(toy_words, word) for word in ('she', 'nurse'))
    assert bag_of_words(toy_words, ['she', 'nurse', 'she']) == sorted([she, nurse])
    pieces = toy_words.encode_ordinary(' nurse-she')
    assert len(pieces) > 2 and bag_of_words(toy_words, ['nurse-she']) == sorted(set(pieces))


@pytest.mark.parametrize('parse, given, message', [
    (parse_word_senses, 'nurse', 'is not WORD:SENSES'), (parse_word_senses, ':1', 'is not WORD:SENSES'),
    (parse_word_senses, '*:she/he', 'is not WORD:SENSES'), (parse_word_senses, 'nurse:she/', 'not A/B'),
    (parse_word_senses, 'nurse:he/he', 'not A/B'), (parse_word_senses, 'nurse:she/zebra', "'zebra'"),
    (parse_word_senses, 'zebra:1', "'zebra' is no single word of this vocabulary but ' ' \\+ 'z' \\+ 'e'"),
    (sense_numbers, '3', 'there is no sense 3; this model has senses 0 to 2'),
    (sense_numbers, '1-3', 'no sense 1-3'), (sense_numbers, '2-1', 'no sense 2-1'),
    (sense_numbers, 'one', "'one' is neither"), (sense_numbers, '1,', 'neither'), (sense_numbers, '²', 'neither'),
    (sense_numbers, '-1', 'neither'), (sense_numbers, '9' * 5000, 'neither'),
    (parse_factor, 'nurse:1', 'FACTOR'), (parse_factor, 'nurse:1=nan', 'FACTOR'), (parse_factor, '=1', 'FACTOR'),
    (parse_strength, '4', 'neither'), (parse_strength, '1,2,3', 'neither'), (parse_strength, '1,1,1,-1', 'neither'),
    (parse_replacement, 'nurse: Apple', '->'), (parse_replacement, ': Apple -> HP', '->'),
    (parse_replacement, 'nurse: Apple -> zebra', 'zebra'), (words_of_bag, ' , ', 'empty'),
    (bag_of_words, ['zebra'], "'zebra' is no word of this vocabulary; take others$"),
    (bag_of_words, ['sport'], "'sport' is no word .*, or a topic of Table 10: sports$"),
    (word_id, '', "'' is no single word")])
def test_what_does_not_parse_is_refused(parse, given, message, toy_words):
    """What is malformed, or names what is not there, is an error that says so, and what is near."""
    argv = {parse_word_senses: (given, lively(vocab_size=toy_words.n_vocab), toy_words), word_id: (toy_words, given),
            sense_numbers: (given, 3), parse_replacement: (given, toy_words), bag_of_words: (toy_words, given)}
    with pytest.raises(UserError, match=message):
        parse(*argv.get(parse, (given,)))


def test_a_prompt_is_read_to_its_end(toy_words, tmp_path):
    """Of a prompt, or of a file, the last block_size tokens are read, which is said, as is what the toy can
    only spell; an empty one is the end-of-text."""
    ids = toy_words.encode_ordinary('The nurse met he')
    assert read_prompt('The nurse met he', toy_words, 4) == (ids, [])
    (tmp_path / 'p.txt').write_text('The nurse met he\n')
    cropped = 'The prompt has 4 tokens; the model reads the last 3.'
    assert read_prompt(f'FILE:{tmp_path}/p.txt', toy_words, 3) == (ids[1:], [cropped])
    assert read_prompt('', toy_words, 3) == ([toy_words.eot_token], [])
    assert 'never seen zebra, yak: it' in read_prompt('The zebra met yak', toy_words, 64)[1][0]
    with pytest.raises(UserError, match='FILE:nowhere cannot be read as text'):
        read_prompt('FILE:nowhere', toy_words, 3)


@pytest.mark.skipif(not VOCABULARY.is_dir(), reason="GPT-2's vocabulary is not at hand")
def test_gpt2_words_and_prompts_of_any_length():
    """Words of several pieces are shown in pieces; a prompt is encoded in pieces as tiktoken does it whole,
    and where that gives up: a million spaces."""
    gpt2 = load_tokenizer({'name': 'gpt2'})
    assert word_id(gpt2, 'nurse') == 15849 and len(word_forms(gpt2, 'MacBook')) == 1
    assert bag_of_words(gpt2, ['hairdresser']) == sorted(gpt2.encode_ordinary(' hairdresser'))
    with pytest.raises(UserError, match="' hair' \\+ "):
        word_id(gpt2, 'hairdresser')
    text = 'The nurse\r\n\n  said, "I\'m here".\t' * 5000  # 145,000 characters
    assert read_prompt(text, gpt2, 10 ** 7) == (gpt2.encode_ordinary(text), [])
    assert len(read_prompt(' ' * 1_000_000 + 'x', gpt2, 10 ** 7)[0]) == 1_000_000
