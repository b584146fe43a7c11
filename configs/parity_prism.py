# PRISM, trained on up to 16 bits, solves parity of up to 100. Compare: --pe=prism,vipe,rope. With
# --task=polynomial --max_steps=2000 it iterates s_t = s_(t-1) x_t + 1 mod 5.
task = 'parity'
pe = 'prism'
n_head = 2
length_schedule = [(0, 5), (400, 16)]
eval_lengths = [*range(1, 21), 24, 32, 48, 64, 100]
dropout = 0.1
max_steps = 1000
min_lr = 6.6e-4
eval_interval = 500
n_eval = 16
n_test = 64
