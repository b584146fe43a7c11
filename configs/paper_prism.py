# The size and recipe of the PRISM paper (section 6), to append to the config of a task:
#   string_copy_prism, paper_prism
#   string_reverse_prism, paper_prism, --prism_copy=fixed
#   odds_first_prism or stack_prism, paper_prism, --prism_layers=1,4
# The other tasks and the paper's baseline require more flags: see `paper` in results/commands.sh.
# 150,000 steps require a GPU; not run yet. 140 query and 140 key cursors, 4 of each per head, are 7
# heads in each of 5 layers. The paper's content width of 192 is not divisible by 7, so ours is 196.
n_layer = 5
n_head = 7
d_model = 196
tie = True                      # section 6.2
prism_cursors = 4
prism_d_pe = 84                 # 4 cursors: a position stream of 336, as we read the paper's 340
prism_recurrent = 'orthogonal'
dropout = 0.0
batch_size = 100
max_steps = 150000
lr = 9e-5
min_lr = 0.0
decay = 'none'
train_lengths = range(1, 41)
length_schedule = [(0, 5), (5000, 10), (10000, 20), (20000, 30), (30000, 40)]
eval_lengths = [*range(2, 42, 2), 50, 60, 80, 100, 150]
eval_interval = 1000
n_eval = 1000
n_test = 1000
