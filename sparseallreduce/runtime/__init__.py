"""The runners: what carries the steps of an algorithm out, over MPI, alone, or on a simulated network."""
