# PRISM reverses strings; some seeds go on beyond the 10 digits that they were trained on
# (results/README.md). Compare: --prism_copy=none,fixed,trained (the paper has the copy branch on
# for this task) and --pe=prism,shifted_ape
task = 'string_reverse'
pe = 'prism'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
dropout = 0.1
max_steps = 2000
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
