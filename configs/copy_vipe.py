# ViPE copies strings longer than any it was trained on. About 6 minutes on 2 CPU cores.
# Ablations: --vipe_s=length,one,global, --vipe_value=False, --vipe_logn=False, --vipe_u=False
task = 'copy'
pe = 'vipe'
n_layer = 3
max_steps = 7500
