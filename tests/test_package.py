"""Claims about the installed package: it works in any folder, whatever files are in it."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from helpers import ROOT

pytest.importorskip('hatchling')
pytestmark = pytest.mark.slow

@pytest.fixture(scope='module')
def python(tmp_path_factory) -> Path:
    """Make a new environment with the wheel installed; torch and the rest come from ours."""
    folder = tmp_path_factory.mktemp('package')
    pip = [sys.executable, '-m', 'pip', '--quiet', 'wheel', '--no-deps', '--no-build-isolation']
    subprocess.run([*pip, '--wheel-dir', folder, ROOT], check=True)
    venv.create(folder / 'env', with_pip=False)
    site, = (folder / 'env').glob('lib/python*/site-packages')
    (site / 'ours.pth').write_text(sysconfig.get_path('purelib'))
    wheel, = folder.glob('rucksack_lm-*.whl')
    install = ['-m', 'pip', '--quiet', 'install', '--no-deps', '--target', site, wheel]
    subprocess.run([sys.executable, *install], check=True)
    return folder / 'env' / 'bin' / 'python'


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Make a folder with a person's own model.py, senses.py and train.py."""
    for name in ('model.py', 'senses.py', 'train.py'):
        (tmp_path / name).write_text('raise SystemExit("my own")')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('PYTHONPATH', raising=False)
    return tmp_path


def say(python: Path, *argv: str) -> str:
    """Return what Python prints with these arguments."""
    done = subprocess.run([python, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_is_not_the_clone(python, elsewhere):
    """The installed model.py and senses.py are inside the package, in the new environment."""
    found = say(python, '-c', 'import rucksack.model; print(rucksack.model.__file__)')
    assert str(python.parent.parent) in found


COMMAND = """
from importlib.metadata import entry_points
command, = entry_points(name='rucksack')
command.load()()
"""


@pytest.mark.parametrize('sample', [['-m', 'rucksack.sample'], ['-c', COMMAND, 'sample']])
def test_sample_runs_where_it_is_installed(sample, python, elsewhere):
    """Both python -m rucksack.sample and rucksack sample run, with the bundled model."""
    said = say(python, *sample, '--senses-off', 'nurse:10', '--num-samples', '0')
    assert "' she'" in said


def test_train_runs_where_it_is_installed(python, elsewhere):
    """An installed train.py runs for two steps, with a config that comes with the package."""
    say(python, '-m', 'rucksack.prepare', 'toy')
    said = say(python, '-m', 'rucksack.train', 'config/train_toy.py', '--max_iters=2',
               '--eval_iters=1', '--device=cpu')
    assert 'done: out/toy/ckpt.pt' in said
