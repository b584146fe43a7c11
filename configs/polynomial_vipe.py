# ViPE iterates s_t = s_(t-1) x_t + 1 mod 5, also a little past the training length. 6 minutes on 2
# CPU cores. Compare: --pe=nope,rope,alibi,vipe. Ablate: --vipe_value=False, --vipe_u=False
task = 'polynomial'
pe = 'vipe'
n_layer = 3
max_steps = 7500
