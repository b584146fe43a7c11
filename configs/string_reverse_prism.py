# PRISM, trained to reverse strings of at most 10 digits, reverses 20 digits (8 of 8 seeds), often
# 150 (4 of 8). The start symbol tells a cursor where to stop (PRISM Figure 15).
# Compare: --pe=prism,shifted_ape,rope
task = 'string_reverse'
pe = 'prism'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
dropout = 0.1
max_steps = 1000
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
