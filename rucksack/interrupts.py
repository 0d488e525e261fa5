"""Let Ctrl-C end a script without a traceback while it imports torch, which takes a second.

Scripts import this first; cli.run_cli takes over later. Other programs are left alone.
"""

import signal
import sys
from pathlib import Path

from rucksack.cli import HOME

program = getattr(sys.modules['__main__'], '__file__', None)
is_ours = program is not None and Path(program).resolve().parent == HOME.resolve()
if is_ours and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
