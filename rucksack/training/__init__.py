"""What train.py stands on: settings, starts, optimizers, the machine, the folder of a run."""
