# PRISM adds with a chain of thought (829+03=8008,2305,9009→859.). It is trained on numbers of up to
# 10 digits and has four cursors per head. 7,000 steps take over an hour on one CPU core. All seven
# seeds then fit the training lengths. They solve 0 to 67 % of sums of 20 digits (median 5 %).
# To 16 digits: --train_lengths=1-16 '--length_schedule=[(0,3),(500,5),(1000,10),(1750,16)]'
# --max_steps=3500 --eval_lengths=1-16,20,32. This takes about an hour. Seven seeds solve 0 to 100 %
# of sums of 20 digits (median 75 %) and of 32 digits (median 0 %).
# Compare: --pe=prism,shifted_ape,rope,nope
task = 'addition_cot'
pe = 'prism'
n_head = 4
prism_cursors = 4
train_lengths = range(1, 11)
length_schedule = [(0, 3), (500, 5), (1000, 10)]
eval_lengths = [*range(1, 13), 14, 16, 20, 24, 30]
dropout = 0.1
batch_size = 32
max_steps = 7000
min_lr = 2.5e-4
eval_interval = 500
n_eval = 16
n_test = 64
