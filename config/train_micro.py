# Backpack-Micro, the paper's recipe, for 1, 2 or 4 GPUs of 40 GB, with the default steps and rate.
# torchrun --nproc_per_node=4 train.py config/train_micro.py   (baseline Transformer: --model=gpt)
n_layer = 6
n_head = 6
n_embd = 384
batch_size = 64
gradient_accumulation_steps = 16  # 64 * 16 * 512 = 524,288 tokens per step, over all GPUs
decay_embeddings = False  # as published; so is beta2
beta2 = 0.999
dropout = 0.1
optimizer = 'adamw'
warmup_iters = 5000
