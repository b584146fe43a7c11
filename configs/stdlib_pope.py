# PoPE on the bytes of Python's library, trained in contexts of 128, evaluated in contexts of up to
# 1,280 (PoPE Figure 2). 3 minutes on 2 CPU cores. Compare: --pe=rope,pope,alibi,nope
task = 'stdlib'
pe = 'pope'
norm = 'rmsnorm'
n_layer = 3
n_head = 4
train_lengths = [128]
eval_lengths = [128, 160, 256, 320, 427, 640, 1280]      # 1,280 / 10, 8, 5, 4, 3, 2, 1
batch_size = 16
max_steps = 3000
lr = 2e-3
min_lr = 2e-4
beta2 = 0.99
eval_interval = 500
n_eval = 8                      # segments of 1,280 bytes
n_test = 64
