"""P ranks of the library in one process: a stand-in for MPI, a scheduler that decides who runs when, and faults at any point."""
