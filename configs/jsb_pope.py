# PoPE on Bach's chorales (PoPE Tables 6, 7; 0.4889 nats per token, RoPE 0.5081: Table 2). On a CPU
# add --d_model=64 --n_layer=3 --n_head=4 --train_lengths=512 --batch_size=8 --max_steps=1500.
# Data: --data=Jsb16thSeparated.json (github.com/czhuang/JSB-Chorales-dataset)
task = 'jsb'
pe = 'pope'
pope_delta = 'uniform'
norm = 'rmsnorm'
d_model = 256
n_layer = 6
n_head = 8
dropout = 0.2
train_lengths = [2048]
eval_lengths = [256, 512, 1024, 2048]
batch_size = 4
max_steps = 3000
lr = 6e-4
min_lr = 6e-5
warmup_steps = 10
decay = 'cosine'
beta2 = 0.99
eval_interval = 250
n_eval = 100  # all segments of the 76 chorales (test: 77); two chorales are longer than 2,048
n_test = 100
