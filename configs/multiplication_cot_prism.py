# PRISM multiplies by a chain of thought (675x12=675x[1*(1+1)(2+0)+2*(2+1)].), trained on numbers
# of at most 3 digits.
task = 'multiplication_cot'
pe = 'prism'
n_head = 2
n_layer = 3
train_lengths = range(1, 4)
length_schedule = [(0, 1), (400, 2), (800, 3)]
eval_lengths = range(1, 7)
dropout = 0.1
max_steps = 3000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
