"""The gradient of a batch on one rank, as a dense array or restricted to the features that occur in the batch."""
