"""The gradient of a batch on one rank: as a dense array, or of the features that occur in it."""
