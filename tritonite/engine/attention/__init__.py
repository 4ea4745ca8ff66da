"""Attention: rows of keys weighed by softmax, forward and backward, and the host side of both."""
