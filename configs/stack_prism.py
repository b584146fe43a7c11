# PRISM on stack manipulation (0110422=11020000), without the copy branch. The cursors of the second
# PRISM layer follow the height of the stack: a step up at a push, down at a pop. (The paper has its
# two PRISM layers before layers 1 and 4 of 5.)
task = 'stack'
pe = 'prism'
n_head = 4
n_layer = 2
prism_layers = [1, 2]
prism_input = 2.0               # large enough that gates tell symbols apart within 500 steps
prism_whole = 0.1
prism_whole_at = 0.3            # whole steps only once the loss is low
prism_d_pe = 84                 # as in the paper; 32, with alpha at 0.003, has fewer right at 20
train_lengths = range(2, 11)
length_schedule = [(0, 5), (400, 10)]
eval_lengths = [*range(2, 16), 20, 30, 40, 60, 80, 100]
dropout = 0.1
max_steps = 3000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
