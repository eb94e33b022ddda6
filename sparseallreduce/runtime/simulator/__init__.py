"""Simulate P ranks in one process on a virtual alpha-beta network, for tests and for studies of scaling."""

from sparseallreduce.runtime.simulator.api import simulate
from sparseallreduce.runtime.simulator.engine import run
from sparseallreduce.runtime.simulator.network import Network, machine_of
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.runtime.simulator.sharing import same_bits

__all__ = ["Network", "Simulation", "machine_of", "run", "same_bits", "simulate"]
