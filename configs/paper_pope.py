# The PoPE paper's settings for indirect indexing (Tables 6 and 7), to append to
# configs/indirect_indexing_pope.py. 100,000 steps at this width require a GPU.
d_model = 512
n_head = 8
n_layer = 8
norm = 'rmsnorm'
pope_delta = 'uniform'
train_lengths = range(20, 41)
eval_lengths = range(20, 41)
n_train = 47620                 # per length: 1,000,020 in all
n_eval = 477                    # per length: 10,017 in all
n_test = 477
batch_size = 64
max_steps = 100000
warmup_steps = 4000
lr = 2e-4
min_lr = 2e-5
decay = 'cosine'
beta2 = 0.99
eval_interval = 5000
