"""Samples: reading them from files, distributing them, and the arrays that training uses."""
