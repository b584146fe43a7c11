# The Toeplitz study's settings (Tables 3, 4), to append to distance_rope.py. Task 2: to append to
# trigger_count_nope.py, with --n_train=35000 --n_test=15000 --max_steps=10200 --warmup_steps=612.
# MLA on Task 1: --attention=mla --batch_size=1024 --max_steps=6800 --warmup_steps=408. The study
# gives neither the embedding's initial scale (here PyTorch's) nor the mask (here --causal=True).
d_model = 256
d_ff = 512
n_head = 16
n_layer = 6
dropout = 0.1
embedding_std = 1.0
seed = [0, 42, 70, 113, 130]
train_lengths = [128]
eval_lengths = [128, 192, 256]
n_train = 70000                 # of 100,000; the other 30,000 are the test set
n_test = 30000
n_eval = 2000
batch_size = 512
max_steps = 13600               # 100 epochs
warmup_steps = 816              # 6 %
lr = 1e-4
decay = 'cosine'
beta1 = 0.98
beta2 = 0.9
weight_decay = 1e-5
grad_clip = 0.0
eval_interval = 1360
