"""The function that the simulator page runs in the browser: from the values of its controls to what the cost model predicts."""

from __future__ import annotations

from typing import Any

from sparseallreduce.algorithms.choose import choose, predicted_times, rounded
from sparseallreduce.algorithms.cost import Machine, Problem, expected_size, predicted_time, rabenseifner_of_messages


def prediction(
    ranks: int,
    size: float,
    entries: float,
    value_bytes: int,
    latency: float,
    bandwidth: float,
    gamma: float,
    gamma_dense: float,
    per_host: int,
    local_latency: float,
    local_bandwidth: float,
) -> dict[str, Any]:
    """Return the predicted seconds of each algorithm, the choice of "auto", and the expected entries of the sum.

    The arguments are those of :class:`sparseallreduce.Network`, with ``per_host`` consecutive ranks on each host, and of sparse streams at
    uniformly random positions. Predictions are those of ``sparseallreduce simulate``.
    """
    hosts = (ranks + per_host - 1) // per_host
    smallest = ranks - (hosts - 1) * per_host
    problem = Problem(
        entries=entries,
        size=size,
        ranks=ranks,
        value_bytes=value_bytes,
        index_bytes=4 if size <= 4294967296 else 8,
        local=per_host if smallest == per_host else smallest if hosts == 1 else 1,
        hosts=hosts,
        lanes=smallest,
    )
    beta = ranks / hosts / bandwidth
    machine = Machine(
        latency, beta, gamma, gamma_dense, beta, codec=1e-15, alpha_local=local_latency, beta_local=1 / local_bandwidth
    )  # fmt: skip
    machine = rabenseifner_of_messages(machine, ranks, problem.local) if ranks > 1 else machine
    times = predicted_times(problem, machine)
    if hosts > 1 and smallest > 1:
        times["dense_torus"] = predicted_time("dense_torus", problem, machine)
    return {
        "times": times,
        "choice": choose(problem._replace(entries=rounded(entries)), machine),
        "union": expected_size(entries, size, ranks),
    }
