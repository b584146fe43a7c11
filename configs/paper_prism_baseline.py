# After paper_prism: its baseline, a Transformer with randomly shifted sinusoids (PRISM
# section 6.2).
pe = 'shifted_ape'
n_layer = 5
n_head = 8
d_model = 512
max_shift = 2000                # sequences are capped at 2048 tokens
