# ViPE copies strings slightly longer than in training. About 6 minutes on 2 CPU cores. Ablations:
# --vipe_value=False, --vipe_logn=False, --vipe_u=False; the scale s acts at evaluation only:
# --eval_only --vipe_s=one
task = 'copy'
pe = 'vipe'
n_layer = 3
max_steps = 7500
