# PRISM on SCAN's length split with a chain of thought (PRISM Table 4), copy branch on (6.0.1). For
# a GPU; not trained to the end yet. Compare: --prism_copy=none,fixed,trained and
# --pe=prism,shifted_ape
task = 'scan_cot'
pe = 'prism'
prism_copy = 'fixed'
n_head = 2
n_layer = 3
train_lengths = range(1, 23)
eval_lengths = range(1, 49)     # those that there are; up to 22 these are the commands trained on
length_schedule = [(0, 6), (1000, 12), (2000, 22)]
dropout = 0.1
batch_size = 64
max_steps = 20000
eval_interval = 2000
n_eval = 16
n_test = 10000                  # all
