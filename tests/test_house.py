"""Claims about imports between the files that git tracks."""

import ast
import graphlib
import subprocess

import pytest
from helpers import ROOT

TRACKED = subprocess.run(
    ['git', 'ls-files', '*.py'], cwd=ROOT, capture_output=True, text=True).stdout.split()
if not TRACKED:  # a copy without .git
    TRACKED = [str(path.relative_to(ROOT)) for path in ROOT.glob('[!.]*/**/*.py')]
    TRACKED += [path.name for path in ROOT.glob('*.py')]
PATHS = [ROOT / name for name in TRACKED if '/' not in name or name.startswith('rucksack/')]
IN_ROOT = {path.stem for path in PATHS if path.parent == ROOT}
SCRIPTS = {f'rucksack.{name}' for name in ('prepare', 'train', 'sample')}


def module_of(path) -> str:
    """Name a file's module: rucksack.page for its __init__.py, and rucksack.model for model.py."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    name = '.'.join(part for part in parts if part != '__init__')
    return name if parts[0] == 'rucksack' else f'rucksack.{name}'


TREES = {module_of(path): ast.parse(path.read_bytes()) for path in PATHS}
OURS = TREES.keys()


def imports(tree: ast.AST, inside: bool = False) -> set[str]:
    """List the modules that a file imports at its top; with inside, in its functions too."""
    found = set()
    if isinstance(tree, ast.Import):
        found = {alias.name for alias in tree.names}
    if isinstance(tree, ast.ImportFrom):
        names = {f'{tree.module}.{alias.name}' for alias in tree.names}
        found = names & TREES.keys() or {tree.module}  # a module of a package, or its own names
    for node in ast.iter_child_nodes(tree):
        if inside or not isinstance(node, ast.FunctionDef):
            found |= imports(node, inside)
    return found


def test_no_import_runs_in_a_circle():
    """No module imports itself through others, even in a function."""
    graph = {name: imports(tree, inside=True) & OURS for name, tree in TREES.items()}
    order = graphlib.TopologicalSorter(graph).static_order()  # raises CycleError
    assert set(order) == OURS


def test_no_file_imports_a_script_or_a_second_name():
    """No file imports a script, or model.py under any name but rucksack.model."""
    found = {name: imports(tree, inside=True) for name, tree in TREES.items()}
    assert {name: found[name] & (SCRIPTS | IN_ROOT) for name in OURS} == dict.fromkeys(OURS, set())


@pytest.mark.parametrize('name, allowed', [
    ('model', {'torch'}), ('senses', {'torch', 'rucksack.model'}), ('errors', set()),
    ('cli', {'rucksack.errors'}), ('toy', set())])
def test_lessons_and_foundations_stand_alone(name, allowed):
    """model.py imports only torch, senses.py also model.py, and shared modules load fast."""
    found = imports(TREES[f'rucksack.{name}'])
    assert found & {*OURS, 'torch'} <= allowed
