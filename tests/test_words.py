"""Claims about words as people type them: lists, bags, ids, prompts."""

from pathlib import Path

import pytest

from rucksack.errors import UserError
from rucksack.tokenizer import gpt2_tokenizer, load_tokenizer, words_tokenizer
from rucksack.words import bag_ids, read_lines, read_prompt, word_forms, word_list

ENCODING = load_tokenizer(words_tokenizer(['The nurse said that she met The nurse.']))
PIECES = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', 'Ġ a', 'Ġ x', 'h e']})
IST, A, X = 257, 258, 259  # 'ist', ' a', ' x'


def test_a_file_ends_its_lines_at_newlines_alone(folder):
    """Not at a form feed, nor at other characters that Python's splitlines takes for an end."""
    line = 'The nurse\x85said\u2028that\x0cshe'
    Path('prompts.txt').write_text(f'{line}\r\nmore\n', encoding='utf-8')
    assert read_lines('@prompts.txt') == [line, 'more']


@pytest.mark.parametrize('content', [b'\n \n', b'\xff'])
def test_a_file_without_words_is_named(content, folder):
    """It is blank, or no text."""
    Path('words.txt').write_bytes(content)
    with pytest.raises(UserError, match='@words.txt'):
        word_list('@words.txt')


def test_the_forms_of_a_word_are_inside_a_text_and_at_its_start():
    """A form that the vocabulary spells out letter by letter is left out."""
    nurse, = ENCODING.encode_ordinary(' nurse')
    assert word_forms(ENCODING, 'nurse') == [nurse]
    inside = ENCODING.encode_ordinary(' The')
    at_start = ENCODING.encode_ordinary('The')
    assert word_forms(ENCODING, 'The') == inside + at_start


def test_a_word_of_several_tokens_has_forms_of_all_of_them():
    """A BPE splits any word, also one whose space is a token of its own."""
    x, = PIECES.encode_ordinary('x')
    assert word_forms(PIECES, 'xist') == [(X, IST), (x, IST)]
    assert word_forms(PIECES, 'a xist')[0] == (A, X, IST)
    space, i = PIECES.encode_ordinary(' '), PIECES.encode_ordinary('\u00ed')
    assert word_forms(PIECES, '\u00edist') == [(*space, *i, IST), (*i, IST)]


def test_a_bag_has_all_tokens_of_its_words_once():
    """Its ids are sorted; an unknown word is refused."""
    ids = ENCODING.encode_ordinary(' nurse-she')
    assert bag_ids(ENCODING, ['nurse-she', 'nurse']) == sorted(set(ids))
    with pytest.raises(UserError, match='zebra'):
        bag_ids(ENCODING, ['nurse', 'zebra'])


def test_a_prompt_is_cut_to_its_end():
    """A notice says how many tokens are read, and another that it ends in a space."""
    start = 'The nurse said that zebra met she and '
    ids, (cut, ends) = read_prompt(start, ENCODING, 5)
    all_ids = ENCODING.encode_ordinary(start)
    assert ids == all_ids[-5:]
    assert f' {len(all_ids)} tokens' in cut
    assert 'space' in ends


@pytest.mark.parametrize('n_before', [0, 3])
def test_a_long_prompt_is_read_as_tiktoken_reads_it_whole(n_before):
    """It is encoded in pieces, which changes no id, wherever in a word 65,536 characters end."""
    encoding = load_tokenizer(gpt2_tokenizer(16_384))
    text = '.' * n_before + 'The nurse\r\n\n  said, "I\'m here".\t' * 5000
    assert read_prompt(text, encoding, 10 ** 7) == (encoding.encode_ordinary(text), [])
