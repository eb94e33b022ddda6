"""Memory that the ranks of one host share: mapped files, words by which the ranks tell each other how far they are, and sums made there."""
