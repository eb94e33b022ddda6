#!/bin/sh
# Everything that wants a real GPU, within LIMIT seconds (540): gpu.sh test, gpu.sh bench [OPTIONS of bench/gpu.py], or gpu.sh all.
#
# GPU_PYTHON=python3 is an interpreter that has CuPy, mpi4py and what the tests need, beside mpiexec; nothing is installed then. Without it
# a virtual environment .venv-gpu is made, with the extras mpi, gpu and test: pip's own variables say where from, as
# PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels on a machine without a network.
set -eu
what=${1:-test}
[ $# -eq 0 ] || shift
cd "$(dirname "$0")/.."

if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }; then
    echo "error: nvidia-smi finds no GPU here: make test-gpu is for machines with one, make test runs the kernels in numba's simulator" >&2
    exit 2
fi

deadline=$(($(date +%s) + ${LIMIT:-540}))
left() { echo $((deadline - $(date +%s))); }
failed=""

# Within the time that is left; a step for which there is none has failed.
step() {
    echo "== $*"
    if [ "$(left)" -lt 5 ] || ! timeout "$(left)" "$@"; then
        failed="$failed
  $*"
    fi
}

python=${GPU_PYTHON:-}
if [ -z "$python" ]; then
    tools/venv.sh .venv-gpu mpi,gpu,test
    python=.venv-gpu/bin/python
fi
"$python" -c "import cupy, hypothesis, mpi4py, numba, pytest; from numba import cuda; assert cuda.is_available(), 'numba finds no GPU'" || {
    echo "error: $python has not all that the tests need on a GPU (above): see docs/gpu.md" >&2
    exit 2
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c "import cupy, numba; print('CuPy', cupy.__version__, 'numba', numba.__version__)"

unset NUMBA_ENABLE_CUDASIM NUMBA_DISABLE_JIT PYTHONDONTWRITEBYTECODE
export CI="${CI:-true}" OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 SPARSEALLREDUCE_TEST_GPU=1
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/cuda${PYTHONPATH:+:$PYTHONPATH}"

if [ "$what" != bench ]; then
    # Kernels and ranks first: what fails there fails everything.
    REQUIRE_MPI=1 step "$python" -m pytest -q tests/cuda -p no:cacheprovider -W ignore::RuntimeWarning
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            step compute-sanitizer --tool $tool --error-exitcode 1 "$python" tests/cuda/every_kernel.py
        done
    else
        echo "compute-sanitizer is not installed: memcheck and racecheck are left out"
    fi
fi
if [ "$what" != test ]; then
    step "$python" bench/gpu.py "$@"
fi
if [ -n "$failed" ]; then
    echo "failed, or out of time:$failed" >&2
    exit 1
fi
