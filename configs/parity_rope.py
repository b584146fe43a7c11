# RoPE learns parity on every length up to 16 and fails at 17. About 2 minutes on a laptop CPU.
task = 'parity'
pe = 'rope'
