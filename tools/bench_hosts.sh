#!/bin/sh
# Measure on hosts that are made for it and removed again, whatever happens:
#
#   tools/bench_hosts.sh VENV RESULTS_DIRECTORY WHAT [HOSTSxRATE...]      e.g. tools/bench_hosts.sh .venv bench/results/hosts tables 4x200mbit
#
# WHAT is `tables` (bench/hosts.py), `auto` (bench/auto_choice.py, also with two ranks on this machine itself) or `simulated`
# (bench/simulated.py). Without HOSTSxRATE it goes through those of `configurations` below. What stands in $ARGUMENTS is handed to the
# program, e.g. ARGUMENTS="--density 0.01 --samples 3". Needs root, as tools/hosts.sh does, of which $HOSTS_NAME and $HOSTS_SUBNET are the
# network's name and subnet.
set -eu

fail() {
    echo "bench_hosts.sh: $1" >&2
    exit 2
}

configurations() {
    case $1 in
    tables) program=hosts all='2x1gbit 4x200mbit 4x1gbit 2x10gbit' ;;
    auto) program=auto_choice all='1x2 2x1gbit 4x1gbit' ;;
    simulated) program=simulated all='2x1gbit 4x200mbit' ;;
    *) fail "WHAT is tables, auto or simulated, not '$1'" ;;
    esac
}

[ $# -ge 3 ] || fail "usage: $0 VENV RESULTS_DIRECTORY tables|auto|simulated [HOSTSxRATE...]"
venv=$(realpath "$1") results=$2 what=$3
shift 3
configurations "$what"
[ $# -gt 0 ] || set -- $all
for configuration; do
    case $configuration in
    [1-9]*x[1-9]*) ;;
    *) fail "a configuration is like 2x1gbit, or 1x2 for two ranks on this machine itself, not '$configuration'" ;;
    esac
done

root=$(realpath "$(dirname "$0")/..")
hosts=$root/tools/hosts.sh
export HOSTS_NAME="${HOSTS_NAME:-bench}" HOSTS_SUBNET="${HOSTS_SUBNET:-10.214.77}"
export MPIEXEC="$venv/bin/mpiexec" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
mkdir -p "$results"

child=
made=
cache=$(mktemp -d)
clean_up() {
    trap '' INT TERM HUP
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
    [ -z "$made" ] || "$hosts" down
    [ -z "$child" ] || end "$child"
    rm -rf "$cache"
}

# End a program that has been asked to: mpiexec may be stopped, or wait for ranks that are gone.
end() {
    tries=0
    while kill -0 "$1" 2>/dev/null && [ $tries -lt 20 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    kill -KILL "$1" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# In the background, since a shell runs its traps only between programs that it waits for in the foreground.
measure() {
    "$@" </dev/null &
    child=$!
    wait "$child"
    child=
}

number=$# reports=
for configuration; do
    count=${configuration%%x*} rate=${configuration#*x} report=$results/$what-$configuration.json
    export SPARSEALLREDUCE_CACHE="$cache/$configuration" # else a link is taken for one of up to ten times its rate
    echo "== $configuration =="
    set -- "$venv/bin/python" "$root/bench/$program.py" --json "$report"
    [ "$what" = tables ] || set -- "$@" --plot "${report%.json}.png"
    if [ "$count" = 1 ]; then
        # shellcheck disable=SC2086 # arguments are several words
        measure "$MPIEXEC" -n "$rate" "$@" ${ARGUMENTS:-}
    else
        made=1
        "$hosts" up "$count" "$rate"
        # shellcheck disable=SC2086
        measure "$hosts" run -n "$count" "$@" --rate "$rate" ${ARGUMENTS:-}
        "$hosts" down
        made=
    fi
    reports="$reports $report"
done
if [ "$what" = auto ] && [ "$number" -gt 1 ]; then
    # shellcheck disable=SC2086
    "$venv/bin/python" "$root/bench/auto_choice.py" --plot "$results/auto.png" --join $reports
fi
echo "Results are in $results"
