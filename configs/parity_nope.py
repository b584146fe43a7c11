# No encoding at all: order is seen through the causal mask alone. Compare with parity_rope.py.
task = 'parity'
pe = 'nope'
