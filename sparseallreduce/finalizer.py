"""Finalise objects without running Python code, in which a KeyboardInterrupt would be lost.

An interrupt is raised at the next function or line of Python that is executed. If that is in a ``__del__``, or in a callback of a weak
reference or of ``weakref.finalize``, which may run at any time, Python prints the interrupt and continues: the loop that should end does
not, and the finalisation is incomplete. Frequent finalisation is therefore left to C functions, which Python calls here directly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Finalizer"]


class Finalizer(partial[object]):
    """An object that calls a function once, when it is garbage-collected; store it in the object to be finalised.

    Parameters
    ----------
    function : callable
        A C function that calls no Python code: ``os.close``, a method of a ``deque`` or a set, a foreign function. *args
            Its arguments.

    Examples
    --------
        >>> from collections import deque
    >>> gone = deque()
    >>> del_me = Finalizer(gone.append, "block")
    >>> del del_me
    >>> gone
    deque(['block'])
    """

    __slots__ = ()
    __del__: Callable[..., Any] = partial.__call__
