# PRISM sorts digits from 0 to 4 (41203=01234.). A cursor could count each digit, up where it is
# read and down where it is written, so every cursor has a head of its own. It has not learned
# that yet.
task = 'bucket_sort'
pe = 'prism'
n_head = 8
prism_cursors = 1
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
prism_whole = 0.03
dropout = 0.1
max_steps = 1000
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
