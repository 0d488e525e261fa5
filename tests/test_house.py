"""Claims about the house, by ast: who imports whom, what has a docstring, how long files are."""

import ast
import graphlib

from conftest import ROOT

FILES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path.read_text(encoding='utf-8')
         for path in (*ROOT.glob('*.py'), *ROOT.glob('rucksack/*.py'))}
TREES = {name: ast.parse(text) for name, text in FILES.items()}


def imports(tree: ast.AST, inside: bool = False) -> set[str]:
    """The modules that a file imports while it is imported itself; with inside, in its functions too."""
    found = {alias.name for alias in tree.names} if isinstance(tree, ast.Import) else set()
    if isinstance(tree, ast.ImportFrom):
        found = {tree.module, *(f'{tree.module}.{alias.name}' for alias in tree.names)}
    nodes = [node for node in ast.iter_child_nodes(tree) if inside or not isinstance(node, ast.FunctionDef)]
    return found.union(*(imports(node, inside) for node in nodes))


def test_who_imports_whom():
    """No file imports a script, model.py none of ours, common, settings and toy no torch; no circle."""
    graph = {name: imports(tree) & FILES.keys() for name, tree in TREES.items()}
    assert not graph['model'] and not {'train', 'sample', 'prepare', 'eval'} & set().union(
        *(imports(tree, inside=True) for tree in TREES.values()))
    for name in ('rucksack.common', 'rucksack.settings', 'rucksack.toy'):
        assert graph[name] <= {'rucksack.common'} and 'torch' not in {m[:5] for m in imports(TREES[name])}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError where there is one


def test_files_are_short_and_say_what_they_hold():
    """At most 520 lines of 110 columns; files and what is public in them have docstrings."""
    for name, tree in TREES.items():
        lines = FILES[name].splitlines()
        assert len(lines) <= 520, name
        assert max(map(len, lines), default=0) <= 110, name
        for node in [tree, *(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))]:
            assert ast.get_docstring(node) or node is not tree and node.name[0] == '_', f'{name}: {node}'
