# Backpack on real English: an hour and a half on two CPU cores, minutes on a GPU.
# python prepare.py english --text simplewiki.jsonl.xz gutenberg_stories.jsonl.xz --merges 16384
# python train.py config/train_english.py   (its Transformer: --model=gpt; the model in the box: --beta2=0.95)
dataset = 'english'
n_layer = 4
n_head = 4
n_embd = 256
n_sense = 16
block_size = 256
batch_size = 32  # 32 * 256 = 8,192 tokens a step
max_iters = 5000
optimizer = 'muon'
muon_lr = 6e-3
learning_rate = 1.5e-3
warmup_iters = 200
weight_decay = 0.1
beta2 = 0.999  # as published: fewer senses get stuck at one token, docs/results.md
decay_embeddings = False  # as published
eval_interval = 250
eval_iters = 20
log_interval = 50
