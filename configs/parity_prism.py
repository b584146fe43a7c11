# PRISM, trained on up to 16 bits, computes the parity of up to 100 (7 of 8 seeds). Compare:
# --pe=prism,vipe,rope. To iterate s_t = s_(t-1) x_t + 1 mod 5: --task=polynomial --max_steps=2000
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
