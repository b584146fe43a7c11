# RoPE on the bytes of Python's library in contexts of 64, to be extended to longer ones. Half a
# minute on a CPU. Then, for example: --init_from=out/stdlib_rope --pe=yarn --train_lengths=256
task = 'stdlib'
pe = 'rope'
n_head = 2
train_lengths = [64]
eval_lengths = [64, 128, 256, 512, 1024]
batch_size = 16
max_steps = 800
warmup_steps = 80
lr = 4e-3
eval_interval = 400
n_eval = 16                     # segments of 1,024 bytes
n_test = 64
