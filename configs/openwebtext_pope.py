# PoPE on OpenWebText at 124M parameters, with the settings of its paper (Tables 6 and 7;
# perplexity 21.33 there, RoPE 21.55). For a GPU; not run yet. 253M: --d_model=1024 --n_layer=16
# --n_head=16; 774M: --d_model=1280 --n_layer=36 --n_head=20. The data: --data=FOLDER with
# train.bin and val.bin, as nanoGPT's data/openwebtext/prepare.py writes them. Books instead
# (Figure 2): --eval_only --data=FOLDER, the books in FOLDER/test,
# --eval_lengths=1024,2048,5120,10240
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
n_eval = 100                    # stretches of 1,024 tokens
n_test = 2000
