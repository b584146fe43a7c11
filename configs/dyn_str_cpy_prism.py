# PRISM copies a string from a given digit on (5839472,3=39472.), trained on at most 10 digits. It
# uses the copy branch (PRISM section 6.0.1), whose key cursors are trained here and count tokens in
# the paper. Compare: --prism_copy=none,fixed,trained and --pe=prism,shifted_ape,rope
task = 'dyn_str_cpy'
pe = 'prism'
prism_copy = 'trained'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
dropout = 0.1
max_steps = 1000
min_lr = 6.6e-4
eval_interval = 500
n_eval = 16
n_test = 64
