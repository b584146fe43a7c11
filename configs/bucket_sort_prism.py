# PRISM sorts digits from 0 to 4 (41203=01234.). A cursor could count each digit, up where it is
# read and down where it is written, so every cursor has a head of its own. Positions are not
# needed: NoPE sorts as well to twice the length. Compare: --prism_noise=0.0,0.3 and --pe=prism,nope
task = 'bucket_sort'
pe = 'prism'
n_head = 8
prism_cursors = 1
train_lengths = range(1, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(1, 16), 20, 30, 40, 60, 80, 100, 150]
prism_input = 2.0               # gates tell digits apart early
prism_noise = 0.3
prism_whole = 0.1
prism_whole_at = 0.3            # whole steps only once the loss is low
dropout = 0.1
max_steps = 2500
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
