"""Samples: in files, on their way, and as the arrays that training reads."""
