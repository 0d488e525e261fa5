"""Claims about what people type: words, bags, WORD:SENSES, replacements, strengths, files."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import lively
from torch.testing import assert_close

from rucksack.cli import UserError
from rucksack.edits import (
    SensesOf,
    bag_ids,
    find_senses,
    load_edit,
    make_edit,
    parse_bag,
    parse_edits,
    parse_numbers,
    parse_pair,
    parse_replacement,
    parse_scaling,
    parse_senses_of,
    parse_strength,
    phrase_list,
    read_edit,
    read_lines,
    read_prompt,
    scores_of_bags,
    word_forms,
    word_list,
    write_out,
)
from rucksack.model import Backpack
from rucksack.paper.lists import TOPICS
from rucksack.senses import replace_word, scale_senses, separation, topic
from rucksack.tokenizer import gpt2_tokenizer, load_tokenizer, words_tokenizer

TOKENIZER = words_tokenizer(['The nurse said that she met Apple and HP, and he met The nurse.'])
ENCODING = load_tokenizer(TOKENIZER)
NURSE, SHE, HE, APPLE, HP = (ENCODING.encode_ordinary(f' {word}')[0]
                             for word in ('nurse', 'she', 'he', 'Apple', 'HP'))

# A vocabulary in which a word can be several pieces.
PIECES = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', 'Ġ a', 'Ġ x', 'h e']})
IST, A, X = 257, 258, 259  # 'ist', ' a', ' x'
X_AT_START = PIECES.encode_ordinary('x')[0]

TEXTS = {
    'senses_off': ['nurse:1'],
    'senses_scale': ['*:0=0.5'],
    'replace': ['nurse: Apple -> HP'],
    'topic': ['she, he', 'HP'],
    'strength': ['3', '2,1.5,1,.5']}


@pytest.fixture
def model() -> Backpack:
    """A random model of that vocabulary, with three senses."""
    return lively(vocab_size=ENCODING.n_vocab).requires_grad_(False)


# -----------------------------------------------------------------------------
# Lists.


@pytest.mark.parametrize('text, words', [
    ('nurse', ['nurse']), ('nurse,guard', ['nurse', 'guard']), (' a , b ', ['a', 'b']),
    (',', [',']), ('a,', ['a,']), ('@', ['@'])])
def test_commas_separate_the_words_of_a_list(text, words):
    """A text with an empty part is one word, so that a comma can be looked at."""
    assert word_list(text) == words


@pytest.mark.parametrize('text, phrases', [
    ('nurse', ['nurse']), ('a,b', ['a', 'b']), ('a,b:3-5,10', ['a:3-5,10', 'b:3-5,10']),
    ('a,b:she/he=.5', ['a:she/he=.5', 'b:she/he=.5']), ('a,b: Apple -> HP', ['a: Apple -> HP',
                                                                           'b: Apple -> HP']),
    (',:3', [',:3']), ('::3', ['::3']), ('*:1,2', ['*:1,2'])])
def test_a_phrase_is_written_out_for_each_word(text, phrases):
    """Commas behind the last colon separate senses, not words."""
    assert phrase_list(text) == phrases


def test_a_file_has_a_word_a_line(tmp_path, monkeypatch):
    """@FILE stands for its lines, without blank ones, in lists, phrases and bags."""
    monkeypatch.chdir(tmp_path)
    Path('words.txt').write_text('\ufeffnurse\r\n\n  guard \n', encoding='utf-8')
    assert word_list('@words.txt') == ['nurse', 'guard']
    texts = dict.fromkeys(TEXTS, []) | {'senses_off': ['@words.txt:1,2', 'she:3'],
                                        'topic': ['@words.txt', 'a, b']}
    written = write_out(texts)
    assert written['senses_off'] == ['nurse:1,2', 'guard:1,2', 'she:3']
    assert written['topic'] == ['nurse, guard', 'a, b']


def test_a_line_ends_where_a_line_ends(tmp_path, monkeypatch):
    """Not at a form feed, nor at other characters that Python's splitlines takes for an end."""
    monkeypatch.chdir(tmp_path)
    line = 'The nurse\x85said\u2028that\x0cshe'
    Path('prompts.txt').write_text(f'{line}\r\nmore\n', encoding='utf-8')
    assert read_lines('@prompts.txt') == [line, 'more']


@pytest.mark.parametrize('content', [None, b'', b'\n \n', b'\xff'])
def test_a_file_without_words_is_named(content, tmp_path, monkeypatch):
    """It is missing, empty, blank, or no text."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path('words.txt').write_bytes(content)
    with pytest.raises(UserError) as error:
        word_list('@words.txt')
    assert '@words.txt' in str(error.value)


# -----------------------------------------------------------------------------
# Phrases.


@pytest.mark.parametrize('text, numbers', [
    ('2', [2]), ('0,2', [0, 2]), ('0-2', [0, 1, 2]), (' 2, 0-1', [2, 0, 1])])
def test_senses_are_numbers_and_ranges(text, numbers):
    """WORD:SENSES takes sense numbers and ranges of them, in the order given."""
    assert parse_senses_of(f'nurse:{text}') == SensesOf('nurse', numbers)


def test_senses_are_of_every_word_or_of_a_pair():
    """The word * stands for every word, and A/B in place of numbers for a pair of words."""
    assert parse_senses_of('*:1') == SensesOf('*', [1])
    assert parse_senses_of('nurse: she / he ') == SensesOf('nurse', [], ('she', 'he'))


@pytest.mark.parametrize('text, scaling', [
    ('nurse:1-2=0.5', (SensesOf('nurse', [1, 2]), 0.5)),
    ('*:1=.5', (SensesOf('*', [1]), 0.5)),
    ('nurse:she/he=-2', (SensesOf('nurse', [], ('she', 'he')), -2.0))])
def test_a_scaling_is_senses_and_a_factor(text, scaling):
    """The factor behind the last = may be negative."""
    assert parse_scaling(text) == scaling


@pytest.mark.parametrize('text', ['nurse: Apple -> HP', 'nurse:Apple->HP', ' nurse : Apple->  HP '])
def test_a_replacement_is_three_words(text):
    """White space around the words of "WORD: OLD -> NEW" does not count."""
    assert parse_replacement(text) == ('nurse', 'Apple', 'HP')


@pytest.mark.parametrize('text, weights', [
    ('0', (1, 1, 1, 1)), ('3', (3.3, 3.3, 3, 1)), ('2,1.5,1,.5', (2, 1.5, 1, 0.5))])
def test_a_strength_is_a_row_of_table_11_or_four_numbers(text, weights):
    """A single number is that of a row of Table 11."""
    assert parse_strength(text) == weights


@pytest.mark.parametrize('text', ['film, tv,video', 'film+tv video', 'film_tv_video'])
def test_a_bag_is_words_or_a_topic(text):
    """Commas, plus signs and spaces separate words; a topic of Table 10 stands for its words."""
    assert parse_bag(text) == ['film', 'tv', 'video']


def test_table_10_has_17_topics():
    """The bag of other_hobbies has no "other" in it."""
    assert len(TOPICS) == 17
    assert TOPICS['other_hobbies'] == ['hobbies']


@pytest.mark.parametrize('parse, text', [
    (parse_senses_of, 'nurse'), (parse_senses_of, ':1'), (parse_senses_of, 'nurse:'),
    (parse_senses_of, '*:she/he'),
    (parse_numbers, 'one'), (parse_numbers, '1,'), (parse_numbers, '²'), (parse_numbers, '-1'),
    (parse_numbers, '2-1'), (parse_numbers, '0,2-1'), (parse_numbers, '9' * 5000),
    (parse_pair, 'she/'), (parse_pair, 'he/he'),
    (parse_scaling, 'nurse:1'), (parse_scaling, 'nurse:1=nan'), (parse_scaling, '=1'),
    (parse_strength, '4'), (parse_strength, '1,2,3'), (parse_strength, '1,1,1,-1'),
    (parse_strength, '1,1,1,inf'),
    (parse_replacement, 'nurse: he'), (parse_replacement, ': he -> she')])
def test_a_malformed_phrase_is_refused(parse, text):
    """The error quotes what was typed."""
    with pytest.raises(UserError) as error:
        parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize('changes', [
    {'senses_scale': ['*:0=9999'] * 4, 'topic': [], 'strength': []},
    {'senses_scale': ['*:0=-9999'] * 3, 'strength': ['9999,1,1,1', '1']}])
def test_factors_that_would_overflow_are_refused(changes):
    """All factors together multiply to at most 1e12, which the error says."""
    parse_edits(TEXTS | {'senses_scale': ['*:0=9999'] * 2})
    with pytest.raises(UserError) as error:
        parse_edits(TEXTS | changes)
    assert '1e+16' in str(error.value)
    assert '1e+12' in str(error.value)


def test_an_empty_bag_is_refused():
    """There must be a word between the commas."""
    with pytest.raises(UserError):
        parse_bag(' , ')


# -----------------------------------------------------------------------------
# Words and ids.


def test_the_forms_of_a_word_are_inside_a_text_and_at_its_start():
    """A form that the vocabulary spells out letter by letter is left out."""
    assert word_forms(ENCODING, 'nurse') == [NURSE]
    inside = ENCODING.encode_ordinary(' The')
    at_start = ENCODING.encode_ordinary('The')
    assert word_forms(ENCODING, 'The') == inside + at_start


def test_a_word_of_several_pieces_has_forms_of_all_its_pieces():
    """A phrase is such a word too, and a word of one piece is its id."""
    assert word_forms(PIECES, 'xist') == [(X, IST), (X_AT_START, IST)]
    assert word_forms(PIECES, 'a xist')[0] == (A, X, IST)
    assert word_forms(PIECES, 'a')[0] == A


def test_a_word_whose_space_is_a_piece_is_known_to_a_bpe():
    """Only a tokenizer of whole words has unknown words; a BPE splits all of them alike."""
    space, i = PIECES.encode_ordinary(' '), PIECES.encode_ordinary('\u00ed')
    assert word_forms(PIECES, '\u00edist') == [(*space, *i, IST), (*i, IST)]


def test_a_bag_has_all_pieces_of_its_words_once():
    """Its ids are sorted, and one that two words share is there once."""
    pieces = ENCODING.encode_ordinary(' nurse-she')
    assert bag_ids(ENCODING, ['nurse-she', 'nurse']) == sorted(set(pieces))


def test_a_bag_with_an_unknown_word_is_refused():
    """The error quotes the word."""
    with pytest.raises(UserError) as error:
        bag_ids(ENCODING, ['nurse', 'zebra'])
    assert "'zebra'" in str(error.value)


def test_a_prompt_is_cut_to_its_end_and_unknown_words_are_named():
    """A notice says how many tokens are read, another which words the model has never seen."""
    start = 'The nurse said that zebra met she and zebra'
    ids, notices = read_prompt(start, ENCODING, 5)
    all_ids = ENCODING.encode_ordinary(start)
    assert ids == all_ids[-5:]
    cut, unknown = notices
    assert f' {len(all_ids)} tokens' in cut
    assert ' 5' in cut
    assert ' zebra: ' in unknown


def test_an_empty_prompt_is_the_end_of_a_text():
    """There is nothing to say about it."""
    assert read_prompt('', ENCODING, 5) == ([ENCODING.eot_token], [])


@pytest.mark.parametrize('n_before', range(6))
def test_a_long_prompt_is_read_as_tiktoken_reads_it_whole(n_before):
    """It is encoded in pieces, which changes no id, wherever in a word 65,536 characters end."""
    encoding = load_tokenizer(gpt2_tokenizer(16_384))
    text = '.' * n_before + 'The nurse\r\n\n  said, "I\'m here".\t' * 5000
    assert read_prompt(text, encoding, 10 ** 7) == (encoding.encode_ordinary(text), [])


def test_a_prompt_of_a_million_spaces_is_read():
    """This is where tiktoken gives up on the whole."""
    encoding = load_tokenizer(gpt2_tokenizer(16_384))
    text = ' ' * 1_000_000 + 'x'
    ids, _ = read_prompt(text, encoding, 10 ** 7)
    assert encoding.decode(ids) == text


# -----------------------------------------------------------------------------
# From phrases to an edit.


@pytest.mark.parametrize('text, words, numbers', [
    ('nurse:0,2', [NURSE], [0, 2]), ('*:1', None, [1])])
def test_a_phrase_finds_words_and_senses(text, words, numbers, model):
    """Words are their ids; None is every id."""
    found, chosen, _ = find_senses(parse_senses_of(text), model, ENCODING)
    assert found == words
    assert chosen == numbers


@pytest.mark.parametrize('pair, a, b', [('she/he', SHE, HE), ('he/she', HE, SHE)])
def test_a_pair_finds_the_sense_that_separates_it_most(pair, a, b, model):
    """It may speak for either word; its logits are said, and the sense that comes second."""
    scores = separation(model, torch.tensor([NURSE]), a, b)[0].tolist()
    by_size = sorted(range(3), key=lambda l: abs(scores[l]), reverse=True)
    best = by_size[0]
    second = by_size[1]
    words, numbers, said = find_senses(parse_senses_of(f'nurse:{pair}'), model, ENCODING)
    assert words == [NURSE]
    assert numbers == [best]
    assert f'(by {scores[best]:+.2f} logits' in said
    assert f'sense {second}: {scores[second]:+.2f}' in said


def test_a_word_of_several_pieces_is_edited_in_its_last():
    """What is said of it says so."""
    model = lively(vocab_size=PIECES.n_vocab)
    words, numbers, said = find_senses(parse_senses_of('xist:1'), model, PIECES)
    assert words == [(X, IST), (X_AT_START, IST)]
    assert numbers == [1]
    assert said == "sense 1 of xist (its last token 'ist', after ' x')"


def test_a_pair_looks_at_the_senses_of_the_last_piece():
    """It separates the pair in the senses that an edit would change."""
    model = lively(vocab_size=PIECES.n_vocab)
    best = separation(model, torch.tensor([IST]), A, X).abs().argmax().item()
    _, numbers, _ = find_senses(parse_senses_of('xist:a/x'), model, PIECES)
    assert numbers == [best]


@pytest.mark.parametrize('text, offending', [
    ('nurse:3', '3'), ('nurse:1-3', '3'), ('nurse:a/she', "'a'"), ('zebra:1', "'zebra'")])
def test_senses_and_words_that_are_not_there_are_refused(text, offending, model):
    """The error names the sense, or the word."""
    with pytest.raises(UserError) as error:
        find_senses(parse_senses_of(text), model, ENCODING)
    assert offending in str(error.value)


def test_an_unknown_word_is_shown_as_it_splits(model):
    """The error lists its pieces."""
    with pytest.raises(UserError) as error:
        find_senses(parse_senses_of('zebra:1'), model, ENCODING)
    assert "' ' + 'z' + 'e' + 'b' + 'r' + 'a'" in str(error.value)


def test_phrases_become_one_edit(model):
    """Senses off and scaled, replaced words and topics apply in this order, a line on each."""
    idx = torch.tensor([[NURSE, SHE, APPLE, NURSE, HP, HE]])
    scores = scores_of_bags(model, [[HE, SHE], [HP]])
    expected = model.senses(idx)
    for edit in (
            scale_senses([NURSE], [1], 0.0),
            scale_senses(None, [0], 0.5),
            replace_word(model, [NURSE], APPLE, HP),
            topic(model, scores[..., 0], (3.3, 3.3, 3, 1)),
            topic(model, scores[..., 1], (2, 1.5, 1, 0.5))):
        expected = edit(idx, expected)
    edit, lines = make_edit(parse_edits(TEXTS), model, ENCODING)
    assert_close(edit(idx, model.senses(idx)), expected)
    assert len(lines) == 5


def test_what_the_prompt_does_not_have_is_said(model):
    """Each part of an edit whose word is not in the prompt has a remark."""
    texts = TEXTS | {'senses_off': ['nurse:1', 'she:1'], 'topic': [], 'strength': []}
    idx = torch.tensor([[SHE, HE]])
    _, lines = make_edit(parse_edits(texts), model, ENCODING, [idx])
    remark = ' (does not occur: no effect on the next word)'
    is_absent = [line.endswith(remark) for line in lines]
    assert is_absent == [True, False, False, True]


@pytest.mark.parametrize('flag, text, offending', [
    ('replace', 'nurse: he -> yak', "'yak'"), ('replace', 'nurse: yak -> he', "'yak'"),
    ('replace', 'yak: he -> she', "'yak'"), ('senses_off', 'yak:1', "'yak'")])
def test_an_edit_of_an_unknown_word_is_refused(flag, text, offending, model):
    """Wherever the word stands, the error quotes it."""
    edits = parse_edits(TEXTS | {flag: [text]})
    with pytest.raises(UserError) as error:
        make_edit(edits, model, ENCODING)
    assert offending in str(error.value)


# -----------------------------------------------------------------------------
# Files of edits.


def saved(**changes) -> str:
    """A file of edits, with changes to its parts."""
    return json.dumps({'vocabulary': ENCODING.n_vocab, 'edits': TEXTS} | changes)


def test_a_file_of_edits_is_read_as_it_was_written(tmp_path):
    """Its phrases are those of the flags."""
    path = tmp_path / 'e.json'
    path.write_text(saved())
    assert read_edit(path, ENCODING.n_vocab) == TEXTS


def test_a_file_of_edits_is_one_edit(model, tmp_path):
    """Loaded in Python it changes senses as its phrases do."""
    path = tmp_path / 'e.json'
    path.write_text(saved())
    idx = torch.tensor([[NURSE, SHE, APPLE, NURSE, HP, HE]])
    C = model.senses(idx)
    expected, _ = make_edit(parse_edits(TEXTS), model, ENCODING)
    found = load_edit(path, model, ENCODING)(idx, C)
    assert torch.equal(found, expected(idx, C))
    assert not torch.equal(found, C)


with_part = partial(dict, TEXTS)
DAMAGED = {  # what is wrong with a file -> its contents, and what the error has
    'empty': ('', 'line 1'),
    'cut short': (saved()[:-20], 'char'),
    'nested': ('[' * 99999, 'recursion'),
    'a list': ('[]', 'list'),
    'other vocabulary': (saved(vocabulary=7), 'vocabulary is 7'),
    'a vocabulary of words': (saved(vocabulary='7'), "vocabulary is '7'"),
    'no vocabulary': (json.dumps({'edits': TEXTS}), 'has edits, not vocabulary, edits'),
    'no edits': (json.dumps({'vocabulary': ENCODING.n_vocab}), 'has vocabulary, not'),
    'no phrases': (saved(edits={}), 'edits has nothing'),
    'a part too many': (saved(edits=with_part(xyz=[])), 'xyz'),
    'a number': (saved(edits=with_part(replace=[3])), 'replace has 3'),
    'null': (saved(edits=with_part(senses_off=[None])), 'senses_off has None'),
    'a part that is a number': (saved(edits=with_part(senses_scale=1)), 'senses_scale is 1'),
    'no strength': (saved(edits=with_part(strength=[])), '--strength'),
    'a strength too many': (saved(edits=with_part(strength=['1', '2', '3'])), '--strength'),
    'malformed': (saved(edits=with_part(senses_off=['nurse'])), "'nurse' is not WORD:SENSES")}


@pytest.mark.parametrize('contents, wrong', DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_of_edits_is_named(contents, wrong, tmp_path):
    """The error says which file it is, and which part of it is wrong."""
    path = tmp_path / 'e.json'
    path.write_text(contents)
    with pytest.raises(UserError) as error:
        read_edit(path, ENCODING.n_vocab)
    assert str(path) in str(error.value)
    assert wrong in str(error.value)


def test_a_file_of_edits_that_is_not_there_is_named(tmp_path):
    """The error says which file was asked for."""
    with pytest.raises(UserError) as error:
        read_edit(tmp_path / 'none.json', ENCODING.n_vocab)
    assert 'none.json' in str(error.value)


def test_a_file_of_edits_that_is_no_text_is_named(tmp_path):
    """Its bytes are no UTF-8."""
    path = tmp_path / 'e.json'
    path.write_bytes(b'\xff\xfe')
    with pytest.raises(UserError) as error:
        read_edit(path, ENCODING.n_vocab)
    assert str(path) in str(error.value)
