# ViPE on CFQ's random split, at the size of its paper, which reports 66.6 %, NoPE 55.5, RoPE 49.9,
# APE 45.1 (Table 2, split not named). It requires a GPU; not run yet. Data: unpack cfq1.1.tar.gz
# (storage.googleapis.com/cfq_dataset), --data=FOLDER. Other splits: --task=cfq:split=mcd1
task = 'cfq'
pe = 'vipe'
d_model = 256
n_layer = 6
n_head = 4
train_lengths = range(1, 1001)  # only those that exist
eval_lengths = range(1, 1001)
batch_size = 256
max_steps = 50000
lr = 5e-4
warmup_steps = 1000
eval_interval = 5000
n_eval = 16
n_test = 100000                 # all test problems
