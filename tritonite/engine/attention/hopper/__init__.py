"""Attention in Gluon, for tensor cores that read shared memory (sm_90): some warps copy, others multiply."""
