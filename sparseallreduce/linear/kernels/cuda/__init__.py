"""The loops over non-zeros on a GPU, in `numba.cuda`: for samples, weights and gradients that lie there. Nothing imports it before that."""
