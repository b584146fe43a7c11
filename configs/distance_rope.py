# A small version of Task 1 of the Toeplitz study: how far apart are two trigger words? Compare:
# --pe=nope,ape,alibi,t5,rope. For the study's size, append configs/paper_toeplitz.py
task = 'distance'
pe = 'rope'
train_lengths = [128]
eval_lengths = [128, 160, 192, 256]
n_head = 4
max_steps = 3000
n_test = 4096
