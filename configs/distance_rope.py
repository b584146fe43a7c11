# Task 1 of the Toeplitz study, small: how far apart are two trigger words? Compare
# --pe=nope,ape,alibi,t5,rope. Append configs/paper_toeplitz.py for the paper's size.
task = 'distance'
pe = 'rope'
train_lengths = [128]
eval_lengths = [128, 160, 192, 256]
n_head = 4
max_steps = 3000
n_test = 4096
