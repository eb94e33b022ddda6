"""Extensions of sparseallreduce, each in one file: an algorithm, a reducer, a codec of values, and a strategy."""
