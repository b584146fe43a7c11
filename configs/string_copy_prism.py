# PRISM copies strings of 150 digits after training on at most 10: its cursors learn to count from the start and from the "=". About 2 minutes
# on 2 CPU cores. The first 400 steps see only short strings (prism.txt 6.4): without them the cursors may not find that.
# Compare: --pe=prism,shifted_ape,rope
task = 'string_copy'
pe = 'prism'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
max_steps = 1000
eval_interval = 500
n_eval = 16
n_test = 64
