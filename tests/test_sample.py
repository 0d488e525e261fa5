"""Claims about sample.py on a trained toy: it prints what the model and its senses say."""

import math
import os
import re
import shutil
from pathlib import Path

import pandas
import pytest
import torch
from helpers import World, error_of, save, say, toy_loaded
from torch import Tensor
from torch.nn import functional as F

from rucksack import sample
from rucksack.cli import printable
from rucksack.sample_tables import separate
from rucksack.senses import (
    STRENGTHS,
    Edit,
    compose,
    replace_word,
    scale_senses,
    senses_after,
    topic,
)
from rucksack.words import bag_ids, scores_of_bags

SHORT = ['--num-samples', '1', '--max-new-tokens', '1']
SENSES = range(16)


@pytest.fixture
def world(out) -> World:
    """Load the toy in out/toy, with the default prompt."""
    return World()


def ask(capsys, *argv: str) -> dict[str, list]:
    """Return the rows of a command's tables, as --csv writes them."""
    say(sample, capsys, *argv, '--csv', 'tables.csv', *SHORT)
    tables = {}
    found = pandas.read_csv('tables.csv', dtype=str, keep_default_na=False)
    for row in found.to_dict('records'):
        rows = tables.setdefault(row.pop('rucksack_table'), [])
        rows.append([cell for cell in row.values() if cell != ''])
    return tables


def assert_same(found, expected) -> None:
    """Assert that two tables, rows or cells are the same, with numbers equal to within 1e-4."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for its, wanted in zip(found, expected):
            assert_same(its, wanted)
    elif isinstance(expected, str):
        assert found == expected
    else:
        assert float(found) == pytest.approx(expected, abs=1e-4, rel=0)


@pytest.mark.parametrize('flags', [
    '--edit nurse:3 nurse:5', '--senses-off nurse:3 --edit nurse:5=0'])
def test_senses_off_shows_the_next_words_before_and_after(flags, world, capsys):
    """Next words match senses turned off by hand; --edit takes the same lines."""
    after = world.probs(scale_senses([world.id('nurse')], [3, 5], 0.0))
    rows = ask(capsys, *flags.split())['next words']
    assert_same(rows, world.next_words(world.probs(), after))


def test_words_of_an_edit_that_no_prompt_has_are_named(out, capsys):
    """Words that no prompt has are named once for all prompts."""
    edit = ['--edit', 'nurse:1', 'sheriff:0', 'baker:3']
    said = say(sample, capsys, '--start', 'The {} said', '--words', 'nurse,guard', *edit, *SHORT)
    assert re.findall('Not in any prompt.*: (.*)', said) == ['sheriff, baker']


@pytest.mark.parametrize('argv, differ', [(['--show', 'nurse:3'], 1), ([], 1),
                                          (['--from', 'out/toy', '--show', 'nurse:3'], 0)])
def test_of_a_model_we_chose_sense_numbers_are_said_to_differ(argv, differ, out, capsys):
    """Unless --from names the model, a line says that sense numbers differ between models."""
    about, *_ = say(sample, capsys, *argv, *SHORT).splitlines()
    assert about.count('Sense numbers differ between models') == differ


def test_the_sense_that_a_pair_turns_off_is_printed(world, capsys):
    """sample.py prints the sense that it turns off, and probabilities before and after."""
    said = say(sample, capsys, '--senses-off', 'nurse:he/she', *SHORT)
    best = int(re.search(r'\nOff: sense (\d+) of nurse, ', said)[1])
    after = world.probs(scale_senses([world.id('nurse')], [best], 0.0))
    for word, p_before, p_after in world.next_words(world.probs(), after):
        assert re.search(rf"\n' ?{re.escape(word)}' +{p_before:.3f}  {p_after:.3f}", said), word


def test_show_of_a_pair_has_the_sense_that_an_edit_turns_off(out, capsys):
    """The pair chooses sense 10 after the prompt, and 11 at weight 1."""
    said = say(sample, capsys, '--from', 'english', '--senses-off', 'nurse:she/he', *SHORT)
    rows = ask(capsys, '--from', 'english', '--show', 'nurse:she/he')['show nurse:she/he']
    assert {f'\nOff: sense {sense} of nurse' in said for sense, *_ in rows} == {True}


def test_all_edits_apply_in_order_in_one_command(out, capsys):
    """Scaled senses, replacements and topics from --edit and --senses-off act as one edit."""
    start = 'The MacBook is made by'
    world = World(prompt=start)
    model = world.model
    words = ('MacBook', 'Apple', 'HP', 'by', 'is')
    macbook, apple, hp, by, verb = map(world.id, words)
    film = scores_of_bags(model, [bag_ids(world.encoding, ['film', 'tv', 'video'])])[0]
    edits = [
        scale_senses(None, [2], 0.0),
        scale_senses([verb], [3, 4, 5], 0.5),
        replace_word(model, [macbook], apple, hp),
        replace_word(model, [macbook], hp, by),
        topic(model, film, STRENGTHS[1])]
    argv = ['--start', start, '--temperature', '0', '--senses-off', '*:2', '--edit', 'is:3-5=0.5',
            'MacBook: Apple -> HP', 'MacBook: HP -> by', '--senses-off', 'topic film_tv_video=1']
    rows = ask(capsys, *argv)['next words']
    assert_same(rows, world.next_words(world.probs(), world.probs(*edits)))

    made = model.generate(world.idx, 60, temperature=0, edit=compose(edits))
    said = say(sample, capsys, *argv)
    assert f'\nafter 1: {up_to_its_end(world, made[0].tolist())}\n' in said
    assert '\nReplaced: MacBook gives HP what it gave Apple\n' in said
    assert '\nTopic: film, tv, ' in said


def test_a_file_of_prompts_asks_about_each(out, capsys):
    """Each prompt in a file gets the same tables and texts as it gets alone."""
    starts = ['The nurse said that', 'The sheriff said that']
    Path('prompts.txt').write_text('\n'.join(starts))
    edit = ['--senses-off', '*:3']
    together = ask(capsys, '--start', '@prompts.txt', *edit)
    said = say(sample, capsys, '--start', '@prompts.txt', *edit)
    for start in starts:
        alone = ask(capsys, '--start', start, *edit)
        assert together[f'next words: {start}'] == alone['next words']
        _, before, after = say(sample, capsys, '--start', start, *edit).partition('\nbefore 1: ')
        assert before + after in said


def test_probs_are_those_of_each_prompt(out, capsys):
    """Each prompt has a row with the log odds of two words, before and after the edit."""
    expected = []
    for word in ('nurse', 'sheriff'):
        row = [f'My {word} said that']
        world = World(prompt=row[0])
        edit = scale_senses([world.id('nurse')], [3, 5], 0.0)
        for p in (world.probs(), world.probs(edit)):
            she, he = p[[world.id('she'), world.id('he')]].tolist()
            row += [she, he, math.log(she / he)]
        expected.append(row)
    start = ['--start', 'My {} said that', '--words', 'nurse', '--words', 'sheriff']
    probs = ['--senses-off', 'nurse:3,5', '--probs', 'she', '--probs', 'he']
    assert_same(ask(capsys, *start, *probs)['probs'], expected)


def test_equal_prompts_have_a_row_each(out, capsys):
    """Equal lines in a file have a row each."""
    lines = ['The nurse', 'The king', 'The nurse']
    Path('prompts.txt').write_text('\n'.join(lines))
    rows = ask(capsys, '--start', '@prompts.txt', '--probs', 'she')['probs']
    assert [prompt for prompt, _ in rows] == lines
    tables = ask(capsys, '--start', '@prompts.txt', '--explain', 'she')
    assert len(tables) == 3


@pytest.mark.parametrize('start, words', [('@prompts.txt', []), ('A {}', []), ('{}', ['A {}'])])
def test_a_prompt_may_hold_braces_or_begin_with_at(start, words, out, capsys):
    """Without --words, braces stand for themselves, and so does @ in a file of prompts."""
    Path('prompts.txt').write_text('@nurse said')
    words = ['--words', *words] if words else []
    (prompt, _), = ask(capsys, '--start', start, *words, '--probs', 'she')['probs']
    assert prompt == ('@nurse said' if start == '@prompts.txt' else 'A {}')


def test_a_csv_holds_any_prompt(out, capsys):
    """A prompt with a carriage return is quoted in the CSV file and does not end its row."""
    prompt = 'The nurse\rsaid that'
    assert ask(capsys, '--start', prompt, '--probs', 'she')['probs'][0][0] == prompt


@pytest.mark.parametrize('pairs', ['she/he', '@pairs.txt'])
def test_find_has_a_row_for_each_of_words(pairs, world, capsys):
    """A row says how far each sense separates a pair, or a file's pairs on average."""
    Path('pairs.txt').write_text('she/he\nher/his\n')
    apart = world.E[world.id('she')] - world.E[world.id('he')]  # (d,)
    if pairs == '@pairs.txt':
        apart = (apart + world.E[world.id('her')] - world.E[world.id('his')]) / 2
    rows = []
    for word in ('nurse', 'sheriff'):
        C = world.model.senses(torch.tensor(world.id(word)))  # (k, d)
        rows.append([word, *(C @ apart).tolist()])
    found = ask(capsys, '--find', pairs, '--words', 'nurse,sheriff')
    assert_same(found[f'find {pairs}'], rows)


DRAWN = ['--seed', '3', '--num-samples', '3', '--temperature', '0.7', '--top-k', '5']


def up_to_its_end(world: World, ids: list[int]) -> str:
    """Decode a text up to its end-of-text, without the end-of-text of an empty prompt."""
    text = world.encoding.decode(ids).removeprefix('<|endoftext|>')
    return text.partition('<|endoftext|>')[0]


def drawn(world: World, idx: Tensor, edit: Edit | None = None) -> list[str]:
    """Return the three texts that generate draws with the flags in DRAWN."""
    texts = []
    for seed in (3, 4, 5):
        torch.manual_seed(seed)
        made = world.model.generate(idx, 60, 0.7, 5, edit=edit)
        texts.append(up_to_its_end(world, made[0].tolist()))
    return texts


def test_samples_are_those_of_generate_before_and_after(world, capsys):
    """Text i is drawn with the seed S + i - 1, and ends before the end-of-text."""
    said = say(sample, capsys, '--senses-off', '*:0,1,2,3', *DRAWN)
    before = drawn(world, world.idx)
    after = drawn(world, world.idx, scale_senses(None, [0, 1, 2, 3], 0.0))
    assert before != after
    for i in range(3):
        assert f'\nbefore {i + 1}: {before[i]}\n' in said
        assert f'\nafter {i + 1}: {after[i]}\n' in said


def test_samples_of_an_empty_prompt_begin_a_text(world, capsys):
    """An empty prompt gives what generate draws after an end-of-text, which is not printed."""
    texts = drawn(world, torch.tensor([[world.encoding.eot_token]]))
    lines = [f'\n{i}: {text}\n' for i, text in enumerate(texts, 1)]
    assert ''.join(lines) in say(sample, capsys, '--start', '', *DRAWN)


def test_a_dtype_is_that_of_the_weights_that_write(out, capsys):
    """Texts before and after an edit are written in bfloat16; tables stay in float32."""
    argv = ['--senses-off', 'nurse:3', '--num-samples', '20', '--temperature', '2', '--dtype']
    tables, _, text = say(sample, capsys, *argv, 'float32').partition('before 1')
    tables_of_half, _, text_of_half = say(sample, capsys, *argv, 'bfloat16').partition('before 1')
    assert tables_of_half == tables
    assert text_of_half != text


def test_without_from_the_newest_backpack_is_taken(out, capsys):
    """The default model is the newest Backpack, not a newer Transformer, and a line names it."""
    loaded = toy_loaded(k=0)
    save('out/gpt', loaded.model, loaded.tokenizer)
    for name, time in (('old', 3e9), ('new', 4e9), ('gpt', 5e9)):
        file = Path('out', name, 'ckpt.pt')
        if name != 'gpt':
            file.parent.mkdir()
            shutil.copy('out/toy/ckpt.pt', file)
        os.utime(file, (time, time))
    about, _ = say(sample, capsys, *SHORT).split('\n', 1)
    shape = r'Backpack out/new: 2 layers of width 64, 16 senses, a vocabulary of \d+ tokens'
    assert re.match(f'{shape}; the newest in out/', about)


def test_export_writes_what_from_reads(out, capsys):
    """An exported folder loads as the same model, words and texts, and is never replaced."""
    assert 'a/b/exported: written\n' in say(sample, capsys, '--export', 'a/b/exported')
    assert os.listdir('a/b') == ['exported']
    line = error_of(sample, capsys, '--export', 'a/b/exported')
    assert 'exported cannot be made (Directory not empty); give' in line
    argv = ['--senses-off', 'nurse:3', '--from']
    _, own = say(sample, capsys, *argv, 'out/toy').split('\n', 1)
    _, exported = say(sample, capsys, *argv, 'a/b/exported').split('\n', 1)
    assert exported == own


def test_show_has_the_senses_asked_for_as_edits_leave_them(world, capsys):
    """--show lists the words with the largest and smallest C . E; -2 C raises what C lowered."""
    C = world.model.senses(torch.tensor(world.id('nurse')))  # (k, d)
    expected = []
    for l, own in ((9, -2 * C[9]), (3, C[3])):
        scores = world.E @ own
        lowered = [-cell if isinstance(cell, float) else cell for cell in world.top(-scores, 10)]
        expected.append([l, '+', *world.top(scores, 10)])
        expected.append([l, '-', *lowered])
    tables = ask(capsys, '--edit', 'nurse:9=-2', '--show', 'nurse:9,3')
    assert_same(tables['show nurse:9,3'], expected)


def test_looks_that_ignore_an_edit_say_so(out, capsys):
    """A line says that --similar ignores edits, because the table alone does not show that."""
    assert 'without the edit' in say(sample, capsys, '--edit', 'nurse:3', '--similar', 'quick')


def test_find_has_the_senses_that_most_separate_two_words(world, capsys):
    """Senses are ranked by mean size over all words, divided by the std of a sense's logits."""
    a = world.id('she')
    b = world.id('he')
    C = world.model.senses(torch.arange(len(world.E)))  # (V, k, d)
    apart = C @ (world.E[a] - world.E[b])  # (V, k)
    mean_size = apart.abs().mean(0)
    ratio = mean_size / (C @ world.E.T).std(-1).mean(0)
    expected = []
    for l in ratio.argsort(descending=True).tolist():
        row = [l, mean_size[l].item(), ratio[l].item()]
        for w in apart[:, l].abs().topk(8).indices.tolist():
            row += [world.word(w), apart[w, l].item()]
        expected.append(row)
    assert_same(ask(capsys, '--find', 'she/he')['find she/he'], expected)


def test_find_ranks_the_sense_of_a_model_of_width_1():
    """At width 1, the covariance of embeddings is a number; the spread is |C| times their std."""
    loaded = toy_loaded(k=1, n_embd=1, n_head=1)
    E = loaded.model.wte.weight.detach()  # (V, 1)
    C = loaded.model.senses(torch.arange(len(E)))  # (V, 1, 1)
    (_, mean_size, ratio, *_), = separate(loaded, 'she/he', [('she', 'he')]).rows
    assert mean_size / ratio == pytest.approx((C.abs().mean() * E.std()).item(), rel=1e-4)


def test_find_has_the_senses_that_speak_for_a_bag(world, capsys):
    """Senses with the highest affinities over all words are listed with the words they raise."""
    bag = [world.id('music'), world.id('guitar')]
    C = world.model.senses(torch.arange(len(world.E)))  # (V, k, d)
    logits = C @ world.E.T  # (V, k, V)
    scores = logits[..., bag].sum(-1) / logits.amax(-1)  # (V, k)
    expected = []
    for place in scores.flatten().topk(20).indices.tolist():
        w, l = divmod(place, len(SENSES))
        expected.append([scores[w, l].item(), world.word(w), l, *world.top(world.E @ C[w, l], 5)])
    assert_same(ask(capsys, '--find', 'music+guitar')['find music+guitar'], expected)


def test_similar_has_the_nearest_words_in_each_sense(world, capsys):
    """Words are ranked by cosine (last row: its minimum over senses), without the word itself."""
    quick = world.id('quick')
    C = world.model.senses(torch.arange(len(world.E)))  # (V, k, d)
    alike = F.cosine_similarity(C, C[quick], dim=-1)  # (V, k)
    alike[quick] = -1
    expected = [[l, *world.top(alike[:, l], 8)] for l in SENSES]
    expected.append(['min', *world.top(alike.amin(-1), 8)])
    assert_same(ask(capsys, '--similar', 'quick')['similar quick'], expected)


def test_sweep_has_the_next_words_at_five_weights(world, capsys):
    """--sweep scales senses from 0 to 1, on top of the edit; the first and last get bars."""
    nurse = world.id('nurse')
    edit = scale_senses([nurse], [9], -2.0)
    columns = []
    for factor in (0, 0.25, 0.5, 0.75, 1):
        columns.append(world.probs(edit, scale_senses([nurse], list(SENSES), factor)))
    tables = ask(capsys, '--edit', 'nurse:9=-2', '--sweep', 'nurse:0-15')
    assert_same(tables['sweep nurse:0-15'], world.next_words(*columns))
    assert re.search('1 +0: +1: *\n', say(sample, capsys, '--sweep', 'nurse'))


@pytest.mark.parametrize('asked, words', [
    (['she'], ['she']), (['she/he'], ['she', 'he']), ([], [])])
def test_explain_has_all_terms_the_largest_first(asked, words, world, capsys):
    """--explain lists alpha * C . E for a word, the difference of two, or the likeliest word."""
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
    assert_same(ask(capsys, '--edit', 'nurse:0-3=0.5', '--explain', *asked)['explain'], expected)


def test_control_characters_do_not_reach_the_terminal(out, capsys):
    """Control characters are left out of tables, texts and errors."""
    evil = 'The nurse\x1b[31m\x07\u202e'
    said = say(sample, capsys, '--start', evil, '--explain', 'she')
    said += say(sample, capsys, '--start', evil, '--probs', 'she')
    said += say(sample, capsys, '--start', evil, '--edit', 'nurse\x1b\x07:3', *SHORT)
    said += error_of(sample, capsys, '--edit', f'{evil}:3')
    said += error_of(sample, capsys, '--from', evil) + toy_loaded(name=evil).about()
    assert not set(evil).intersection(said).intersection('\x1b\x07\u202e')


@pytest.mark.parametrize('text', ['a\u200db', 'a\tb', 'a\u00a0b', 'a\u3000b', 'a\u00adb'])
def test_characters_of_other_scripts_stay(text):
    """Output keeps joiners in emoji and Persian words, tabs in code, and non-ASCII spaces."""
    assert printable(text) == text
