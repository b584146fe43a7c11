# PoPE's diagnostic task: the letter at a given shift from a given letter. Compare: --pe=rope,pope.
# A model long guesses from the shift alone: use a GPU, append configs/paper_pope.py. On a CPU (a
# minute, partly solved): --task=indirect_indexing:letters=12:shift=2 --train_lengths=3-6 --n_head=2
# --eval_lengths=3-12 --d_model=64 --n_layer=2 --lr=2e-3 --max_steps=2500 --warmup_steps=100
task = 'indirect_indexing'
pe = 'pope'
norm = 'rmsnorm'
d_model = 128
n_layer = 4
n_head = 4
train_lengths = range(20, 41)
eval_lengths = range(20, 45)
lr = 5e-4
warmup_steps = 500
max_steps = 50000
n_test = 512
