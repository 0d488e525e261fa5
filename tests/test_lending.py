"""Claims about rucksack/lending.py: what a Backpack's edit does to another model."""

import json
from pathlib import Path

import pandas
import pytest
import torch
from helpers import error_of, lively, make_data, save, say, text, toy_loaded
from torch.testing import assert_close

from rucksack import sample
from rucksack.edits.lending import Lent, cached, probs_under
from rucksack.looks import probs as probs_verb
from rucksack.paper import eval as tables
from rucksack.paper import gender
from rucksack.senses import add_to_senses, at_last, pad, scale_senses
from rucksack.tokenizer import ids_that_differ, load_tokenizer, words_tokenizer

OFF = scale_senses(list(range(20)), [0, 2], 0.0)
MOVES = add_to_senses(torch.tensor([3, 5]), torch.tensor([1, 1]), torch.ones(2, 24).double())


def pair(n_sense: int = 0, strength: float = 1.0, **changes) -> Lent:
    """Lend a model the senses of a Backpack with another width."""
    other = lively(1, n_embd=16, n_sense=n_sense, **changes)
    return Lent(other, lively(2), strength).requires_grad_(False)


@pytest.mark.parametrize('strength', [0.3, 1.0, 2.0])
@pytest.mark.parametrize('n_sense', [0, 4])
def test_lent_logits_are_those_of_the_equation(n_sense, strength):
    """log p' is the other model's log p plus strength times what the edit adds to log p."""
    lent = pair(n_sense, strength, vocab_size=48, n_vocab=40)  # the other model has rows of padding
    idx = text()
    edited_C = OFF(idx, lent.lender.senses(idx))
    edited, unedited = (lent.lender(idx, C=C).log_softmax(-1) for C in (edited_C, None))
    other = lent.other(idx)[..., :40].log_softmax(-1)
    expected = (other + strength * (edited - unedited)).log_softmax(-1)
    assert_close(lent(idx, C=edited_C).log_softmax(-1), expected)


@pytest.mark.parametrize('edit, strength', [
    (scale_senses([39], [0], 0.0), 1.0), (scale_senses(None, [0], 1.0), 1.0), (OFF, 0.0)])
def test_an_edit_that_changes_nothing_changes_no_bit(edit, strength):
    """No bit changes if the text lacks the word, the factor is 1, or the strength is 0."""
    lent = pair(strength=strength)
    idx = text() % 39
    assert torch.equal(lent(idx, C=edit(idx, lent.senses(idx))), lent.other(idx))
    before, after = probs_under(lent, idx, [None, edit])
    assert torch.equal(after, before)


@pytest.mark.parametrize('edit', [None, OFF, MOVES])
@pytest.mark.parametrize('temperature', [0, 1.3])
@pytest.mark.parametrize('n_sense, n_prompt, block_size', [(0, 4, 12), (4, 30, 7), (0, 12, 20)])
def test_the_cache_changes_no_lent_text(n_sense, n_prompt, block_size, temperature, edit):
    """Below and past the shorter block_size, ids are the same with and without a cache."""
    lent = pair(n_sense, 0.7, block_size=block_size)
    torch.manual_seed(0)
    plain = lent.generate(text(n_prompt), 20, temperature, edit=edit)
    torch.manual_seed(0)
    assert torch.equal(cached(lent).generate(text(n_prompt), 20, temperature, edit=edit), plain)


def test_probabilities_under_edits_are_those_of_the_logits():
    """The lender's weights are computed once for all edits and texts of different lengths."""
    lent = pair(strength=0.7)
    idx, last = pad([[5, 7, 9, 3], [8, 2]])
    logits = [lent(idx, C=edit(idx, lent.senses(idx))) for edit in (OFF, MOVES)]
    expected = torch.stack([at_last(one, last).softmax(-1) for one in logits])
    assert_close(probs_under(lent, idx, [OFF, MOVES], last), expected)


def test_an_edit_that_writes_into_c_is_lent_as_any_other():
    """An edit that changes the senses in place has its effect, and the next one starts anew."""
    def in_place(idx, C):
        C[:, :, 0] = 0
        return C

    lent = pair()
    copying = scale_senses(None, [0], 0.0)
    found = probs_under(lent, text(), [copying, in_place, None])
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], probs_under(lent, text(), [None])[0])


def test_a_vocabulary_of_another_size_is_refused():
    """A vocabulary of another size raises ValueError before any logits are added."""
    with pytest.raises(ValueError, match='48'):
        pair(vocab_size=48)


def test_ids_that_differ_are_those_with_other_bytes():
    """If a word changes and another is added, all ids from the changed word on differ."""
    one, other = (load_tokenizer(words_tokenizer([words])) for words in ('a bb cc', 'a bb dd e'))
    assert ids_that_differ(one, other) == [257, 258, 259]


@pytest.fixture(autouse=True)
def runs(folder, monkeypatch):
    """Make a Transformer, a Backpack that lends its senses, a text for both, and two nouns."""
    monkeypatch.setattr(gender, 'NOUNS', ['nurse', 'table'])
    for name, n_sense, block_size in (('other', 0, 128), ('lender', 4, 96)):
        loaded = toy_loaded(n_sense, block_size=block_size, seed=n_sense)
        save(f'out/{name}', loaded.model, loaded.tokenizer)
    ids = loaded.encode(' the nurse said that she they') * 9
    make_data([0], ids, tokenizer=loaded.tokenizer, vocab_size=loaded.encoding.n_vocab)


LENT = ['--from=out/other', '--lender=out/lender', '--edit', 'nurse:1-2', '--strength=2']


def test_probs_are_of_the_pair(capsys):
    """probs shows the other model under the lent edit."""
    say(probs_verb, capsys, 'she,he', *LENT, '--start=the nurse', '--csv=x.csv')
    row, = pandas.read_csv('x.csv').to_dict('records')
    other, lender = (toy_loaded(k, block_size=n, seed=k) for k, n in ((0, 128), (4, 96)))
    off = scale_senses(lender.encode(' nurse'), [1, 2], 0.0)
    idx = torch.tensor([lender.encode('the nurse')])
    probs = probs_under(Lent(other.model, lender.model, 2.0), idx, [None, off])
    she, = lender.encode(' she')
    assert [row['p(she)'], row['p(she) after']] == pytest.approx(probs[:, 0, she].tolist())


def test_an_explanation_is_of_the_lender(capsys):
    """--explain shows the terms of the lender's senses, and a line says so."""
    own = say(sample, capsys, '--from=out/lender', '--edit', 'nurse:1-2', '--explain', 'she')
    lent = say(sample, capsys, *LENT, '--explain', 'she')
    assert lent.splitlines()[-16:] == own.splitlines()[-16:]
    assert 'lender, out/lender' in lent


@pytest.mark.parametrize('table, column', [('loss', 'perplexity'), ('gender', 'bias ratio')])
def test_a_table_has_a_row_of_the_lent_edit(table, column, capsys):
    """The other model's unedited rows come first; strength 0 changes nothing."""
    found = {}
    for name, argv in {'own': LENT[:1], 'lent': LENT, 'nothing': [*LENT, '--strength=0']}.items():
        say(tables, capsys, table, *argv, '--csv=x.csv')
        found[name] = pandas.read_csv('x.csv')[column].tolist()
    n = len(found['own'])
    assert found['lent'][:n] == found['own']
    assert found['lent'][n] != found['own'][0]
    assert found['nothing'][n] == pytest.approx(found['own'][0])


def test_examples_of_a_lent_edit_have_neighbours(capsys):
    """The three measures are printed, with texts that the other model writes about the subject."""
    row = {'prefix': ' the nurse said that', 'suffix': ' she', 'subject': ' nurse'}
    Path('a.jsonl').write_text(json.dumps(row))
    said = say(tables, capsys, 'examples', *LENT, '--data=a.jsonl')
    assert 'same subject, other texts' in said


@pytest.mark.parametrize('table, data', [
    ('loss', 'text.txt'), ('lambada', 'lambada_test.jsonl'), ('wikitext', 'wiki.test.raw')])
def test_a_short_lender_changes_nothing_at_strength_0(table, data, capsys):
    """If the lender has a shorter block_size, the unedited row also reads only that many tokens."""
    short = toy_loaded(4, block_size=8, seed=4)
    save('out/short', short.model, short.tokenizer)
    text = 'the nurse said that she ' * 9
    Path('text.txt').write_text(text)
    Path('lambada_test.jsonl').write_text(json.dumps({'text': text.strip()}))
    Path('wiki.test.raw').write_text(f' = A = \n\n {text}\n')
    argv = ['--from=out/other', '--lender=out/short', '--edit', 'nurse:1', '--strength=0']
    printed = say(tables, capsys, table, *argv, '--data', data, '--csv=x.csv')
    unedited, lent, *_ = pandas.read_csv('x.csv').filter(like='perplexity').values.tolist()
    assert lent == unedited
    assert 'changed at 0 positions' in printed


@pytest.mark.parametrize('script, argv, fact', [
    (probs_verb, ['she', '--edit', 'nurse:1', '--strength=2'], '--lender'),
    (sample, ['--from=out/lender', '--lender=out/other', '--edit', 'nurse:1'], 'out/other'),
    (sample, ['--from=english_gpt', '--lender=out/lender', '--edit', 'nurse:1'], '16,641 ids'),
    (sample, [*LENT, '--strength=-1'], "'-1'"),
    (tables, ['gender', '--from=out/lender', '--strength=2'], '--lender')])
def test_what_cannot_be_lent_is_refused_in_one_line(script, argv, fact, capsys):
    """A missing edit, lender or sense, or a different vocabulary, gives one line and no file."""
    assert fact in error_of(script, capsys, *argv)
