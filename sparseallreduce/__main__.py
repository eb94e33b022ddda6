"""`python -m sparseallreduce` is the command line."""

from sparseallreduce.cli import main

if __name__ == "__main__":
    main()
