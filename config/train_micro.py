# Backpack-Micro, the paper's recipe, for 4 GPUs of 40 GB:
# torchrun --nproc_per_node=4 train.py config/train_micro.py   (its Transformer: --model=gpt)
n_layer = 6
n_head = 6
n_embd = 384
n_sense = 16
dataset = 'openwebtext'
block_size = 512
batch_size = 64
gradient_accumulation_steps = 16  # 64 * 16 * 512 = 524,288 tokens a step, over all GPUs together
max_iters = 100_000
learning_rate = 6e-4
warmup_iters = 5000
min_lr = 0.0
weight_decay = 0.1
decay_embeddings = False  # as published, and beta2
beta2 = 0.999
dropout = 0.1
eval_interval = 1000
