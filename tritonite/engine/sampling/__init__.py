"""Sampling of tokens from logits, a program a row; a line a file, called first to called last:

    scores.py   SampleMeta; penalties of tokens; a row's scores, their order and their weights
    filters.py  the scores that top-k, top-p, min-p and typical sampling keep
    launch.py   sample(): allocates scratch, draws a seed and launches `sample_tokens`

A program reads its row several times, from the L2 cache after the first. Scores are float32: penalised logits divided
by the temperature. A filter is a bound on a number that a pass computes again for every token, so no row is sorted.
"""
