"""Training by mini-batch SGD: the trainer, and what it goes by."""
