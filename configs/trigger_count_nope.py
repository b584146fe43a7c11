# Task 2 of the Toeplitz study, small: how many words are triggers? Position does not matter.
# Compare --pe=nope,alibi,rope. Append configs/paper_toeplitz.py for the paper's size.
task = 'trigger_count'
pe = 'nope'
train_lengths = [128]
eval_lengths = [128, 160, 192, 256]
n_head = 4
max_steps = 3000
n_test = 4096
