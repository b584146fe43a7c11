# PRISM multiplies with a chain of thought (675x12=675x[1*(1+1)(2+0)+2*(2+1)].). It is trained on
# numbers of up to 5 digits and has four cursors per head. Three seeds fit these lengths, but solve
# no product of longer ones. Compare: --pe=prism,shifted_ape,rope
task = 'multiplication_cot'
pe = 'prism'
n_head = 4
prism_cursors = 4
train_lengths = range(1, 6)
length_schedule = [(0, 2), (500, 3), (1000, 5)]
eval_lengths = [*range(1, 9), 10, 12]
dropout = 0.1
batch_size = 32
max_steps = 3500
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
