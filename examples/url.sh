#!/usr/bin/env bash
# The real URL data set (LIBSVM's url_combined: 2,396,130 addresses, 3,231,961 features): fetched, split, trained on, and measured.
#
#     bash examples/url.sh [RANKS] [TRAIN OPTIONS]           4 ranks by default; options as of `sparseallreduce train`
#
# It needs a network, 7 GB of disk, and some minutes. What is there already is not made again: a broken run goes on where it broke.
#
#     URL_FOLDER     where files go                          url-data below the present folder
#     URL_MIRROR     address of the folder that has the file, where the collection's own cannot be reached
#     URL_SAMPLES    samples that the file has to have       2,396,130; of another file, url_combined.xz.sha256 (or .bz2) is to be there
#     URL_TRAIN      samples to train on                     the first 1,976,130; the others, of later days, are the test set
#     PYTHON, MPIEXEC                                        python3, mpiexec
set -euo pipefail

ranks=${1:-4}
shift || true
folder=${URL_FOLDER:-$PWD/url-data}
samples=${URL_SAMPLES:-2396130}
training=${URL_TRAIN:-1976130}
features=3231961
python=${PYTHON:-python3}
mpiexec=${MPIEXEC:-mpiexec}

fail() {
    echo "url.sh: $1" >&2
    exit 1
}

[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "the number of ranks is 1 or more, not '$ranks'"
((0 < training && training < samples)) || fail "URL_TRAIN must be above 0 and below URL_SAMPLES, $samples, not $training"
command -v "$python" >/dev/null || fail "there is no $python: set PYTHON to that of the environment with sparseallreduce in it"
"$python" -c "import sparseallreduce" 2>/dev/null || fail "$python does not find sparseallreduce: pip install '.[mpi]' in its folder"
if ((ranks > 1)); then
    command -v "$mpiexec" >/dev/null || fail "there is no $mpiexec: set MPIEXEC, or take 1 rank"
fi
mkdir -p "$folder"
run() {
    if ((ranks > 1)); then
        "$mpiexec" -n "$ranks" "$python" -m sparseallreduce "$@"
    else
        "$python" -m sparseallreduce "$@"
    fi
}

if [[ ! -f $folder/train.csr || ! -f $folder/test.csr ]]; then
    needed=$((samples * 2900 / 1000000)) # MB: a sample takes 1 kB as text, as much in binary, and its share of the compressed file
    free=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1024))
    ((free >= needed)) || fail "$folder has $free MB free, and $needed are needed: set URL_FOLDER to another folder"

    mirror=()
    if [[ -n ${URL_MIRROR:-} ]]; then
        mirror=(--mirror "$URL_MIRROR")
    fi
    file=$("$python" -m sparseallreduce fetch url --no-convert --cache "$folder" ${mirror[@]+"${mirror[@]}"})
    [[ -f $file ]] || fail "nothing has been fetched"

    echo "splitting $file: the first $training samples to train on, $((samples - training)) to test"
    case $file in
        *.xz) open=(xz -dc) ;;
        *.bz2) open=(bzip2 -dc) ;;
        *) open=(cat) ;;
    esac
    command -v "${open[0]}" >/dev/null || fail "there is no ${open[0]}, which unpacks the file: install it"
    found=$("${open[@]}" "$file" | awk -v training="$training" -v train="$folder/train.svm" -v test="$folder/test.svm" \
        '{ print > (NR <= training ? train : test) } END { print NR }')
    ((found == samples)) || fail "$file has $found samples instead of $samples: it is not the whole set; remove it to fetch it again"
    for part in train test; do
        run convert "$folder/$part.svm" "$folder/$part.csr" --features "$features"
        rm "$folder/$part.svm"
    done
fi

run train "$folder/train.csr" --test "$folder/test.csr" --json "$folder/url.json" --model-out "$folder/url.npz" "$@"

"$python" - "$folder/url.json" "$ranks" <<'SUMMARY'
import json
import sys

with open(sys.argv[1]) as file:
    report = json.load(file)
epochs = report["epochs"]
accuracy, spent, best = [], 0.0, 0.0
for epoch in epochs:
    spent += epoch["seconds"]["total"] - epoch["seconds"]["evaluate"]
    if epoch["test_accuracy"] is not None:
        accuracy.append((spent, epoch["test_accuracy"]))
if not accuracy:
    sys.exit("url.sh: the model was never tested: leave out --evaluate-every 0 and --epochs 0")
first, last = accuracy[0], accuracy[-1]
results = report["results"]
print(f"\n{results['samples']:,} samples, {results['test_samples']:,} to test, {results['features']:,} features, {sys.argv[2]} rank(s)")
print(f"test accuracy {first[1]:.4f} after {first[0]:.2f} s of training, {last[1]:.4f} after {last[0]:.2f} s")
print(f"besides: {results['seconds']['read']:.2f} s to read")
print("published: 0.9844 by plain SGD, 0.994 by AROW, 0.996 by LIBLINEAR; in 12 to 900 s (LIBSOL's table)")
SUMMARY
