"""Reading svmlight text."""
