"""The cost model compared with the simulator, whose messages it predicts."""

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.algorithms.choose import problem_of
from sparseallreduce.algorithms.cost import predicted_time
from sparseallreduce.runtime.simulator import machine_of
from sparseallreduce.streams.reduction import Reduction

SIZE = 1 << 14
_NEAR = {"local_latency": 1e-7, "local_bandwidth": 80e9}
NETWORKS = {  # latencies are short, as the vectors are: in the time of a long one, bytes count most
    "fast": sar.Network(latency=1e-7),
    "10 Gbit/s": sar.Network(latency=1e-6, bandwidth=1.1e9),
    "1 Gbit/s": sar.Network(latency=5e-6, bandwidth=1.2e8),
    "pairs at 1 Gbit/s": sar.Network(latency=5e-6, bandwidth=1.2e8, hosts=2, **_NEAR),
    "fours at 10 Gbit/s": sar.Network(latency=1e-6, bandwidth=1.1e9, hosts=4, **_NEAR),
    "fours at 1 Gbit/s": sar.Network(latency=5e-6, bandwidth=1.2e8, hosts=4, **_NEAR),
    "fours, near as far": sar.Network(latency=1e-6, bandwidth=1.1e9, hosts=4),
}


@pytest.mark.parametrize("name", [name for name in sar.algorithms() if name != "auto"])
@pytest.mark.parametrize("network", NETWORKS)
def test_predictions_are_within_a_factor_of_two_of_simulated_times(name, network):
    """On uniformly random positions, on hosts of equally many ranks."""
    network = NETWORKS[network]
    for ranks in (3, 8, 12):
        hosts = network.layout(ranks)
        if len(set(map(len, hosts.members))) > 1:
            continue
        for density in (0.001, 0.02, 0.4):
            rng = np.random.default_rng(ranks)
            entries = round(SIZE * density)
            sets = [np.sort(rng.choice(SIZE, entries, replace=False)).astype(np.uint32) for _ in range(ranks)]
            streams = [sar.SparseStream(indices, rng.random(entries, np.float32), SIZE) for indices in sets]
            problem = problem_of(streams[0], entries, ranks, Reduction(), hosts=hosts)._replace(entries=entries)
            predicted = predicted_time(name, problem, machine_of(network, hosts))
            simulated = sar.simulate(streams, name, network).time
            assert simulated / 2 <= predicted <= 2 * simulated, (ranks, density, predicted, simulated)
