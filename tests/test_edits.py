"""Claims about what people type: edits (one per line), lists and bags of words, and prompts."""

from pathlib import Path

import pytest
import torch
from helpers import lively

from rucksack.edits import (
    Replacement,
    SensesOf,
    Topic,
    count_word,
    find_senses,
    parse_lines,
    parse_senses,
)
from rucksack.errors import UserError
from rucksack.senses import STRENGTHS, explain, separation
from rucksack.tokenizer import gpt2_tokenizer, load_tokenizer, words_tokenizer
from rucksack.words import (
    bag_ids,
    edit_targets,
    read_lines,
    read_prompt,
    tokens_of,
    word_id,
    word_list,
)

ENCODING = load_tokenizer(words_tokenizer(
    ['The nurse said that she met Apple and HP, and he met The nurse.']))
NURSE, SHE, HE, APPLE, HP = (ENCODING.encode_ordinary(f' {word}')[0]
                             for word in ('nurse', 'she', 'he', 'Apple', 'HP'))

# A vocabulary in which a word can be several tokens.
PIECES = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', 'Ġ a', 'Ġ x', 'h e']})
IST, A, X = 257, 258, 259  # 'ist', ' a', ' x'
X_AT_START = PIECES.encode_ordinary('x')[0]


def off(word: str, *numbers: int, factor: float = 0.0) -> SensesOf:
    """Make the change that turns senses of a word off, or multiplies them."""
    return SensesOf(word, [*numbers], factor=factor)


@pytest.mark.parametrize('line, edits', [
    ('nurse:2', [off('nurse', 2)]), ('nurse: 2, 0-1', [off('nurse', 2, 0, 1)]),
    ('nurse,guard:3-5,10=0.5', [off(word, 3, 4, 5, 10, factor=0.5) for word in ('nurse', 'guard')]),
    ('nurse:1=-2', [off('nurse', 1, factor=-2.0)]),
    ('*:1=.5', [off('*', 1, factor=0.5)]), (',:3', [off(',', 3)]),
    ('::3', [off(':', 3)]), ('topic:3', [off('topic', 3)]),
    ('nurse: she / he ', [SensesOf('nurse', [], ('she', 'he'))]),
    ('MacBook: Apple -> HP', [Replacement('MacBook', 'Apple', 'HP')]),
    ('a,*:Apple->HP', [Replacement(word, 'Apple', 'HP') for word in ('a', '*')]),
    ('topic music', [Topic(['music'], STRENGTHS[2])]),
    ('topic film_tv_video=3', [Topic(['film', 'tv', 'video'], STRENGTHS[3])]),
    ('topic A, B = 2,1.5,1,.5', [Topic(['A', 'B'], (2, 1.5, 1, 0.5))]),
])
def test_a_line_is_one_edit_for_each_of_its_words(line, edits):
    """A line scales senses, replaces a fact, or turns up a topic."""
    assert parse_lines([line]) == edits


def test_a_file_of_edits_stands_for_its_lines_in_order(folder):
    """A file can hold edits, words to edit or the bag of a topic; # starts a comment."""
    Path('words.txt').write_text('\ufeffnurse\r\n\n  guard \n', encoding='utf-8')
    Path('edits.txt').write_text('# of she\nshe:3\n\n@words.txt:1\ntopic @words.txt\n')
    assert parse_lines(['he:0', '@edits.txt', 'he:2']) == [
        off('he', 0), off('she', 3), off('nurse', 1), off('guard', 1),
        Topic(['nurse', 'guard'], STRENGTHS[2]), off('he', 2)]


@pytest.mark.parametrize('line', [
    ':1', 'nurse:', '*:she/he', 'nurse,*:she/he', 'nurse:one', 'nurse:1,', 'nurse:-1',
    'nurse:2-1', 'nurse:1=nan', ': he -> she', 'topic music=1,2,3', 'topic music=1,1,1,-1',
    'nurse:he/he', 'topic ,', 'nurse:1,guard:2'])
def test_a_line_that_cannot_be_read_is_no_edit(line):
    """A line in an unknown form is refused, not read as something else."""
    with pytest.raises(UserError):
        parse_lines([line])


def test_prompts_choose_the_sense_of_a_pair():
    """A pair chooses the sense that adds most in prompts with the word, not most at weight 1."""
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
    """An edit changes the last token of a word, and a pair compares that token's senses."""
    model = lively(vocab_size=PIECES.n_vocab)
    best = separation(model, torch.tensor([IST]), A, X).abs().argmax().item()
    words, numbers, _ = find_senses(parse_senses('xist:a/x'), model, PIECES)
    assert words == [(X, IST), (X_AT_START, IST)]
    assert numbers == [best]


def test_tokens_of_a_word_inside_longer_words_are_counted_apart():
    """An edit of "a" touches "xa" too."""
    idx = torch.tensor([PIECES.encode_ordinary(' a, xa')])
    assert count_word('a', PIECES, [idx]) == (2, 1)


def test_a_file_ends_its_lines_at_newlines_alone(folder):
    """Form feeds and other characters at which splitlines splits do not end a line."""
    line = 'The nurse\x85said\u2028that\x0cshe'
    Path('prompts.txt').write_text(f'{line}\r\nmore\n', encoding='utf-8')
    assert read_lines('@prompts.txt') == [line, 'more']


@pytest.mark.parametrize('content', [b'\n \n', b'\xff'])
def test_a_file_without_words_is_named(content, folder):
    """The error names a file that is blank or not text."""
    Path('words.txt').write_bytes(content)
    with pytest.raises(UserError, match='@words.txt'):
        word_list('@words.txt')


def test_the_forms_of_a_word_are_inside_a_text_and_at_its_start():
    """An edit leaves out a form that the vocabulary spells letter by letter."""
    assert edit_targets(ENCODING, 'nurse') == [NURSE]
    inside = ENCODING.encode_ordinary(' The')
    at_start = ENCODING.encode_ordinary('The')
    assert edit_targets(ENCODING, 'The') == inside + at_start


def test_a_word_of_several_tokens_has_forms_of_all_of_them():
    """A BPE can split any word, even one whose space is a separate token."""
    assert edit_targets(PIECES, 'xist') == [(X, IST), (X_AT_START, IST)]
    assert edit_targets(PIECES, 'a xist')[0] == (A, X, IST)


@pytest.mark.parametrize('word', ['\u00edist', '\u4e2dist', '\u4e2d'])
def test_a_space_that_is_a_token_of_its_own_is_no_part_of_a_word(word):
    """A space that is a token, or before a script without spaces, is not part of the word."""
    assert tokens_of(PIECES, word) == tuple(PIECES.encode_ordinary(word))


@pytest.mark.parametrize('word, is_known', [
    ('nurse', True), (',', True), ('zebra', False), ('nurse zebra', False), ('\u4e2d', False),
    ('The zebra', False)])
def test_a_vocabulary_of_words_has_words_and_punctuation(word, is_known):
    """An unknown word is refused wherever it stands, and a comma is known."""
    if is_known:
        assert ENCODING.decode(tokens_of(ENCODING, word)).strip() == word
    else:
        with pytest.raises(UserError, match='not in the vocabulary'):
            tokens_of(ENCODING, word)


CHINESE = load_tokenizer({'name': 'gpt2', 'merges': ['Ġ ä', 'ä ¸', 'ä¸ Ń']})


def test_a_word_without_a_space_before_it_is_one_token():
    """A word of a script without spaces gets no space, because a merge could then split it."""
    idx = torch.tensor([CHINESE.encode_ordinary('a\u4e2d\u4e2db')])
    assert word_id(CHINESE, '\u4e2d') == 258
    assert count_word('\u4e2d', CHINESE, [idx]) == (2, 2)


@pytest.mark.parametrize('word', ['', ' nurse'])
def test_a_word_is_given_without_spaces(word):
    """A word with spaces around it is refused, because it would silently have different ids."""
    with pytest.raises(ValueError, match='not a word'):
        tokens_of(ENCODING, word)


def test_a_bag_has_all_tokens_of_its_words_once():
    """A bag's ids are sorted; an unknown word is refused."""
    ids = ENCODING.encode_ordinary(' nurse she')
    assert bag_ids(ENCODING, ['nurse she', 'nurse']) == sorted(set(ids))
    with pytest.raises(UserError, match='zebra'):
        bag_ids(ENCODING, ['nurse', 'zebra'])


def test_a_prompt_is_cut_to_its_end():
    """One notice says how many tokens are read, and another that the prompt ends in a space."""
    start = 'The nurse said that zebra met she and '
    ids, (cut, ends) = read_prompt(start, ENCODING, 5)
    all_ids = ENCODING.encode_ordinary(start)
    assert ids == all_ids[-5:]
    assert f' {len(all_ids)} tokens' in cut
    assert 'space' in ends


@pytest.mark.parametrize('n_before', [0, 3])
def test_a_long_prompt_is_read_as_tiktoken_reads_it_whole(n_before):
    """Encoding a text in pieces changes no id, wherever in a word character 65,536 falls."""
    encoding = load_tokenizer(gpt2_tokenizer(16_384))
    text = '.' * n_before + 'The nurse\r\n\n  said, "I\'m here".\t' * 5000
    assert read_prompt(text, encoding, 10 ** 7) == (encoding.encode_ordinary(text), [])
