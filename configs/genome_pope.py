# PoPE on the human genome with its paper's settings (Tables 6 and 7). The paper reports 4.152 nats
# per token, RoPE 4.217 (Table 3). Requires a GPU; not run yet. Data: --data=FOLDER of FASTA files
# (GRCh38: huggingface.co/datasets/InstaDeepAI/human_reference_genome)
task = 'genome'
pe = 'pope'
pope_delta = 'uniform'
norm = 'rmsnorm'
d_model = 1024
n_layer = 16
n_head = 16
dropout = 0.1
train_lengths = [1000]
eval_lengths = [1000]
max_steps = 100000
lr = 2.5e-4
min_lr = 2.5e-5
warmup_steps = 4000
decay = 'cosine'
beta2 = 0.999
dtype = 'bfloat16'
n_eval = 64                     # segments of 1,000 tokens
n_test = 1000
