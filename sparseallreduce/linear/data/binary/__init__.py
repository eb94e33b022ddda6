"""The binary format of data sets (``data/FORMAT.md``)."""
