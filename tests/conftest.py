"""What several tests share: one toy model, trained once, and how a script is called."""

import os
from pathlib import Path

import pytest

import prepare
import train

ROOT = Path(__file__).parent.parent
VOCABULARY = ROOT.parent / 'shared' / 'data' / 'tiktoken'
if VOCABULARY.is_dir():
    os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(VOCABULARY))


def say(script, capsys, *argv: str) -> str:
    """What a script prints, on the CPU."""
    capsys.readouterr()
    script.main([*argv, '--device', 'cpu'])
    return capsys.readouterr().out


def error_of(script, capsys, *argv: str, printed: int = 99) -> str:
    """What a script says on standard error, in one line, as it leaves with exit code 2; at most so many lines
    are on standard output by then."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(list(argv))
    shown, text = capsys.readouterr()
    assert stop.value.code == 2 and text.count('\n') == 1 and text.startswith(f'{script.__name__}.py: ')
    assert shown.count('\n') <= printed
    return text


@pytest.fixture(scope='session')
def toy(tmp_path_factory):
    """A folder with data/toy and out/toy: config/train_toy.py in fewer steps, steps x weight decay as there.

    TOY_SEED and TOY_STEPS in the environment change it.
    """
    folder, before = tmp_path_factory.mktemp('toy'), Path.cwd()
    seed = int(os.environ.get('TOY_SEED', 1337))
    steps = int(os.environ.get('TOY_STEPS', 1600))
    os.chdir(folder)
    try:
        prepare.main(['toy'])
        train.main([str(ROOT / 'config' / 'train_toy.py'), f'--seed={seed}', f'--max_iters={steps}',
                    f'--weight_decay={1200 / steps}', '--device=cpu'])
    finally:
        os.chdir(before)
    return folder
