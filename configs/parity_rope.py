# RoPE computes the parity of 1 to 16 bits exactly and fails at 17. One to two minutes on one core.
# The first 500 steps train on at most 8 bits, which allows a small batch.
task = 'parity'
pe = 'rope'
length_schedule = [(0, 8), (500, 16)]
eval_lengths = range(1, 33)
n_head = 4                      # with one head, 1 of 8 seeds did not fit the training lengths
d_ff = 128                      # hidden width of the MLP: half the usual, for speed
n_eval = 32                     # problems per length, during training
n_test = 256                    # and after it
batch_size = 32
max_steps = 3000
lr = 2e-3
