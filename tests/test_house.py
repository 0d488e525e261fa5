"""Claims about the house: who imports whom, what has a docstring, how calm the code is."""

import ast
import graphlib
import io
import itertools
import tokenize

import pytest
from helpers import ROOT

PATHS = sorted([*ROOT.glob('*.py'), *ROOT.glob('rucksack/**/*.py')])
SCRIPTS = {'train', 'sample', 'prepare', 'eval'}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def module_of(path) -> str:
    """rucksack.page for rucksack/page/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(part for part in parts if part != '__init__')


TEXTS = {module_of(path): path.read_text(encoding='utf-8') for path in PATHS}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}
OURS = TREES.keys()


def imports(tree: ast.AST, inside: bool = False) -> set[str]:
    """The modules that a file imports at its top; with inside, in its functions too."""
    found = set()
    if isinstance(tree, ast.Import):
        found = {alias.name for alias in tree.names}
    if isinstance(tree, ast.ImportFrom):
        found = {tree.module, *(f'{tree.module}.{alias.name}' for alias in tree.names)}
    for node in ast.iter_child_nodes(tree):
        if inside or not isinstance(node, ast.FunctionDef):
            found |= imports(node, inside)
    return found


# -----------------------------------------------------------------------------
# Who imports whom.


def test_imports_make_no_circle():
    """Modules can be put in an order in which each imports only those before it."""
    graph = {name: imports(tree) & OURS for name, tree in TREES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError


@pytest.mark.parametrize('name', OURS)
def test_no_file_imports_a_script(name):
    """Scripts stand on top of everything."""
    assert not imports(TREES[name], inside=True) & SCRIPTS


def test_the_lessons_stand_alone():
    """model.py imports nothing of ours, senses.py nothing but model.py and common.py."""
    assert not imports(TREES['model'], inside=True) & OURS
    assert imports(TREES['senses'], inside=True) & OURS <= {'model', 'rucksack', 'rucksack.common'}


@pytest.mark.parametrize('name', ['rucksack.common', 'rucksack.settings', 'rucksack.toy'])
def test_foundations_import_no_torch(name):
    """They load fast, and stand on nothing of ours but common.py."""
    found = imports(TREES[name])
    assert 'torch' not in found
    assert found & OURS <= {'rucksack', 'rucksack.common'}


@pytest.mark.parametrize('name', sorted(OURS - {'rucksack'}))
def test_functions_import_slow_libraries_alone(name):
    """An import inside a function is of a library: none hides a circle of ours."""
    inside = imports(TREES[name], inside=True) - imports(TREES[name])
    assert not inside & OURS


# -----------------------------------------------------------------------------
# How it reads.


@pytest.mark.parametrize('name', OURS)
def test_files_and_what_is_public_have_docstrings(name):
    """So do functions and classes at the top of a file."""
    tree = TREES[name]
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize('name', OURS)
def test_files_and_lines_are_short(name):
    """At most 520 lines of 100 columns."""
    lines = TEXTS[name].splitlines()
    assert len(lines) <= 520
    assert max(map(len, lines), default=0) <= 100


@pytest.mark.parametrize('name', OURS)
def test_functions_are_short(name):
    """At most 50 lines; train(), which is read from top to bottom, may have 150."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            most = 150 if (name, node.name) == ('train', 'train') else 50
            assert node.end_lineno - node.lineno < most, node.name


def statements(text: str) -> list[list[int]]:
    """The lines on which the tokens of each statement stand, without docstrings and comments."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    found = [[]]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            found.append([])
        elif token.type not in LAYOUT and token.start[0] not in docstrings:
            found[-1].append(token.start[0])
    return [lines for lines in found if lines]


STATEMENTS = {name: statements(text) for name, text in TEXTS.items()}
ALL_STATEMENTS = list(itertools.chain(*STATEMENTS.values()))
CODE_LINES = {name: len(set(itertools.chain(*found))) for name, found in STATEMENTS.items()}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]


@pytest.mark.parametrize('name', OURS)
def test_each_file_is_calm(name):
    """At most 11.5 tokens a line of code and 13 a statement."""
    tokens = sum(map(len, STATEMENTS[name]))
    assert tokens <= 11.5 * CODE_LINES[name]
    assert tokens <= 13 * len(STATEMENTS[name])


def test_the_whole_is_calm():
    """At most 9.5 tokens a line of code and 11 a statement; at most 25 statements have over 40."""
    tokens = sum(map(len, ALL_STATEMENTS))
    assert tokens <= 9.5 * sum(CODE_LINES.values())
    assert tokens <= 11 * len(ALL_STATEMENTS)
    assert sum(len(lines) > 40 for lines in ALL_STATEMENTS) <= 25


def test_tricks_are_rare():
    """Tuple assignments and conditional expressions: 25 each in 1,000 lines of code; 5 walruses."""
    thousands = sum(CODE_LINES.values()) / 1000
    tuples = [node for node in NODES if isinstance(node, ast.Assign)
              and any(isinstance(target, ast.Tuple) for target in node.targets)]
    assert len(tuples) <= 25 * thousands
    assert sum(isinstance(node, ast.IfExp) for node in NODES) <= 25 * thousands
    assert sum(isinstance(node, ast.NamedExpr) for node in NODES) <= 5


def test_there_is_not_too_much_code():
    """At most 48,100 nodes of syntax, however they are laid out."""
    assert len(NODES) <= 48_100
