# PRISM, trained to copy strings of at most 10 digits, copies 20 digits (12 of 12 seeds), often 150
# (8 of 12): its cursors learn to count from the start and from "=", as `python probe.py cursor
# out/string_copy_prism` shows. The first 400 steps train on at most 5 digits (PRISM section 6.4).
# Compare: --pe=prism,shifted_ape,rope
task = 'string_copy'
pe = 'prism'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
dropout = 0.1
max_steps = 1500
min_lr = 6.6e-4
eval_interval = 500
n_eval = 16
n_test = 64
