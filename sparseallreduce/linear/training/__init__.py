"""Training by mini-batch SGD: the trainer and its components."""
