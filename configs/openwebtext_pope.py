# PoPE on OpenWebText, 124M parameters (Tables 6 and 7 of its paper: perplexity 21.33, RoPE 21.55).
# For a GPU; not run yet. 253M: --d_model=1024 --n_layer=16 --n_head=16; 774M: --d_model=1280
# --n_layer=36 --n_head=20. --data=FOLDER with train.bin and val.bin, as nanoGPT's prepare.py writes
# them. Books (Figure 2), in FOLDER/test: --eval_only --eval_lengths=1024,2048,5120,10240
task = 'openwebtext'
pe = 'pope'
norm = 'rmsnorm'
tie = True
d_model = 768
n_layer = 12
n_head = 12
train_lengths = [1024]
eval_lengths = [1024]
accumulate = 4
max_steps = 100000
lr = 6e-4
min_lr = 6e-5
warmup_steps = 1000
decay = 'cosine'
beta2 = 0.95
dtype = 'bfloat16'
eval_interval = 2000
n_eval = 100                    # segments of 1,024 tokens
n_test = 2000
