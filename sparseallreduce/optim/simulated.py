"""Simulate steps of P replicas in one process on a virtual network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparseallreduce.optim.local_steps import Arrived, LocalSteps
from sparseallreduce.optim.optimizer import Optimizer
from sparseallreduce.runtime.simulator import Network, Simulation, simulate

__all__ = ["simulated_local_step", "simulated_step"]


def simulated_step(
    optimizers: Sequence[Optimizer], gradients: Sequence[Any], rate: float | None = None, network: Network | None = None, **how: Any
) -> list[Simulation]:
    """Take a step with all replicas of a simulated run.

    Parameters
    ----------
    optimizers : sequence of Optimizer
        One for each rank, with separate parameters and ``comm=SERIAL``.
    gradients : sequence
        The gradients of each rank, as for :meth:`Optimizer.step`.
    rate : float, optional
        Replaces the learning rate.
    network : Network, optional
    **how
        ``delivery`` and ``through_wire``, as for :func:`~sparseallreduce.simulate`.

    Returns
    -------
    list of Simulation
        One for each pack of parameters; outputs are the means by which they were updated.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.optim import GTopkSGD
    >>> replicas = [np.zeros(4) for _ in range(3)]
    >>> optimizers = [GTopkSGD(replica, 1.0, density=0.25, comm=sar.SERIAL) for replica in replicas]
    >>> out = simulated_step(optimizers, [np.array([1.0, rank, 0, 4]) for rank in range(3)])
    >>> replicas[2], out[0].messages
    (array([ 0.,  0.,  0., -4.]), array([2, 1, 1]))
    """
    prepared = [optimizer.prepare(own, rate, len(optimizers)) for optimizer, own in zip(optimizers, gradients, strict=True)]
    simulations = []
    for of_ranks in zip(*prepared):
        feedbacks = [each.descent.feedback for each in of_ranks]
        out = simulate([each.vector for each in of_ranks], feedbacks, network, **how)
        for each, update in zip(of_ranks, out.outputs):
            each.descent.apply(update, each.rate)
        simulations.append(out)
    for optimizer in optimizers:
        optimizer.steps += 1
    return simulations


def simulated_local_step(replicas: Sequence[LocalSteps], network: Network | None = None, **how: Any) -> list[Simulation]:
    """Count a step of all replicas of a simulated run, and combine changes that are due, as :meth:`LocalSteps.step` does.

    The caller takes the steps of a warm-up by the mean of the replicas' gradients.

    Parameters
    ----------
    replicas : sequence of LocalSteps
        One for each rank, with separate parameters and ``comm=SERIAL``.
    network : Network, optional
    **how
        ``delivery`` and ``through_wire``, as for :func:`~sparseallreduce.simulate`.

    Returns
    -------
    list of Simulation
        One for each fragment whose sum starts after this step; outputs are the means.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.optim import LocalSGD
    >>> weights = [np.zeros(4) for _ in range(2)]
    >>> replicas = [LocalSGD(own, H=2, comm=sar.SERIAL) for own in weights]
    >>> for _ in range(2):
    ...     for rank, own in enumerate(weights):
    ...         own += rank
    ...     out = simulated_local_step(replicas)
    >>> weights[0], len(out)
    (array([1., 1., 1., 1.]), 1)
    """
    for replica in replicas:
        replica._count()
        while replica._flights and replica._flights[0].due <= replica.steps:
            replica._finish_first()
    simulations = []
    for fragment in replicas[0]._due():
        flights = [replica._prepared(fragment, replica.delay) for replica in replicas]
        sums = [replica._sums[fragment] for replica in replicas]
        out = sums[0].simulate(sums, [flight.change for flight in flights], network, how)
        for replica, flight, mean in zip(replicas, flights, out.outputs):
            flight.request = Arrived(lambda mean=mean: mean)
            if replica.delay:
                replica._flights.append(flight)
            else:
                replica._apply(flight)
        simulations.append(out)
    return simulations
