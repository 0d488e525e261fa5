"""Claims about the house: who imports whom, what has a docstring, how long files are. Nothing is imported."""

import ast
import graphlib

import pytest
from conftest import ROOT

SCRIPTS = {'train', 'sample', 'prepare', 'eval'}
FILES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path
         for path in (*ROOT.glob('*.py'), *ROOT.glob('rucksack/*.py'))}
TREES = {name: ast.parse(path.read_text(encoding='utf-8')) for name, path in FILES.items()}
LINES = {name: path.read_text(encoding='utf-8').splitlines() for name, path in FILES.items()}
LIMITS = {'model': 480, 'senses': 280, 'train': 400, 'prepare': 260, 'sample': 330, 'eval': 140}


def imports(tree: ast.AST, inside: bool = False) -> set[str]:
    """The modules that a file imports while it is imported itself; with inside, in its functions too."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
        elif inside or not isinstance(node, ast.FunctionDef):
            found |= imports(node, inside)
    return found


def test_who_imports_whom():
    """No file imports a script; model.py nothing of ours and common, settings and toy no torch, until a
    function is called; and there is no circle."""
    graph = {name: imports(tree) & FILES.keys() - {'rucksack'} for name, tree in TREES.items()}
    assert not any(imports(tree, inside=True) & SCRIPTS for tree in TREES.values()) and not graph['model']
    for name in ('rucksack.common', 'rucksack.settings', 'rucksack.toy'):
        assert graph[name] <= {'rucksack.common'} and not any(m.startswith('torch') for m in imports(TREES[name]))
    graphlib.TopologicalSorter(graph).prepare()  # CycleError


@pytest.mark.parametrize('name', FILES)
def test_files_are_short_and_say_what_they_hold(name):
    """No file is longer than its limit, no line than 110 columns; each module and public name is described."""
    assert len(LINES[name]) <= LIMITS.get(name, 250) and max(map(len, LINES[name])) <= 110
    for node in [TREES[name], *TREES[name].body]:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            assert getattr(node, 'name', '').startswith('_') or ast.get_docstring(node), node.name


def test_all_of_it_can_be_read():
    """All Python but tests and config is at most 4,000 lines."""
    assert sum(map(len, LINES.values())) <= 4000
