# PRISM adds by a chain of thought (829+03=8008,2305,9009→859.), trained on numbers of at most 8
# digits. Which digit stands at a place must not move a cursor: prism_info. Compare:
# --prism_info=0,0.1 and --pe=prism,shifted_ape,rope,nope
task = 'addition_cot'
pe = 'prism'
n_head = 4
n_layer = 2
prism_input = 2.0               # large enough that gates tell symbols apart early
prism_info = 0.1                # gates should not tell digits apart
prism_whole = 1.0
prism_whole_at = 0.1            # whole steps only once the loss is low
prism_alpha_lr = 0.003          # a tenth of the default, which is no better with 84 features
train_lengths = range(1, 9)
length_schedule = [(0, 3), (500, 5), (1000, 8)]
eval_lengths = [*range(1, 13), 14, 16, 20, 24]
dropout = 0.1
batch_size = 32
max_steps = 3500
min_lr = 2.5e-4
ema = 0.99                      # one update can still put a cursor off its path
eval_interval = 500
n_eval = 16
n_test = 64
