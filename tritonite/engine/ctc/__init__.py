"""Connectionist temporal classification (Graves et al. 2006): the likelihood of labels, and its gradient.

A sequence's labels are extended by blanks: blank, l_1, blank, l_2, ..., l_L, blank, so that odd positions are labels.
alpha_t(s) is the probability to have emitted the first s + 1 extended labels after t + 1 steps, beta_t(s) that to emit
those from s on in the remaining steps; both include step t. `launch.forward` runs the recursion for alpha, a program a
sequence; `launch.backward` runs that for beta, which is the same in reversed order, and gathers the gradient, a program
a step of a sequence. Lengths and offsets of sequences are rows of a table in device memory.
"""
