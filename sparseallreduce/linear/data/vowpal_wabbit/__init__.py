"""The text format of Vowpal Wabbit."""
