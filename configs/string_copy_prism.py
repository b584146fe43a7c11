# PRISM, trained to copy strings of at most 10 digits, goes on beyond: seed 3 to 150 digits, seed 2 hardly (README). Its cursors
# learn to count from the start and from the "=". About 2 minutes on 2 CPU cores. The first 400 steps see short strings only (prism.txt 6.4).
# Compare: --pe=prism,shifted_ape,rope
task = 'string_copy'
pe = 'prism'
n_head = 2
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
max_steps = 1000
decay = 'none'
eval_interval = 500
n_eval = 16
n_test = 64
