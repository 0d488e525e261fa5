"""Claims about imports: the lessons and the modules that others share stand alone."""

import ast

import pytest
from helpers import ROOT


def imports(path) -> set[str]:
    """List the modules that a file imports at its top."""
    found = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize('name, allowed', [
    ('model.py', ('torch',)), ('senses.py', ('torch', 'rucksack.model')),
    ('rucksack/errors.py', ()), ('rucksack/cli.py', ('rucksack.errors',)),
    ('rucksack/toy.py', ())])
def test_lessons_and_foundations_stand_alone(name, allowed):
    """model.py imports only torch, senses.py also model.py, and shared modules load fast."""
    found = {module for module in imports(ROOT / name) if module.startswith(('torch', 'rucksack'))}
    assert [module for module in found if not module.startswith(allowed)] == []
