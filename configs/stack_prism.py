# PRISM on stack manipulation (0110422=11020000), with four cursors per head and two PRISM layers
# (in the paper, before layers 1 and 4 of 5). Three seeds solve 2, 0, 30 % of problems of length 20.
task = 'stack'
pe = 'prism'
n_head = 4
prism_layers = [1, 2]
prism_cursors = 4
prism_d_pe = 84                 # the width per cursor that we read from the paper
train_lengths = range(2, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(2, 16), 20, 30, 40, 60, 80, 100]
dropout = 0.1
max_steps = 3000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
