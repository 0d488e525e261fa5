# Backpack on the toy world: a few minutes on two CPU cores. python train.py config/train_toy.py
dataset = 'toy'
n_layer = 2
n_head = 4
n_embd = 64
n_sense = 16
block_size = 64
batch_size = 32
max_iters = 2000
learning_rate = 3e-3
warmup_iters = 100
weight_decay = 0.3  # over 2,000 steps the 0.1 of the paper would hardly decay anything
eval_interval = 500
eval_iters = 20
log_interval = 50
