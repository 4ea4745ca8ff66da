"""Gated delta rule: linear attention with a state that decays and is corrected (Yang, Kautz, Hatamizadeh 2024).

problem.py     operands, compile-time facts, run-time sizes and strides, table of blocks
tiles.py       device functions: loads of rows and gates, decays, products
recurrent.py   a state updated token by token
prepare.py     scores and the inverted system of every chunk, in parallel
forward.py     the pass over chunks: states, corrections, outputs
backward.py    the pass back over chunks, and the gradients of every chunk in parallel
"""
