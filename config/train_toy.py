# A Backpack on the toy world, three minutes on two CPU cores: python train.py config/train_toy.py
dataset = 'toy'
n_layer = 2
n_head = 4
n_embd = 64
block_size = 64
max_iters = 3000
# With AdamW for all parameters, the gender sense does other things too (see docs/dev/notes.md).
muon_lr = 5e-3
learning_rate = 3.5e-3  # for AdamW, which trains embeddings, biases and norms
warmup_iters = 150
weight_decay = 0.45  # the sum of rate * decay over all steps is 3, as in the paper's code
eval_interval = 500
eval_iters = 20
log_interval = 50
compile = False  # compiling takes longer than it saves in so short a run
