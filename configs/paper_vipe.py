# After parity_* or polynomial_*: the recipe of the ViPE paper (appendix B). 256,000
# steps and 8 seeds require a GPU. The paper uses d_model 32 or 128, n_layer 2 or 3.
d_model = 128
n_layer = 3
n_head = 1
seeds = [0, 42, 123, 2025, 7811, 9527, 13579, 23343]
train_lengths = range(1, 17)
eval_lengths = range(1, 49)
n_train = 2048                  # per length: 32,768 problems
n_test = 2048                   # per length
batch_size = 256
max_steps = 256000              # 2000 epochs
lr = 3e-4
warmup_steps = 0
decay = 'none'
beta2 = 0.999
weight_decay = 0.0              # Adam
grad_clip = 0.0
eval_interval = 8000
