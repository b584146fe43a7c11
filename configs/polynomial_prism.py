# PRISM computes the iteration s_t = s_(t-1) x_t + 1 mod 5 of up to 100 symbols, trained on at most
# 16: `python probe.py cursor out/polynomial_prism` shows how.
# Compare: --pe=prism,vipe,shifted_ape,rope
task = 'polynomial'
pe = 'prism'
n_head = 2
length_schedule = [(0, 5), (400, 16)]
eval_lengths = [*range(1, 21), 24, 32, 48, 64, 100]
dropout = 0.1
max_steps = 2000
min_lr = 5e-4
eval_interval = 500
n_eval = 16
n_test = 64
