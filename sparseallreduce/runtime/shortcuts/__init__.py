"""Ways to a result that need no schedule, for all ranks or none: one file each, one interface."""
