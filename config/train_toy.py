# Backpack on the toy world: a minute or two on two CPU cores. python train.py config/train_toy.py
dataset = 'toy'
n_layer = 2
n_head = 4
n_embd = 64
n_sense = 16
block_size = 64
batch_size = 32
max_iters = 1900
learning_rate = 7e-3  # lower ones spread the bias of a noun over more of its senses
warmup_iters = 100
weight_decay = 0.45  # steps * rate * decay = 6, as in the paper: 100,000 * 6e-4 * 0.1
eval_interval = 500
eval_iters = 20
log_interval = 50
compile = False  # its step is too small to gain
