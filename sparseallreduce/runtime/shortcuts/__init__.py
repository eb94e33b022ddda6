"""Methods without a schedule that all ranks take together; one file each, with a common interface."""
