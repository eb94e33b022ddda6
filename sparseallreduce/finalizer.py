"""What is to be done as an object goes, without a line of Python, in which a KeyboardInterrupt would be lost.

An interrupt is raised at the next function or line of Python to be executed. If that is of a ``__del__``, of a callback of a weak reference
or of ``weakref.finalize``, which may run amid anything, Python prints it and goes on: the loop that was to end does not, and what was to be
done is left undone. So what goes often is left to functions of C, which Python calls here by itself.
"""

from functools import partial

__all__ = ["Finalizer"]


class Finalizer(partial[object]):
    """Calls a function once, as it goes; whose object this is kept by, or whose arrays refer to it.

    Parameters
    ----------
    function : callable
        Of C, that calls nothing of Python: ``os.close``, a method of a ``deque`` or a set, a foreign function.
    *args

    >>> from collections import deque
    >>> gone = deque()
    >>> del_me = Finalizer(gone.append, "block")
    >>> del del_me
    >>> gone
    deque(['block'])
    """

    __slots__ = ()
    __del__ = partial.__call__
