"""Loops over non-zeros on a GPU, in `numba.cuda`, for samples, weights and gradients in GPU memory. Imported only when needed."""
