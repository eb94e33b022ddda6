#!/bin/sh
# Measure every algorithm against the dense allreduce at N = 2**24: bench.sh VENV RESULTS_DIRECTORY
# RANKS, DENSITIES and REPEATS may be set in the environment.
set -eu
venv=$1
results=$2
mkdir -p "$results"
for ranks in ${RANKS:-2 4 8}; do
    for density in ${DENSITIES:-0.001 0.01 0.0625}; do
        echo "== P = $ranks, density $density =="
        "$venv/bin/mpiexec" -n "$ranks" "$venv/bin/sparseallreduce" bench --size 16777216 --density "$density" --algorithms all \
            --repeats "${REPEATS:-9}" --json "$results/p$ranks-d$density.json" </dev/null
    done
done
echo "== time / dense, beside the goals =="
"$venv/bin/python" bench/compare.py "$results"/p*-d*.json
echo "Results are in $results"
