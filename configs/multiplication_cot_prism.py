# PRISM multiplies by a chain of thought (675x12=675x[1*(1+1)(2+0)+2*(2+1)].), trained on numbers
# of at most 5 digits. A digit of a group is found in the group before, one pair further on: one
# cursor counts pairs from "*" on, another counts groups.
task = 'multiplication_cot'
pe = 'prism'
n_head = 4
n_layer = 2
prism_input = 2.0               # large enough that gates tell symbols apart early
prism_info = 0.1                # gates should not tell digits apart
prism_whole = 1.0
prism_whole_at = 0.1            # whole steps only once the loss is low
prism_alpha_lr = 0.003          # a tenth of the default: not compared on this task
train_lengths = range(1, 6)
length_schedule = [(0, 2), (500, 3), (1000, 5)]
eval_lengths = [*range(1, 9), 10, 12]
dropout = 0.1
batch_size = 32
max_steps = 3500
min_lr = 2.5e-4
ema = 0.99                      # one update can still put a cursor off its path
eval_interval = 500
n_eval = 16
n_test = 64
