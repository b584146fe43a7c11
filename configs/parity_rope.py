# RoPE computes the parity of 1 to 16 bits exactly and fails at 17. About a minute on one core.
# Its first 600 steps train on at most 8 bits; such a step costs a quarter less.
task = 'parity'
pe = 'rope'
length_schedule = [(0, 8), (600, 16)]
eval_lengths = range(1, 33)
n_head = 4                      # with one head (and d_ff = 256), 1 of 8 seeds did not fit
d_ff = 128                      # hidden width of the MLP: half the usual, for speed
n_eval = 32                     # problems per length, during training
n_test = 256                    # and after it
batch_size = 32
max_steps = 2450
lr = 3e-3
