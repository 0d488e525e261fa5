"""Claims about the command line, on the trained toy model."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import conftest
import pytest
import torch

import sample
from rucksack import data as data_py
from rucksack import grammar as grammar_py
from rucksack.common import UserError as PrepareError
from rucksack.grammar import bag_of_words, word_id
from rucksack.published import from_pretrained
from senses import STRENGTHS, affinity, compose, replace_word, scale_senses, separation, similarity, topic

ROOT = Path(__file__).parent.parent


@pytest.fixture
def out(toy, monkeypatch):
    """The folder with out/toy is the working directory."""
    monkeypatch.chdir(toy)
    return toy


say = partial(conftest.say, sample)
error_of = partial(conftest.error_of, sample, printed=1)  # which model; no half of an answer


def table(text: str) -> dict[str, tuple[float, float]]:
    """Word -> probability before and after, from the printed table."""
    rows = re.findall(r"^'(.+?)' +([\d.]+) +([\d.]+)", text, re.MULTILINE)
    return {word.strip(): (float(before), float(after)) for word, before, after in rows}


def test_senses_off_prints_the_next_words_of_the_model_before_and_after(out, capsys):
    """The table holds the ten likeliest words with the model's own probabilities, edited by zeroing the
    sense by hand."""
    model = from_pretrained('out/toy')
    encoding = data_py.load_tokenizer(model.tokenizer)
    idx = torch.tensor([encoding.encode_ordinary(grammar_py.PROMPT)])
    nurse = word_id(encoding, 'nurse')

    def by_hand(idx, C):
        C = C.clone()
        for b, t in (idx == nurse).nonzero().tolist():
            C[b, t, [3, 5]] = 0
        return C

    with torch.no_grad():
        before, after = (model(idx, edit=e)[0][0, -1].softmax(-1) for e in (None, by_hand))
    rows = table(say(capsys, '--senses-off', 'nurse:3,5', '--max-new-tokens', '1'))
    assert len(rows) >= 10
    for word, pair in rows.items():
        probs = [p[word_id(encoding, word)].item() for p in (before, after)]
        assert pair == pytest.approx(probs, abs=6e-4)
    assert set(before.topk(10).indices.tolist()) <= {word_id(encoding, word) for word in rows}


def test_a_pair_of_words_picks_the_sense_that_most_separates_them(out, capsys):
    """nurse:she/he turns off argmax |C(nurse)_l . (E_she - E_he)|, says which, and she loses to he."""
    model = from_pretrained('out/toy')
    encoding = data_py.load_tokenizer(model.tokenizer)
    nurse, she, he = (word_id(encoding, w) for w in ('nurse', 'she', 'he'))
    C = model.senses(torch.tensor([[nurse]]))[0, 0]
    scores = [(C[l] @ model.wte.weight[she] - C[l] @ model.wte.weight[he]).item() for l in range(16)]
    torch.testing.assert_close(separation(model, nurse, she, he), torch.tensor(scores))
    best = max(range(16), key=lambda l: abs(scores[l]))
    picked = say(capsys, '--senses-off', 'nurse:she/he')
    assert f'Off: sense {best} of nurse, which most separates' in picked
    assert table(picked) == table(say(capsys, '--senses-off', f'nurse:{best}'))
    (she_before, she_after), (he_before, he_after) = table(picked)['she'], table(picked)['he']
    assert she_after / he_after < 0.8 * she_before / he_before


def test_flags_repeat_and_take_several_values(out, capsys):
    """--senses-off a b and --senses-off a --senses-off b are the same; before equals after where the
    word is absent."""
    both = table(say(capsys, '--senses-off', 'nurse:1', 'room:2,3'))
    assert both == table(say(capsys, '--senses-off', 'nurse:1', '--senses-off', 'room:2,3'))
    absent = say(capsys, '--senses-off', 'sheriff:0')
    assert 'sense 0 of sheriff (not a word of the prompt)' in absent
    assert all(before == after for before, after in table(absent).values())


def test_sampling_is_decided_by_the_seed(out, capsys):
    """The same seed gives the same texts before and after an edit that does nothing, another seed others."""
    texts = [say(capsys, '--seed', str(seed), '--num-samples', '3') for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0].count('When the nurse came into the room,') == 3
    unchanged = say(capsys, '--seed', '1', '--num-samples', '3', '--senses-off', 'sheriff:0',
                    '--max-new-tokens', '9')
    before, after = re.split(r'after 1: ', unchanged)
    assert re.findall(r'before \d: (.*)', before) == [after.splitlines()[0],
                                                      *re.findall(r'after \d: (.*)', after)]


def test_temperature_zero_and_an_empty_prompt(out, capsys):
    """At temperature 0 all samples are the same; an empty prompt starts a story; a story ends at its
    end-of-text."""
    lines = re.findall(r'^\d: (.*)', say(capsys, '--temperature', '0'), re.MULTILINE)
    assert lines[0] == lines[1] != grammar_py.PROMPT
    story = say(capsys, '--start', '', '--temperature', '0', '--num-samples', '1', '--max-new-tokens', '200')
    assert re.search(r'^1: [A-Z].*\.$', story, re.MULTILINE) and '<|endoftext|>' not in story


def test_a_long_prompt_is_cropped_and_says_so(out, capsys, tmp_path):
    """Of a prompt longer than block_size the last block_size tokens are read, from a file too."""
    (tmp_path / 'p.txt').write_text(' '.join(['The nurse smiled and she waved.'] * 30))
    text = say(capsys, '--start', f'FILE:{tmp_path}/p.txt', '--max-new-tokens', '5')
    assert 'The prompt has 210 tokens; the model reads the last 64.' in text


def test_a_prompt_of_any_length_is_read():
    """A prompt is encoded in pieces as tiktoken does it whole, and where that gives up: a million spaces."""
    try:
        encoding = data_py.load_tokenizer({'name': 'gpt2'})
    except PrepareError:
        pytest.skip("GPT-2's vocabulary cannot be had")
    text = 'The nurse\r\n\n  said, "I\'m here".\t' * 5000  # 145,000 characters
    assert grammar_py.read_prompt(text, encoding, 10 ** 7) == (encoding.encode_ordinary(text), '')
    assert len(grammar_py.read_prompt(' ' * 1_000_000 + 'x', encoding, 10 ** 7)[0]) == 1_000_000


def test_without_from_the_newest_backpack_is_taken(out, capsys, tmp_path, monkeypatch):
    """The newest checkpoint in out/ that is a Backpack is used and named; without one the error names
    the command."""
    assert say(capsys).startswith('out/toy/ckpt.pt: Backpack with 16 senses a word')
    monkeypatch.chdir(tmp_path)
    assert 'python train.py config/train_toy.py' in error_of(capsys)
    for name, days in (('old', 2), ('new', 1)):
        shutil.copytree(out / 'out' / 'toy', tmp_path / 'out' / name)
        os.utime(tmp_path / 'out' / name / 'ckpt.pt', (days * -86400 + 1e9,) * 2)
    assert say(capsys).startswith('out/new/ckpt.pt')


# -----------------------------------------------------------------------------
# Look and explain.


@pytest.fixture
def backpack(out):
    """The model that sample.py takes, and its tokenizer."""
    model = from_pretrained('out/toy')
    return model, data_py.load_tokenizer(model.tokenizer)


@torch.no_grad()
def test_show_prints_the_highest_and_lowest_words_of_each_sense(backpack, capsys):
    """A row + and a row - for each of the 16 senses of each word, with the scores C . E of the words, and
    the norm; lines fit the terminal; an edit shows in them."""
    model, encoding = backpack
    text = say(capsys, '--show', 'nurse', 'quickly')
    C = model.senses(torch.tensor([word_id(encoding, 'quickly')]))[0]  # (k, d)
    rows = re.findall(r'^ +(\d+) +([\d.]+)  \+ (.*)\n +- (.*)$', text.split('quickly:')[1], re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(16)) and text.count('\n') == 2 * (3 + 2 * 16) + 1
    for l, norm, high, low in rows:
        scores = model.project(C[int(l)])[:model.config.n_vocab].sort().values
        for cells, expected in ((high, scores.flip(0)), (low, scores)):
            printed = [float(x) for x in re.findall(r"""['"] ([+-][\d.]+)""", cells)]
            assert len(printed) >= 4 and printed == pytest.approx(expected[:len(printed)].tolist(), abs=6e-3)
        assert float(norm) == pytest.approx(C[int(l)].norm().item(), abs=0.06)
    assert max(map(len, text.splitlines()[1:])) <= 100
    off = say(capsys, '--show', 'nurse', '--senses-off', 'nurse:3')
    assert re.findall(r'^ +(\d+) +0\.0  ', off, re.MULTILINE) == ['3']


def test_find_ranks_senses_by_how_they_separate_two_words(backpack, capsys):
    """Over one word the 16 senses by |C . (E_she - E_he)|; over the vocabulary by its mean, which puts the
    sense first that separates them for the role nouns too."""
    model, encoding = backpack
    she, he, nurse = (word_id(encoding, w) for w in ('she', 'he', 'nurse'))
    scores = separation(model, nurse, she, he)
    rows = re.findall(r'^ +(\d+) +([+-][\d.]+)$', say(capsys, '--find', 'she/he', '--word', 'nurse'), re.M)
    assert [int(l) for l, _ in rows] == scores.abs().argsort(descending=True).tolist()
    assert [float(x) for _, x in rows] == pytest.approx([scores[int(l)].item() for l, _ in rows], abs=6e-3)
    spread = separation(model, None, she, he).abs().mean(0)
    rows = re.findall(r'^ +(\d+) +([\d.]+)  \'', say(capsys, '--find', 'she/he'), re.M)
    assert [int(l) for l, _ in rows] == spread.argsort(descending=True).tolist()


def test_find_ranks_pairs_by_affinity(backpack, capsys):
    """A+B ranks (word, sense) pairs of the whole vocabulary by Eq. 17."""
    model, encoding = backpack
    scores = affinity(model, bag_of_words(encoding, ['music', 'guitar']))
    rows = re.findall(r"^ *([\d.]+)  '(.*?)' +(\d+)  '", say(capsys, '--find', 'music+guitar'), re.MULTILINE)
    best = scores.flatten().topk(20).values.tolist()
    assert [float(row[0]) for row in rows] == pytest.approx(best, abs=6e-3)
    for score, word, l in rows:
        ids = encoding.encode_ordinary(word)
        assert len(ids) > 1 or scores[ids[0], int(l)].item() == pytest.approx(float(score), abs=6e-3)


def test_similar_prints_neighbours_in_each_sense(backpack, capsys):
    """A row for each sense and one for the minimum (Eq. 13 and 14), or just the one asked for; the word
    itself is left out."""
    model, encoding = backpack
    table = similarity(model, word_id(encoding, 'quick'))
    text = say(capsys, '--similar', 'quick')
    rows = dict(re.findall(r"^ +(\w+)  ('.*)$", text, re.MULTILINE))
    assert list(rows) == [*map(str, range(16)), 'min']
    for name, row in [('5', table[:, 5]), ('min', table.min(-1).values)]:
        cells = re.findall(r"""['"](.+?)['"] ([+-][\d.]+)""", rows[name])
        row[word_id(encoding, 'quick')] = -2
        assert [float(x) for _, x in cells] == pytest.approx(row.topk(len(cells)).values.tolist(), abs=6e-3)
    assert say(capsys, '--similar', 'quick', '--sense', '5').splitlines()[4:] == [f'    5  {rows["5"]}']
    assert say(capsys, '--similar', 'quick', '--min').splitlines()[4:] == [f'  min  {rows["min"]}']


@pytest.mark.parametrize('what', ['she', 'she/he', None])
def test_explain_prints_terms_that_add_up(backpack, capsys, what):
    """The terms, the rest and the total of --explain add up to the logit (or the difference of two) of the
    edited model; each term is its alpha times its C . E; the largest come first."""
    model, encoding = backpack
    text = say(capsys, '--explain', *([what] if what else []), '--senses-scale', 'nurse:0-3=0.5')
    idx = torch.tensor([encoding.encode_ordinary(grammar_py.PROMPT)])
    with torch.no_grad():
        edit = scale_senses([word_id(encoding, 'nurse')], [0, 1, 2, 3], 0.5)
        logits = model(idx, edit=edit)[0][0, -1]
    ids = [word_id(encoding, w) for w in (what or 'she').split('/')]
    total = logits[ids[0]] - (logits[ids[1]] if len(ids) > 1 else 0)
    rows = re.findall(r"^ +([+-][\d.]+) +([\d.]+) +([+-][\d.]+)  '", text, re.MULTILINE)
    rows = [[float(x) for x in row] for row in rows]
    rest = float(re.search(r'([+-][\d.]+)  the other 113$', text, re.MULTILINE)[1])
    printed = float(re.search(r'([+-][\d.]+)  in all, ', text)[1])
    assert printed == pytest.approx(total.item(), abs=6e-4)
    assert sum(row[0] for row in rows) + rest == pytest.approx(printed, abs=0.01)
    assert all(row[0] == pytest.approx(row[1] * row[2], abs=0.01 + 0.001 * abs(row[2])) for row in rows)
    assert [abs(row[0]) for row in rows] == sorted((abs(row[0]) for row in rows), reverse=True)


def test_weights_are_a_heat_map_of_alpha(backpack, capsys, monkeypatch):
    """A row a sense, or their mean; under each word a block as high as its alpha; a narrow terminal gets
    several parts."""
    model, encoding = backpack
    alpha = model.alpha(torch.tensor([encoding.encode_ordinary(grammar_py.PROMPT)]))[0, :, -1]  # (k, T)
    head, *rows = say(capsys, '--weights').splitlines()[3:]
    assert head == 'sense  When the nurse came into the room ,' and len(rows) == 16
    for l, row in enumerate(rows):
        for j, start in enumerate([7, 12, 16, 22, 27, 32, 36, 41]):
            shown = row[start:start + 1] or ' '
            assert abs(' ▁▂▃▄▅▆▇█'.index(shown) / 8 - alpha[l, j]) <= 1 / 16 + 1e-6
    mean = say(capsys, '--weights', 'mean').splitlines()[4]
    assert mean.startswith(' mean  ')
    for j, start in enumerate([7, 12, 16, 22, 27, 32, 36, 41]):
        shown = mean[start:start + 1] or ' '
        assert abs(' ▁▂▃▄▅▆▇█'.index(shown) / 8 - alpha[:, j].mean()) <= 1 / 16 + 1e-6
    monkeypatch.setenv('COLUMNS', '30')
    narrow = say(capsys, '--weights', 'mean').splitlines()
    assert len(narrow) == 3 + 2 * 2 and max(map(len, narrow[3:])) <= 30


def test_sweep_goes_from_off_to_unchanged(backpack, capsys):
    """--sweep has the probabilities at weights 0, 0.25, 0.5, 0.75 and 1, the last those of the model."""
    model, encoding = backpack
    idx, nurse = torch.tensor([encoding.encode_ordinary(grammar_py.PROMPT)]), word_id(encoding, 'nurse')
    text = say(capsys, '--sweep', 'nurse:0-15')
    rows = re.findall(r"^'(.+?)'((?: +\d\.\d+)+)", text, re.MULTILINE)
    assert re.search(r'next word +0 +0.25 +0.5 +0.75 +1$', text, re.MULTILINE) and len(rows) >= 10
    with torch.no_grad():
        columns = [model(idx, edit=scale_senses([nurse], list(range(16)), f))[0][0, -1].softmax(-1)
                   for f in (0, 0.25, 0.5, 0.75, 1)]
    for word, numbers in rows:
        expected = [p[word_id(encoding, word.strip())].item() for p in columns]
        assert [float(x) for x in numbers.split()] == pytest.approx(expected, abs=6e-4)


# -----------------------------------------------------------------------------
# Edit.


def test_all_edits_add_up_in_one_command(backpack, capsys):
    """Senses off and scaled, * and ranges, replaced words and topics of several strengths compose to one
    edit; texts after it are those that generate writes with it."""
    model, encoding = backpack
    idx = torch.tensor([encoding.encode_ordinary('The MacBook is made by')])
    ids = {w: word_id(encoding, w) for w in ('MacBook', 'Apple', 'HP', 'iPhone', 'Sony', 'is')}
    edit = compose([
        scale_senses(None, [2], 0.0), scale_senses([ids['is']], [3, 4, 5], 0.5),
        replace_word(model, [ids['MacBook']], ids['Apple'], ids['HP']),
        replace_word(model, [ids['iPhone']], ids['Apple'], ids['Sony']),
        topic(model, affinity(model, bag_of_words(encoding, ['film', 'tv', 'video'])), STRENGTHS[1]),
        topic(model, affinity(model, bag_of_words(encoding, ['food', 'soup'])), (3, 2, 1.5, 1))])
    text = say(capsys, '--start', 'The MacBook is made by', '--senses-off', '*:2', '--senses-scale',
               'is:3-5=0.5', '--replace', 'MacBook: Apple -> HP', 'iPhone:Apple->Sony', '--topic',
               'film_tv_video', '--topic', 'food, soup', '--strength', '1', '3,2,1.5,1', '--temperature', '0')
    with torch.no_grad():
        pairs = [model(idx, edit=e)[0][0, -1].softmax(-1) for e in (None, edit)]
        written = model.generate(idx, 60, temperature=0, edit=edit)[0].tolist()
    for word, pair in table(text).items():
        assert pair == pytest.approx([p[word_id(encoding, word)].item() for p in pairs], abs=6e-4)
    assert f'after 1: {encoding.decode(written[:written.index(encoding.eot_token)])}\n' in text
    assert "what ' MacBook' says of ' Apple' it says of ' HP'\n" in text and 'Topic: film, tv, video' in text


def test_a_new_maker_is_named(out, capsys):
    """--replace "MacBook: Apple -> HP" makes HP the likeliest next word, where Apple was."""
    rows = table(say(capsys, '--start', 'The MacBook is made by', '--replace', 'MacBook: Apple -> HP'))
    assert rows['Apple'][0] > 0.5 and rows['HP'][1] > 0.5


def test_export_writes_what_from_reads(backpack, capsys, tmp_path):
    """--export writes a folder that --from takes for the same model, with the same words and texts."""
    folder = str(tmp_path / 'exported')
    assert 'written' in say(capsys, '--export', folder)
    one, two = (say(capsys, '--from', source, '--senses-off', 'nurse:3').split('\n', 1)[1]
                for source in ('out/toy', folder))
    assert one == two and 'exists' in error_of(capsys, '--export', folder)


# -----------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize('argv, message', [
    (['--senses-off', 'nurse:3', 'nurse:16'], 'senses 0 to 15'),
    (['--senses-off', 'nurse:3-16'], 'senses 0 to 15'),
    (['--senses-off', 'zebra:1'], "'zebra' is no single word of this vocabulary but ' ' + 'z'"),
    (['--senses-off', 'nurse'], 'WORD:SENSES'), (['--senses-off', 'nurse:x'], "'x' is neither"),
    (['--senses-off', 'nurse:she/zebra'], "'zebra'"), (['--senses-off', 'nurse:she/'], 'A/B'),
    (['--senses-scale', 'nurse:10'], 'FACTOR'), (['--senses-scale', 'nurse:10=much'], 'FACTOR'),
    (['--replace', 'MacBook: Apple'], 'WORD: OLD -> NEW'), (['--replace', 'Wii: HP -> Xerox'], 'Xerox'),
    (['--topic', ' , '], 'the bag of words is empty'),
    (['--topic', 'music', 'zebras'], "'zebras' is no word"),
    (['--topic', 'music', '--strength', '4'], '0, 1, 2 or 3'), (['--strength', '2'], '--topic'),
    (['--topic', 'music', '--strength', '1', '2'], '1 --topic and 2 --strength'),
    (['--show', 'zebra'], "'zebra'"), (['--find', 'she/'], 'A/B'), (['--find', 'she+zebra'], "'zebra'"),
    (['--find', 'she/he', '--word', 'zebra'], "'zebra'"), (['--word', 'nurse'], '--find A/B'),
    (['--find', 'music+guitar', '--word', 'nurse'], '--find A/B'), (['--sense', '3'], '--similar'),
    (['--similar', 'big', '--sense', '16'], 'senses 0 to 15'), (['--similar', 'zebra'], "'zebra'"),
    (['--similar', 'big', '--sense', '1', '--min'], 'not allowed'), (['--explain', 'zebra'], "'zebra'"),
    (['--explain', 'she/zebra'], "'zebra'"), (['--sweep', 'nurse'], 'WORD:SENSES'),
    (['--weights', 'median'], "'median'"), (['--export', '.'], 'exists'),
    (['--from', 'nowhere'], 'does not exist'), (['--start', 'FILE:nowhere.txt'], 'cannot be read as text'),
    (['--temperature', '-1'], 'from 0 to'), (['--top-k', '0'], 'from 1 to'),
    (['--num-samples', '9' * 5000], 'from 1 to 1000'), (['--senses-off', 'nurse:' + '9' * 5000], 'neither'),
    (['--senses-scale', 'nurse:1=1e300'], 'at most 1000'), (['--senses-off', 'nurse:he/he'], 'A/B'),
    (['--export', 'x', '--senses-off', 'nurse:1'], 'leave the edits out'), (['--device', 'meta'], 'meta'),
    (['--show', 'nurse', 'zebra'], "'zebra'"), (['--show', ''], "'' is no single word"),
    (['--from', ''], 'does not exist'), (['--from', 'a\nb\x1b[2J'], 'a b [2J'),
    (['--from', 'a' * 300], 'too long'), (['--export', 'a' * 300], 'too long'),
    (['--num-samples', 'two'], "'two'"),
    (['--device', 'abacus'], 'device abacus cannot be used'), (['--frobnicate'], '--help')])
def test_a_bad_command_is_one_line(argv, message, out, capsys):
    """Exit code 2 and one line that names what was given and what is allowed."""
    assert message in error_of(capsys, *argv)


@pytest.mark.parametrize('flag', [
    '--senses-off nurse:1', '--senses-scale nurse:1=2', '--replace nurse:she->he', '--topic music',
    '--show nurse', '--find she/he', '--find music', '--similar nurse', '--explain', '--weights',
    '--sweep nurse:1'])
def test_a_transformer_has_no_senses(flag, out, capsys):
    """Every flag that needs senses is refused for a Transformer; without one it writes text."""
    checkpoint = torch.load('out/toy/ckpt.pt', weights_only=True)
    checkpoint['model'] = {k: v for k, v in checkpoint['model'].items() if not k.startswith('sense_')}
    checkpoint['model_config']['n_sense'] = 0
    torch.save(checkpoint, 'gpt.pt')
    assert 'only a Backpack has senses' in error_of(capsys, '--from', 'gpt.pt', *flag.split(' ', 1))
    assert 'gpt.pt: Transformer' in say(capsys, '--from', 'gpt.pt', '--max-new-tokens', '3')


def test_weights_without_words_say_so(out, capsys):
    """The tiny fixtures have no tokenizer; a folder without config.json is named."""
    fixtures = ROOT / 'tests' / 'fixtures'
    assert 'no tokenizer is known' in error_of(capsys, '--from', str(fixtures / 'gpt2-tiny'))
    assert f'{fixtures}/config.json does not exist' in error_of(capsys, '--from', str(fixtures))


def test_the_command_works_as_typed(out):
    """python sample.py --senses-off nurse:10 in a fresh process ends with exit code 0 and shows both
    columns."""
    done = subprocess.run([sys.executable, ROOT / 'sample.py', '--senses-off', 'nurse:10'],
                          capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert len(table(done.stdout)) >= 10 and 'before 1: ' in done.stdout and 'after 2: ' in done.stdout
