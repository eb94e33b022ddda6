"""How the ranks agree on an operation before anything moves: one record a rank, by messages or in memory that they share."""
