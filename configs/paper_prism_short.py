# After paper_prism, for the tasks that the paper trains up to length 10 (multiplication: 9, by
# --train_lengths=1-9).
train_lengths = range(1, 11)
length_schedule = [(0, 5), (5000, 10)]
eval_lengths = [*range(2, 21), 25, 30]
