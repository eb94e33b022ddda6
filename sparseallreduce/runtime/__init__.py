"""Runners that execute the steps of an algorithm: over MPI, in a single process, or on a simulated network."""
