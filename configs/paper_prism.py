# After string_copy_prism, string_reverse_prism, addition_prism, odds_first_prism, stack_prism ...: the paper's size and recipe (prism.txt 6).
# 140 cursors, 4 per head, read as 140 of queries and 140 of keys: 7 heads in each layer; 196 for its 192 content channels, which 7 do not divide. 150,000 steps want a GPU; not run yet.
# Add configs/paper_prism_baseline.py for its baseline. It goes by the `task` of the config before it: --task comes too late for it.
n_layer = 5
n_head = 7
d_model = 196
prism_cursors = 4
prism_d_pe = 84                 # 4 cursors: a position stream of 336, as the paper's 340 is read
prism_hidden = 100
prism_recurrent = 'orthogonal'
prism_layers = [1, 4] if task in ('odds_first', 'stack') else [1]
prism_copy = 'fixed' if task in ('string_reverse', 'scan_cot', 'dyn_str_cpy') else 'none'
dropout = 0.0
batch_size = 100
max_steps = 150000
lr = 9e-5
min_lr = 0.0
decay = 'none'
train_lengths = range(1, 41) if task in ('string_copy', 'string_reverse', 'odds_first', 'stack') else range(1, {'multiplication_cot': 10, 'scan_cot': 23}.get(task, 11))
length_schedule = [(0, 5), (5000, 10), *{22: [(10000, 22)], 40: [(10000, 20), (20000, 30), (30000, 40)]}.get(max(train_lengths), [])]
eval_lengths = range(1, 49) if task == 'scan_cot' else [*range(2, 42, 2), 50, 60, 80, 100, 150] if max(train_lengths) > 10 else [*range(2, 21), 25, 30]
eval_interval = 1000
n_eval = 1000
n_test = 10000 if task == 'scan_cot' else 1000    # all of SCAN's
top_evals = 3
