# A Backpack trained on real English, on two CPU cores or a GPU. Prepare the data, then train:
# python prepare.py english --text simplewiki.jsonl.xz gutenberg_stories.jsonl.xz --merges 16384
# python train.py config/train_english.py   (baseline Transformer: --model=gpt)
dataset = 'english'
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256  # times 32 texts: 8,192 tokens a step
max_iters = 5000  # 41.0M tokens
optimizer = 'muon'  # with AdamW for all, senses get stuck: docs/notes.md
muon_lr = 3e-3
learning_rate = 1.5e-3  # for AdamW, which trains embeddings, biases and norms
beta2 = 0.999  # as published
warmup_iters = 200
weight_decay = 0.2
decay_embeddings = False  # as published
eval_interval = 250
eval_iters = 20
log_interval = 50
