# PoPE on OpenWebText, 124M parameters (PoPE Tables 6, 7; perplexity 21.33, RoPE 21.55: Table 4). It
# requires a GPU; not run yet. 253M: --d_model=1024 --n_layer=16 --n_head=16; 774M: --d_model=1280
# --n_layer=36 --n_head=20. --data=FOLDER of train.bin and val.bin from nanoGPT's prepare.py. With
# books in FOLDER/test, for Figure 2, without this file: --eval_only --out_dir=out/openwebtext_pope
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
n_eval = 100                    # segments of 1,024 tokens
n_test = 2000
