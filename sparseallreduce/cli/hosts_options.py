"""The options of `simulate` that place several ranks on each host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from sparseallreduce.cli.numbers import Whole

__all__ = ["hosts_of", "hosts_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def hosts_options() -> Callable[[Command], Command]:
    """Return a decorator that adds ``--ranks-per-host``, ``--local-latency`` and ``--local-bandwidth``."""

    def mark(command: Command) -> Command:
        above_zero = click.FloatRange(0, min_open=True)
        what = "Bytes per second between ranks on one host  [the bandwidth]."
        command = click.option("--local-bandwidth", type=above_zero, help=what)(command)
        what = "Seconds per message between ranks on one host  [the latency]."
        command = click.option("--local-latency", type=click.FloatRange(min=0), help=what)(command)
        what = "Ranks on each host, which share its bandwidth to other hosts  [1]."
        return click.option("--ranks-per-host", type=Whole(min=1), help=what)(command)

    return mark


def hosts_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of these options as arguments of :class:`~sparseallreduce.Network`.

    Raises
    ------
    click.UsageError
        If a local latency or bandwidth is given without ranks per host.
    """
    local = {name: chosen[name] for name in ("local_latency", "local_bandwidth") if chosen[name] is not None}
    if chosen["ranks_per_host"] is None:
        if local:
            raise click.UsageError(f"--{next(iter(local)).replace('_', '-')} is for ranks on one host: give --ranks-per-host too")
        return {}
    return {"hosts": chosen["ranks_per_host"], **local}
