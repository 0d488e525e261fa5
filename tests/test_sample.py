"""Claims about sample.py on a trained toy: the next words and texts, without and with an edit."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import World, error_of, save, say, toy_loaded
from torch import Tensor

from rucksack import sample
from rucksack.__main__ import VERBS
from rucksack.cli import printable
from rucksack.senses import STRENGTHS, Edit, compose, replace_word, scale_senses, topic
from rucksack.vocabulary import bag_ids, scores_of_bags

SHORT = ['--num-samples', '1', '--max-new-tokens', '1']


def assert_next_words(said: str, *probs: Tensor, world: World) -> None:
    """Assert that sample.py printed the likeliest words with their probabilities (V,)."""
    lines = re.findall(r"\n('.*?' +[\d.]+ +[\d.]+)", said)  # without bars
    found = [line.replace("'", '').split() for line in lines]
    expected = [[word.strip(), *map('{:.3f}'.format, numbers)]
                for word, *numbers in world.next_words(*probs)]
    assert found == expected


@pytest.mark.parametrize('flags', [
    '--edit nurse:3 nurse:5', '--senses-off nurse:3 --edit nurse:5=0', '--senses_off nurse:3,5'])
def test_senses_off_shows_the_next_words_before_and_after(flags, world, capsys):
    """Next words match senses turned off by hand; --edit takes the same lines."""
    after = world.probs(scale_senses([world.id('nurse')], [3, 5], 0.0))
    said = say(sample, capsys, *flags.split(), *SHORT)
    assert_next_words(said, world.probs(), after, world=world)


def test_words_of_an_edit_that_no_prompt_has_are_named(out, capsys):
    """Words that no prompt has are named once for all prompts."""
    start = ['--start', 'The nurse said', '--start', 'The guard said']
    said = say(sample, capsys, *start, '--edit', 'nurse:1', 'sheriff:0', 'baker:3', *SHORT)
    assert re.findall('Not in any prompt.*: (.*)', said) == ['sheriff', 'baker']


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
    said = say(sample, capsys, '--start', start, '--temperature', '0', '--senses-off', '*:2',
               '--edit', 'is:3-5=0.5', 'MacBook: Apple -> HP', 'MacBook: HP -> by',
               '--senses-off', 'topic film_tv_video=1')
    assert_next_words(said, world.probs(), world.probs(*edits), world=world)
    made = model.generate(world.idx, 60, temperature=0, edit=compose(edits))
    assert f'\nafter 1: {up_to_its_end(world, made[0].tolist())}\n' in said


def test_a_file_of_prompts_asks_about_each(out, capsys):
    """Each prompt in a file gets the same table and texts as it gets alone."""
    starts = ['The nurse said that', 'The sheriff said that']
    Path('prompts.txt').write_text('\n'.join(starts))
    edit = ['--senses-off', '*:3', *SHORT]
    said = say(sample, capsys, '--start', '@prompts.txt', *edit)
    for start in starts:
        _, table, *texts = say(sample, capsys, '--start', start, *edit).split('\n\n')
        assert table in said
        assert '\n\n'.join(texts) in said


def test_a_greedy_text_is_written_once(out, capsys):
    """At temperature 0 all texts would be the same."""
    said = say(sample, capsys, '--temperature', '0', '--num-samples', '3')
    assert re.findall(r'\n(\d): ', said) == ['1']


def test_another_flag_is_refused_with_the_names_of_the_verbs(out, capsys):
    """A flag that became a verb is not ignored, and its line names all verbs but the scripts."""
    line = error_of(sample, capsys, '--show', 'nurse')
    assert '--show' in line
    assert set(VERBS) - {'prepare', 'train', 'sample'} <= set(re.findall(r'\w+', line))


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


def test_a_dtype_is_that_of_the_weights_that_write(out, capsys):
    """Texts are written in bfloat16; the table stays in float32."""
    argv = ['--senses-off', 'nurse:3', '--num-samples', '9', '--max-new-tokens', '20',
            '--temperature', '2', '--dtype']
    table, _, text = say(sample, capsys, *argv, 'float32').partition('before 1')
    table_of_half, _, text_of_half = say(sample, capsys, *argv, 'bfloat16').partition('before 1')
    assert table_of_half == table
    assert text_of_half != text


def test_control_characters_do_not_reach_the_terminal(out, capsys):
    """Control characters are left out of texts and errors."""
    evil = 'The nurse\x1b[31m\x07\u202e'
    said = say(sample, capsys, '--start', evil, *SHORT)
    said += error_of(sample, capsys, '--from', evil) + toy_loaded(name=evil).about()
    assert not set(evil).intersection(said).intersection('\x1b\x07\u202e')


@pytest.mark.parametrize('text', ['a\u200db', 'a\tb', 'a\u00a0b', 'a\u3000b', 'a\u00adb'])
def test_characters_of_other_scripts_stay(text):
    """Output keeps joiners in emoji and Persian words, tabs in code, and non-ASCII spaces."""
    assert printable(text) == text
