# RoPE gets every length up to 16 right and length 17 wrong. About 2 minutes on 2 CPU cores.
task = 'parity'
pe = 'rope'
lr = 2e-3
