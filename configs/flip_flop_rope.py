# RoPE: recall the bit written last (Liu et al. 2023). Compare: --pe=rope,nope,fox,stickbreaking
# More bits to ignore: --eval_only --out_dir=out/flip_flop_rope --task=flip_flop:ignore=98
task = 'flip_flop'
pe = 'rope'
n_layer = 1
n_head = 2
train_lengths = [64]
eval_lengths = [64]
batch_size = 32
max_steps = 1000
eval_interval = 500
n_eval = 64
n_test = 2048
