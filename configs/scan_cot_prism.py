# PRISM on SCAN's length split with a chain of thought (PRISM Table 4), the copy branch (6.0.1) and
# four cursors per head. Compare: --prism_copy=none,fixed,trained and --pe=prism,shifted_ape
task = 'scan_cot'
pe = 'prism'
prism_copy = 'fixed'
n_head = 2
n_layer = 3
prism_cursors = 4
train_lengths = range(1, 23)
length_schedule = [(0, 6), (300, 12), (600, 22)]
dropout = 0.1
batch_size = 16
max_steps = 1500
eval_interval = 500
n_eval = 4
n_test = 64
