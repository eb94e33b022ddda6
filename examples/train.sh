#!/bin/sh
# Commands only: a data set, two training runs on two ranks, predictions, a picture. Files go to a temporary folder.
#
#     sh examples/train.sh
set -e
folder=$(mktemp -d)
sparseallreduce="${PYTHON:-python} -m sparseallreduce"

$sparseallreduce generate url-like "$folder/train.svm" --samples 3000 --features 100000 --seed 1
$sparseallreduce generate url-like "$folder/test.svm" --samples 500 --features 100000 --seed 1
for strategy in dense sparse; do
    "${MPIEXEC:-mpiexec}" -n 2 $sparseallreduce train "$folder/train.svm" --test "$folder/test.svm" --model logistic --epochs 3 \
        --strategy $strategy --features 100000 --json "$folder/$strategy.json" --model-out "$folder/$strategy.npz"
done
$sparseallreduce predict "$folder/sparse.npz" "$folder/test.svm" --probabilities --out "$folder/predictions.txt"
$sparseallreduce plot "$folder/dense.json" "$folder/sparse.json" "$folder/comparison.png"
