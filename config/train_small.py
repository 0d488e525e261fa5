# Backpack-Small, the paper's recipe, for 4 GPUs of 40 GB. Sizes, steps and rate are defaults.
# torchrun --nproc_per_node=4 train.py config/train_small.py   (baseline Transformer: --model=gpt)
gradient_accumulation_steps = 32  # 32 * 32 * 512 = 524,288 tokens per step, over all GPUs
decay_embeddings = False  # as published; so is beta2
beta2 = 0.999
dropout = 0.1
optimizer = 'adamw'
warmup_iters = 5000
