"""Products of matrices: kernels, their epilogue, the choice of tiles, and the host function."""
