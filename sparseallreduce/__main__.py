"""Run the command line by ``python -m sparseallreduce``."""

from sparseallreduce.cli import main

if __name__ == "__main__":
    main()
