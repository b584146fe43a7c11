# PRISM computes the parity of up to 100 bits, trained on at most 16. Compare:
# --pe=prism,vipe,shifted_ape,rope
task = 'parity'
pe = 'prism'
n_head = 2
train_lengths = range(1, 17)
length_schedule = [(0, 5), (400, 16)]
eval_lengths = [*range(1, 21), 24, 32, 48, 64, 100]
dropout = 0.1
max_steps = 1000
min_lr = 6.6e-4
eval_interval = 500
n_eval = 16
n_test = 64
