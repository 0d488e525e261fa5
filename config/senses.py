# Table 8: Mini with K senses and small sense MLPs, half as long, for 4 GPUs of 40 GB; K is 1, 4, 16 or 64:
# torchrun --nproc_per_node=4 train.py config/senses.py --n_sense=K
n_layer = 8
n_head = 8
n_embd = 640
n_sense = 16
sense_hidden = 640
dataset = 'openwebtext'
block_size = 512
batch_size = 16
gradient_accumulation_steps = 64  # 16 * 64 * 512 = 524,288 tokens a step, over all GPUs together
max_iters = 50_000
learning_rate = 6e-4
warmup_iters = 5000
min_lr = 0.0
weight_decay = 0.1
decay_embeddings = False  # as published, and beta2
beta2 = 0.999
dropout = 0.1
eval_interval = 1000
eval_iters = 200
