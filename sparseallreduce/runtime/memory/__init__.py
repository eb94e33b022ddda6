"""Memory shared by the ranks of one host: mapped files, words that publish each rank's progress, and sums computed there."""
