"""Claims about the command line, on the trained toy model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sample
from model import from_pretrained
from senses import separation, word_id

ROOT = Path(__file__).parent.parent


@pytest.fixture
def out(toy, monkeypatch):
    """The folder with out/toy is the working directory."""
    monkeypatch.chdir(toy)
    return toy


def say(capsys, *argv: str) -> str:
    """What sample.py prints."""
    capsys.readouterr()
    sample.main([*argv, '--device', 'cpu'])
    return capsys.readouterr().out


def error_of(capsys, *argv: str) -> str:
    """What sample.py says on standard error, in one line, as it leaves with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sample.main(list(argv))
    text = capsys.readouterr().err
    assert stop.value.code == 2 and text.count('\n') == 1 and text.startswith('sample.py: ')
    return text


def table(text: str) -> dict[str, tuple[float, float]]:
    """Word -> probability before and after, from the printed table."""
    rows = re.findall(r"^'(.+?)' +([\d.]+) +([\d.]+)", text, re.MULTILINE)
    return {word.strip(): (float(before), float(after)) for word, before, after in rows}


def test_senses_off_prints_the_next_words_of_the_model_before_and_after(out, capsys):
    """The table holds the ten likeliest words with the model's own probabilities, edited by zeroing the
    sense by hand."""
    model = from_pretrained('out/toy')
    encoding = sample.load_tokenizer(model.tokenizer)
    idx = torch.tensor([encoding.encode_ordinary(sample.PROMPT)])
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
    encoding = sample.load_tokenizer(model.tokenizer)
    nurse, she, he = (word_id(encoding, w) for w in ('nurse', 'she', 'he'))
    C = model.senses(torch.tensor([[nurse]]))[0, 0]
    scores = [(C[l] @ model.wte.weight[she] - C[l] @ model.wte.weight[he]).item() for l in range(16)]
    torch.testing.assert_close(separation(model, nurse, she, he), torch.tensor(scores))
    best = max(range(16), key=lambda l: abs(scores[l]))
    picked = say(capsys, '--senses-off', 'nurse:she/he')
    assert f'Off: sense {best} of nurse' in picked
    assert table(picked) == table(say(capsys, '--senses-off', f'nurse:{best}'))
    (she_before, she_after), (he_before, he_after) = table(picked)['she'], table(picked)['he']
    assert she_after / he_after < 0.8 * she_before / he_before


def test_flags_repeat_and_take_several_values(out, capsys):
    """--senses-off a b and --senses-off a --senses-off b are the same; before equals after where the
    word is absent."""
    both = table(say(capsys, '--senses-off', 'nurse:1', 'room:2,3'))
    assert both == table(say(capsys, '--senses-off', 'nurse:1', '--senses-off', 'room:2,3'))
    absent = say(capsys, '--senses-off', 'sheriff:0')
    assert 'the prompt does not contain sheriff' in absent
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
    assert lines[0] == lines[1] != sample.PROMPT
    story = say(capsys, '--start', '', '--temperature', '0', '--num-samples', '1', '--max-new-tokens', '200')
    assert re.search(r'^1: [A-Z].*\.$', story, re.MULTILINE) and '<|endoftext|>' not in story


def test_a_long_prompt_is_cropped_and_says_so(out, capsys, tmp_path):
    """Of a prompt longer than block_size the last block_size tokens are read, from a file too."""
    (tmp_path / 'p.txt').write_text(' '.join(['The nurse smiled and she waved.'] * 30))
    text = say(capsys, '--start', f'FILE:{tmp_path}/p.txt', '--max-new-tokens', '5')
    assert 'The prompt has 210 tokens; the model reads the last 64.' in text


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


@pytest.mark.parametrize('argv, message', [
    (['--senses-off', 'nurse:16'], 'senses 0 to 15'), (['--senses-off', 'nurse:-1'], 'senses 0 to 15'),
    (['--senses-off', 'zebra:1'], "'zebra' is no single word of this vocabulary but ' ' + 'z'"),
    (['--senses-off', 'nurse'], 'WORD:SENSE'), (['--senses-off', 'nurse:x'], "'x' is neither"),
    (['--senses-off', 'nurse:she/zebra'], "'zebra'"), (['--senses-off', 'nurse:she/'], 'WORD:A/B'),
    (['--senses-off', ':3'], 'WORD:SENSE'),
    (['--from', 'nowhere'], 'does not exist'), (['--start', 'FILE:nowhere.txt'], 'cannot be read as text'),
    (['--temperature', '-1'], 'at least 0'), (['--top-k', '0'], 'at least 1'),
    (['--num-samples', 'two'], "'two'"),
    (['--device', 'abacus'], 'device abacus cannot be used'), (['--frobnicate'], '--help')])
def test_a_bad_command_is_one_line(argv, message, out, capsys):
    """Exit code 2 and one line that names what was given and what is allowed."""
    assert message in error_of(capsys, *argv)


def test_a_model_without_senses_or_words_says_so(out, capsys):
    """A GPT-2 has no senses to turn off, and the tiny fixtures have no tokenizer."""
    fixtures = ROOT / 'tests' / 'fixtures'
    assert 'no tokenizer is known' in error_of(capsys, '--from', str(fixtures / 'gpt2-tiny'))
    checkpoint = torch.load('out/toy/ckpt.pt', weights_only=True)
    checkpoint['model'] = {k: v for k, v in checkpoint['model'].items() if not k.startswith('sense_')}
    checkpoint['model_config']['n_sense'] = 0
    torch.save(checkpoint, 'gpt.pt')
    assert 'only a Backpack has senses' in error_of(capsys, '--from', 'gpt.pt', '--senses-off', 'nurse:1')
    assert 'gpt.pt: Transformer' in say(capsys, '--from', 'gpt.pt')


def test_the_command_works_as_typed(out):
    """python sample.py --senses-off nurse:10 in a fresh process ends with exit code 0 and shows both
    columns."""
    done = subprocess.run([sys.executable, ROOT / 'sample.py', '--senses-off', 'nurse:10'],
                          capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert len(table(done.stdout)) >= 10 and 'before 1: ' in done.stdout and 'after 2: ' in done.stdout
