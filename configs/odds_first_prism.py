# PRISM on "odds first" (012345=135024), without the copy branch, with four cursors per head and two
# PRISM layers, before layers 1 and 3 of 3 (in the paper, before layers 1 and 4 of 5). It fits up to
# 20 digits, but three seeds solve no problem of 40.
task = 'odds_first'
pe = 'prism'
n_head = 4
n_layer = 3
prism_layers = [1, 3]
prism_cursors = 4
train_lengths = range(1, 21)
length_schedule = [(0, 5), (400, 10), (1000, 20)]
eval_lengths = [*range(1, 21), 22, 25, 30, 40, 60, 80, 100, 150]
dropout = 0.1
batch_size = 32
max_steps = 5000
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
