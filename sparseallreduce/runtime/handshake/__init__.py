"""The agreement that starts every operation: each rank publishes one record, by messages or in shared memory."""
