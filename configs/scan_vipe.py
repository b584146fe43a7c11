# ViPE on SCAN's length split at its paper's size (Table 2, split not named: 15.0 %, NoPE 13.2, RoPE
# 2.1, APE 0.0). On a CPU add --d_model=64 --n_layer=3 --batch_size=64 --max_steps=4000 --lr=1e-3
# --warmup_steps=200. For the random split: --task=scan_simple --train_lengths=1-48
task = 'scan'
pe = 'vipe'
d_model = 256
n_layer = 6
n_head = 4
train_lengths = range(1, 23)
batch_size = 256
max_steps = 20000
lr = 5e-4
warmup_steps = 1000
n_eval = 16
n_test = 10000                  # all test problems
