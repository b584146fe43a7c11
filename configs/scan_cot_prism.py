# PRISM on SCAN's length split with a chain of thought (PRISM Table 4), copy branch on (6.0.1).
# Compare: --prism_copy=none,fixed,trained and --pe=prism,shifted_ape
task = 'scan_cot'
pe = 'prism'
prism_copy = 'fixed'
n_head = 2
n_layer = 3
prism_input = 2.0               # large enough that gates tell words apart early
prism_whole = 0.1
prism_whole_at = 0.3            # whole steps only once the loss is low
prism_alpha_lr = 0.003          # a tenth of the default: not compared on this task
train_lengths = range(1, 23)
eval_lengths = range(1, 49)     # those that there are; up to 22 these are the commands trained on
length_schedule = [(0, 6), (300, 12), (600, 22)]
dropout = 0.1
batch_size = 16
max_steps = 1500                # 20,000: more is right on five of eight seeds
eval_interval = 500
n_eval = 4
n_test = 64
