"""Claims about docs/exercise.md: its checks accept a solution, and nothing less."""

import re

import pytest
import torch
from helpers import ROOT

PAGE = (ROOT / 'docs' / 'exercise.md').read_text(encoding='utf-8')
START, *CHECKS = re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
SOLUTIONS = (ROOT / 'tests' / 'exercise.py').read_text(encoding='utf-8')


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


MISTAKES = {
    'no residual': (1, 'e + self.ln_0(e)', 'self.ln_0(e)'),
    'senses split wrongly': (1, 'C.unflatten(-1, (self.n_sense, -1))',
                             'C.unflatten(-1, (-1, self.n_sense)).mT'),
    'no mask': (2, 'scores.masked_fill(is_later, -math.inf)', 'scores'),
    'mask hides itself too': (2, 'triu(1)', 'triu()'),
    'no square root': (2, 'math.sqrt(key.shape[-1])', 'key.shape[-1]'),
    'softmax over queries': (2, '.softmax(-1)', '.softmax(-2)'),
    'keys before queries': (2, 'query, key =', 'key, query ='),
    'alpha transposed': (3, 'blij,bjld', 'blji,bjld'),
    'logits of e': (4, 'linear(o,', 'linear(e,'),
    'senses of h': (4, 'self.sense_network(e)', 'self.sense_network(self.contextualizer(e))'),
    'C ignored': (4, 'if C is None', 'if True'),
    'C changed in place': (5, 'C.clone()', 'C'),
    'sense counted from 1': (5, '[:, :, sense]', '[:, :, sense - 1]'),
    'every word scaled': (5, 'chosen[idx == word] *=', 'chosen *='),
    'scaled by the rest': (5, '*= factor', '*= 1 - factor')}


@pytest.mark.parametrize('step, right, wrong', MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_solution_of_the_exercise_fails(step, right, wrong, capsys):
    """Each mistake fails the check of its step."""
    assert SOLUTIONS.count(right) == 1
    with pytest.raises(AssertionError):
        pass_checks(SOLUTIONS.replace(right, wrong))
    assert capsys.readouterr().out.count('ok') == step - 1
