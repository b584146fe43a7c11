# After paper_prism, for scan_cot: SCAN's length split trains on up to 22 actions.
train_lengths = range(1, 23)
length_schedule = [(0, 5), (5000, 10), (10000, 22)]
eval_lengths = range(1, 49)
n_test = 10000                  # all of SCAN's
