"""Claims about docs/exercise.md: its checks accept a solution and reject many mistakes."""

import inspect
import re

import pytest
import torch
from helpers import ROOT

import rucksack
from rucksack import model

PAGE = (ROOT / 'docs' / 'exercise.md').read_text(encoding='utf-8')
START, *BLOCKS = re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
*STEPS, TOY, TRAINING, PUBLISHED = BLOCKS
PARTS = (model.SenseNetwork, model.SenseWeights, model.weighted_sum, model.mean_loss,
         model.Backpack)
SOLUTIONS = '\n'.join(map(inspect.getsource, PARTS))  # of steps 1 to 4
SOLUTIONS += (ROOT / 'tests' / 'exercise.py').read_text(encoding='utf-8')
ORDER = ['ok 1', 'reward 1', 'ok 2', 'ok 3', 'reward 2', 'ok 4', 'reward 3', 'ok 5', 'reward 4']
ENGLISH = rucksack.load('english')


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    """Run in the root of the clone; restore gradients; load the English model only once."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rucksack, 'load', lambda name: ENGLISH)
    yield
    torch.set_grad_enabled(True)


def run(solutions: str, *blocks: str) -> None:
    """Run the page's start, then solutions, then blocks of the page in order."""
    variables = dict(vars(model))
    for code in (START, solutions, *blocks):
        exec(code, variables)


def labels(printed: str) -> list[str]:
    """List what the passed checks printed: ok 1, reward 1, and so on, each once."""
    passed = re.findall(r'^(?:ok|reward) \d', printed, re.MULTILINE)
    return list(dict.fromkeys(passed))


VALUES = ['1.534 in all; 1.190 of it is sense 10 of nurse', '0.0: she 0.132, he 0.093',
          '0.25: she 0.175', '1.0: she 0.360, he 0.078', '2.0: she 0.649', '4.0: she 0.923']


@pytest.mark.parametrize('blocks, passed, values', [
    (STEPS, ORDER, VALUES), ([PUBLISHED], ['reward 6'], []),
    pytest.param([TOY, TRAINING], ['reward 5'], [], marks=pytest.mark.slow)],
    ids=['steps', 'published weights', 'training'])
def test_the_solutions_of_the_exercise_pass_its_checks(blocks, passed, values, capsys):
    """The solutions pass all checks and rewards of the page, and print its numbers."""
    run(SOLUTIONS, *blocks)
    printed = capsys.readouterr().out
    assert labels(printed) == passed
    assert [value for value in values if value not in printed] == []


MISTAKES = """
    ok 1 | r = e + self.ln_0(e) | e += self.ln_0(e); r = e
    ok 1 | r + self.mlp(self.ln_1(r)) | r + self.mlp(self.ln_1(e))
    ok 1 | C.unflatten(-1, (-1, e.shape[-1])) | C.view(*e.shape[:2], -1, e.shape[-1])
    ok 1 | MLP(d, config.sense_hidden, d) | MLP(d, 4 * d, d)
    reward 1 | [:english.config.n_vocab] @ c | [:english.config.n_vocab] @ -c
    reward 1 | [:english.config.n_vocab] @ c | @ c
    reward 1 | logits.topk(n) | logits.topk(4)
    ok 2 | scores.masked_fill(is_later, -math.inf) | scores
    ok 2 | split_heads(self.c_attn(h), 2, | split_heads(self.c_attn(h)[:2], 2,
    ok 2 | math.sqrt(query.shape[-1]) | math.sqrt(self.n_sense)
    ok 2 | query, key = | key, query =
    ok 3 | blij,bjld | blji,bjld
    ok 3 | torch.einsum( | sum(alpha[:, l] @ C[:, :, l] for l in range(16))  # (
    reward 2 | y.sum(1) | y.mean(1)
    reward 2 | attention(query, key, values, | attention(globals()['query'], key, values,
    reward 2 | attention(query, key, values, | attention(query, globals()['key'], values,
    reward 2 | values = C.transpose | values = globals()['C'].transpose
    ok 4 | C = self.sense_network(e) | C = self.sense_network(self.contextualizer(e))
    ok 4 | if C is None | if True
    ok 4 | mean_loss(logits, targets) | mean_loss(logits, targets.roll(-1))
    ok 4 | ignore_index=-1 | reduction='sum', ignore_index=-1
    ok 4 | ignore_index=-1 | ignore_index=-100
    ok 4 | logits = self.project(o) | logits = F.linear(o.view(2, *o.shape[1:]), E)
    ok 4 | Contextualizer(config) | Contextualizer(english.config)
    reward 3 | alpha[0, :, -1].T * scores | alpha[0, :, 7].T * scores
    reward 3 | model.sense_network(e)[0] @ v | english.sense_network(e)[0] @ v
    reward 3 | model.sense_network(e)[0] @ v | model.sense_network(e)[0] @ (E[she] - E[he])
    ok 5 | C.clone() | C
    ok 5 | [:, :, sense] | [:, :, sense - 1]
    ok 5 | chosen[idx == word] *= factor | chosen *= factor
    ok 5 | chosen[idx == word] *= factor | chosen[0][idx[0] == word] *= factor
    ok 5 | chosen[idx == word] *= factor | chosen[globals()['idx'] == word] *= factor
    ok 5 | *= factor | *= factor or 1
    reward 4 | (factor - 1) * added | factor * added
"""


@pytest.mark.parametrize('mistake', MISTAKES.strip().splitlines(), ids=str.strip)
def test_a_wrong_solution_of_the_exercise_fails(mistake, capsys):
    """Each mistake (its check, the right code, the wrong code) fails that check."""
    check, right, wrong = (part.strip() for part in mistake.split('|'))
    blocks = STEPS[:min(ORDER.index(check), len(STEPS) - 1) + 1]
    assert SOLUTIONS.count(right) == 1
    with pytest.raises((AssertionError, RuntimeError, LookupError)):
        run(SOLUTIONS.replace(right, wrong), *blocks)
    assert labels(capsys.readouterr().out) == ORDER[:ORDER.index(check)]
