"""Start-up of the kernels that run the tutorials as the site is built: a command line (`!...`) that fails is an error of its cell.

Jupyter by itself ignores the exit status. Commands run without a terminal, so that they draw no progress bars.
"""

import subprocess

from IPython import get_ipython


def run(command: str) -> None:
    """Run a command line in a shell, print what it prints, and raise CalledProcessError if it fails."""
    shell = get_ipython()
    typed = ["bash", "-c", shell.var_expand(command, depth=1)]
    finished = subprocess.run(typed, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(finished.stdout, end="")
    finished.check_returncode()


get_ipython().system = run
