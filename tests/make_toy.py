"""Remake the toy model of the quick tests: PYTHONPATH=. python tests/make_toy.py

This trains config/train_toy.py for 400 steps, enough to learn a little, and writes the weights in
bfloat16, with the rest of the checkpoint, to tests/fixtures/toy.pt.
"""

import tempfile
from pathlib import Path

import torch
from helpers import TOY, log, train_toy

KEPT = ('model_config', 'tokenizer', 'settings', 'step')


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder:
        run = train_toy(Path(folder), 400) / 'out' / 'toy'
        state = torch.load(run / 'ckpt.pt', weights_only=True)
        val_loss = float(log(run)[-1]['val_loss'])
    weights = {name: weight.bfloat16() for name, weight in state['model'].items()}
    kept = {name: state[name] for name in KEPT}
    torch.save(kept | {'model': weights, 'val_loss': val_loss}, TOY)
