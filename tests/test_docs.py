"""Claims about docs/python.md and the README: their Python runs, and prints something."""

import re

import pytest
from conftest import ROOT

from rucksack.published import ENGLISH, from_pretrained

RECIPES = (ROOT / 'docs' / 'python.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'^## (.*?)$.*?^```python\n(.*?)^```', RECIPES, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')
@pytest.mark.parametrize('i', range(8))
def test_a_recipe_runs_alone(i, tmp_path, monkeypatch, capsys):
    """In an empty folder, and it prints something; senses numbered anew move logits by rounding alone."""
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[i][1], variables := {})
    assert len(capsys.readouterr().out) > 20
    if BLOCKS[i][0] == 'Number the senses anew':
        own, other, idx = from_pretrained('english'), from_pretrained('renumbered'), variables['idx']
        assert own.senses(idx)[:, :, 10].equal(other.senses(idx)[:, :, 12])
        assert 0 < (own(idx) - other(idx)).abs().max() < 1e-4


def test_two_recipes_train(tmp_path, monkeypatch, capsys):
    """On one's own text; and an LSTM in place of the Transformer learns, to half the loss."""
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 10
    for _, code in BLOCKS[8:]:
        exec(code, {})
    first, last = map(float, capsys.readouterr().out.split('\n')[-2].split(' -> '))
    assert last < first / 2
