# ViPE on CFQ's random split, at its paper's size (Exp. 8, split not named: 66.6 %, NoPE 55.5, RoPE
# 49.9, APE 45.1). For a GPU; not run yet. Other splits: --task=cfq:split=mcd1. --data=FOLDER of
# cfq1.1.tar.gz, unpacked (storage.googleapis.com/cfq_dataset)
task = 'cfq'
pe = 'vipe'
d_model = 256
n_layer = 6
n_head = 4
train_lengths = range(1, 1001)  # those that exist
eval_lengths = range(1, 1001)
batch_size = 256
max_steps = 50000
lr = 5e-4
warmup_steps = 1000
eval_interval = 5000
n_eval = 16
n_test = 100000                 # all
