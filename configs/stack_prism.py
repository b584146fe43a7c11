# PRISM on stack manipulation (0110422=11020000). The paper has two PRISM layers for it (before
# layers 1 and 4 of 5) and no copy branch.
task = 'stack'
pe = 'prism'
n_head = 2
n_layer = 3
prism_layers = [1, 2]
train_lengths = range(2, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(2, 16), 20, 30, 40, 60, 80, 100]
dropout = 0.1
max_steps = 3000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
