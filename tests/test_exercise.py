"""Claims about docs/exercise.md: its checks accept a solution, and nothing less."""

import re

import pytest
import torch
from helpers import ROOT

from rucksack.tokenizer import ENGLISH

PAGE = (ROOT / 'docs' / 'exercise.md').read_text(encoding='utf-8')
START, *CHECKS = re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
SOLUTIONS = (ROOT / 'tests' / 'exercise.py').read_text(encoding='utf-8')

pytestmark = pytest.mark.skipif(not ENGLISH.is_dir(), reason='no Backpack in pretrained/')


def pass_checks(solutions: str) -> None:
    """Run the page's start, then solutions, then its checks in order."""
    variables = {}
    try:
        for code in (START, solutions, *CHECKS):
            exec(code, variables)
    finally:
        torch.set_grad_enabled(True)


def test_the_solutions_of_the_exercise_pass_its_checks(capsys):
    """All five print ok, and the last the numbers that the page has."""
    pass_checks(SOLUTIONS)
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == ['ok'] * 4
    assert f'`{said[4]}`' in PAGE


@pytest.mark.parametrize('right, wrong', [
    ('e + self.ln_0(e)', 'self.ln_0(e)'), ('triu(1)', 'triu(2)'), ('key.shape[-1]', 'self.n_sense'),
    ('blij,bjld', 'blji,bjld'), ('linear(o,', 'linear(e,'), ('if C is None', 'if True'),
    ('C.clone()', 'C'), ('*= factor', '= factor')])
def test_a_wrong_solution_of_the_exercise_fails(right, wrong):
    """One mistake in each step."""
    assert SOLUTIONS.count(right) == 1
    with pytest.raises(AssertionError):
        pass_checks(SOLUTIONS.replace(right, wrong))
