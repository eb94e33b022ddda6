"""Neural networks trained by sums of few values: the papers' figures at the size of a laptop. Needs the extras torch, plot and mpi.

python -m bench.neural table                       every optimiser beside dense SGD, for three models, by 4 ranks; goes on where it stopped
python -m bench.neural figures --figure NAME       a figure of one of the papers: a picture, and its numbers as JSON
python -m bench.neural local                       local steps beside sums in each step: loss, bytes and seconds a token, by 4 ranks
python -m bench.neural overlap                     how much of communication back-propagation hides, between two hosts (as root)

To be started in the root of the repository. `docs/figures.md` lists the figures. Results go to `bench/results`.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # the ranks of a machine share its cores
if str(ROOT / "bench") not in sys.path:
    sys.path.append(str(ROOT / "bench"))  # other measurements are imported by their names
