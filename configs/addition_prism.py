# PRISM adds by a chain of thought (829+03=8008,2305,9009→859.), trained on numbers of at most 8
# digits.
task = 'addition_cot'
pe = 'prism'
n_head = 2
n_layer = 3
train_lengths = range(1, 9)
length_schedule = [(0, 3), (400, 5), (800, 8)]
eval_lengths = [*range(1, 13), 16, 20]
dropout = 0.1
max_steps = 3000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
