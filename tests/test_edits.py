"""Claims about what people type: edits (one per line), lists and bags of words, and prompts."""

import re
from pathlib import Path

import pytest
import torch
from helpers import lively, toy_loaded

from rucksack.edits.lines import LINE, find_senses, make_edit, parse_lines
from rucksack.errors import UserError
from rucksack.senses import explain, separation
from rucksack.tokenizer import load_tokenizer, words_tokenizer
from rucksack.vocabulary import bag_ids
from rucksack.words import edit_targets, read_lines, tokens_of, word_id, word_list

ENCODING = load_tokenizer(words_tokenizer(
    ['The nurse said that she met Apple and HP, and he met The nurse.']))
NURSE, SHE, HE, APPLE, HP = (ENCODING.encode_ordinary(f' {word}')[0]
                             for word in ('nurse', 'she', 'he', 'Apple', 'HP'))

# A vocabulary in which a word can be several tokens.
PIECES = load_tokenizer({'name': 'gpt2', 'merges': ['i s', 'is t', 'Ġ a', 'Ġ x', 'h e']})
IST, A, X = 257, 258, 259  # 'ist', ' a', ' x'
X_AT_START = PIECES.encode_ordinary('x')[0]


def parsed(**groups: str) -> dict:
    """Make what a line is parsed into: its groups, and None for all others."""
    return dict.fromkeys(re.compile(LINE).groupindex) | groups


@pytest.mark.parametrize('line, groups', [
    ('nurse:2', dict(words='nurse', senses='2')),
    ('nurse: 2, 0-1', dict(words='nurse', senses='2, 0-1')),
    ('nurse,guard:3-5,10=0.5', dict(words='nurse,guard', senses='3-5,10', factor='0.5')),
    ('nurse:1=-2', dict(words='nurse', senses='1', factor='-2')),
    ('*:1 = .5', dict(words='*', senses='1', factor='.5')), (',:3', dict(words=',', senses='3')),
    ('::3', dict(words=':', senses='3')), ('topic:3', dict(words='topic', senses='3')),
    ('nurse: she / he ', dict(words='nurse', senses='she / he')),
    ('MacBook: Apple -> HP', dict(words='MacBook', old='Apple', new='HP')),
    ('a,*:Apple->HP', dict(words='a,*', old='Apple', new='HP')),
    ('topic music', dict(bag='music')),
    ('topic A, B = 3', dict(bag='A, B', strength='3')),
    ('@nouns.txt:10', dict(words='@nouns.txt', senses='10')),
    ('@C:/nouns.txt:10=2', dict(words='@C:/nouns.txt', senses='10', factor='2')),
    (r'@C:\me\nouns.txt: Apple -> HP', dict(words=r'@C:\me\nouns.txt', old='Apple', new='HP')),
    (r'topic @C:\bag.txt=1', dict(bag=r'@C:\bag.txt', strength='1')),
    (r'@C:\a.safetensors', dict(file=r'C:\a.safetensors')),
    ('@a.safetensors=0.5', dict(file='a.safetensors', times='0.5'))])
def test_a_line_is_parsed_into_its_groups(line, groups):
    """A line scales senses, replaces a fact, turns up a topic, or names a learned edit."""
    assert parse_lines([line]) == [parsed(**groups)]


def test_a_file_of_edits_stands_for_its_lines_in_order(folder):
    """A file can hold edits; # starts a comment."""
    Path('edits.txt').write_text('\ufeff# of she\nshe:3\r\n\n@words.txt:1\n', encoding='utf-8')
    assert parse_lines(['he:0', '@edits.txt', 'he:2']) == [
        parsed(words='he', senses='0'), parsed(words='she', senses='3'),
        parsed(words='@words.txt', senses='1'), parsed(words='he', senses='2')]


@pytest.mark.parametrize('name', [r'C:\edits.txt', '~/edits.txt'])
def test_a_file_of_edits_may_be_on_a_drive_or_at_home(name, folder, monkeypatch):
    """The colon of a Windows path ends no word, and ~ is the home folder."""
    monkeypatch.setenv('HOME', str(folder))
    Path(name.removeprefix('~/')).write_text('he:0')
    assert parse_lines([f'@{name}']) == [parsed(words='he', senses='0')]


@pytest.mark.parametrize('line', [
    ':1', 'nurse:', 'nurse:1=nan', ': he -> she', 'topic music=1,2,3', 'topic music=1,1,1,-1',
    '*:she/he', 'nurse,*:she/he', 'nurse:one', 'nurse:1,', 'nurse:-1', 'nurse:2-1', 'nurse:4',
    'nurse:he/he', 'topic ,', 'nurse:1,she:2', 'nurse:she/he -> they', 'nurse: she -> he=0.5'])
def test_a_line_that_cannot_be_read_is_no_edit(line):
    """A line in an unknown form is refused, not read as something else."""
    loaded = toy_loaded()
    with pytest.raises(UserError):
        make_edit(parse_lines([line]), loaded.model, loaded.encoding)


def test_prompts_choose_the_sense_of_a_pair():
    """A pair chooses the sense that adds most in prompts with the word, not most at weight 1."""
    model = lively(3, vocab_size=ENCODING.n_vocab, block_size=8)
    texts = [torch.tensor([ids]) for ids in ([NURSE, SHE, NURSE, HP], [APPLE, NURSE], [HE, APPLE])]
    total = torch.zeros(3)
    for idx in texts:
        alpha, scores = explain(model, idx, model.wte.weight[SHE] - model.wte.weight[HE])
        total += (alpha * scores)[idx == NURSE].sum(0)
    at_weight_1, _ = find_senses('nurse', 'she/he', model, ENCODING, texts[2:])
    numbers, why = find_senses('nurse', 'she/he', model, ENCODING, texts)
    assert numbers == [total.abs().argmax().item()]
    assert f'{total[numbers[0]] / 2:+.2f} logits' in why  # the mean over prompts with the word
    assert numbers != at_weight_1


def test_a_word_of_several_tokens_is_edited_at_its_last():
    """An edit changes the last token of a word, and a pair compares that token's senses."""
    model = lively(vocab_size=PIECES.n_vocab)
    best = separation(model, torch.tensor([IST]), A, X).abs().argmax().item()
    numbers, _ = find_senses('xist', 'a/x', model, PIECES)
    assert numbers == [best]


def test_a_file_ends_its_lines_at_newlines_alone(folder):
    """Form feeds and other characters at which splitlines splits do not end a line."""
    line = 'The nurse\x85said\u2028that\x0cshe'
    Path('prompts.txt').write_text(f'{line}\r\nmore\n', encoding='utf-8')
    assert read_lines('@prompts.txt') == [line, 'more']


@pytest.mark.parametrize('content', [b'\n \n', b'\xff'])
def test_a_file_without_words_is_named(content, folder):
    """The error names a file that is blank or not text."""
    Path('words.txt').write_bytes(content)
    with pytest.raises(UserError, match='words.txt'):
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
    assert word_id(CHINESE, '\u4e2d') == 258


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


def test_a_prompt_is_cut_to_its_end(capsys):
    """One notice says how many tokens are read, and another that the prompt ends in a space."""
    loaded = toy_loaded(block_size=5)
    start = 'the nurse said that she was he and '
    ids = loaded.encode(start)
    assert loaded.read_prompt(start).tolist() == [ids[-5:]]
    said = capsys.readouterr().out
    assert f' {len(ids)} tokens' in said
    assert 'space' in said
