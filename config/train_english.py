# A Backpack trained on real English (baseline Transformer: --model=gpt).
# Public data: Simple English Wikipedia and 100 books of Project Gutenberg. We have not run this
# command, so we do not know how many tokens it writes.
# python prepare.py english --like english \
#     --hub wikimedia/wikipedia:20231101.simple emozilla/pg19-test::test
# The bundled model read similar texts, 55.1M tokens: pretrained/english/README.md describes them.
# On a GPU, like the bundled model: 327.7M tokens, six minutes on an H200.
# python train.py config/train_english.py --batch_size=64 --max_iters=20000
# On two CPU cores: 41.0M tokens, two to three hours.
# python train.py config/train_english.py --max_iters=5000 --batch_size=32
dataset = 'english'
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
batch_size = 64  # texts, 16,384 tokens per step
max_iters = 20_000
# With AdamW for all parameters, senses get stuck (see docs/dev/notes.md).
learning_rate = 1.5e-3  # for AdamW, which trains embeddings, biases and norms
beta2 = 0.999  # as published
warmup_iters = 300
weight_decay = 0.2
decay_embeddings = False  # as published
eval_interval = 250
eval_iters = 20
log_interval = 50
