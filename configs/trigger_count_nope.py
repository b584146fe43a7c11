# A small version of Task 2 of the Toeplitz study: how many words are triggers? Positions do not
# matter. Compare: --pe=nope,alibi,rope. For the study's size, see configs/paper_toeplitz.py
task = 'trigger_count'
pe = 'nope'
train_lengths = [128]
eval_lengths = [128, 160, 192, 256]
n_head = 4
max_steps = 3000
n_test = 4096
