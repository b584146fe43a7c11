# No encoding at all: order is seen through the causal mask alone. Beside RoPE:
# parity_rope.py --pe=rope,nope.
task = 'parity'
pe = 'nope'
