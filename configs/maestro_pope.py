# PoPE on piano performances with its paper's settings (Tables 6 and 7). The paper reports 1.486
# nats per token, RoPE 1.501 (Table 2). It requires a GPU and `pip install miditok`; not run yet.
# Data: --data=FOLDER of MIDI files (MAESTRO v3.0.0: magenta.withgoogle.com/datasets/maestro)
task = 'maestro'
pe = 'pope'
pope_delta = 'uniform'
norm = 'rmsnorm'
d_model = 384
n_layer = 6
n_head = 8
dropout = 0.1
train_lengths = [2048]
eval_lengths = [512, 1024, 2048]
batch_size = 16
max_steps = 60000
lr = 6e-4
min_lr = 6e-5
warmup_steps = 500
decay = 'cosine'
beta2 = 0.99
n_eval = 64                     # segments of 2,048 tokens
n_test = 1000
