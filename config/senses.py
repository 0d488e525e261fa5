# Table 8: Mini with K = 1, 4, 16 or 64 senses and small sense MLPs, for half as many steps:
# torchrun --nproc_per_node=4 train.py config/senses.py --n_sense=K --out_dir=out/senses_K
n_layer = 8
n_head = 8
n_embd = 640
sense_hidden = 640
batch_size = 16
gradient_accumulation_steps = 64  # 16 * 64 * 512 = 524,288 tokens per step, over all GPUs
max_iters = 50_000
decay_embeddings = False  # as published; so is beta2
beta2 = 0.999
dropout = 0.1
eval_iters = 200
optimizer = 'adamw'
warmup_iters = 2500
