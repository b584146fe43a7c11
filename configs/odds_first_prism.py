# PRISM on "odds first" (012345=135024), without the copy branch. Key cursors go half a place a
# token, so the GRU needs a clock of period 2: half of its units start by flipping a bit at each
# token. (The paper has two PRISM layers for it, before layers 1 and 4 of 5.)
# Compare: --prism_whole=0.1,1 or --prism_info=0,0.1 or --prism_noise=0.0,0.3
task = 'odds_first'
pe = 'prism'
n_head = 4
n_layer = 3
prism_cursors = 1
prism_start = 'bits'
prism_reset = False             # no symbol is to be counted from but the first
prism_input = 0.3
prism_noise = 0.3               # the clock must not depend on the length so far
prism_info = 0.1                # gates should look at as little as possible
prism_whole = 0.1               # little, as half a place is a fraction of a step
prism_whole_at = 0.1            # whole steps only once the loss is low
train_lengths = range(1, 21)    # to 10 it goes less far (results/README.md)
length_schedule = [(0, 5), (400, 10), (1000, 20)]
eval_lengths = [*range(1, 21), 22, 25, 30, 40, 60, 80, 100, 150]
dropout = 0.1
batch_size = 32
max_steps = 5000
min_lr = 5e-4
ema = 0.99                      # one update can still put a cursor off its path
eval_interval = 500
n_eval = 16
n_test = 64
