"""Points between instructions: wherever Python may raise a KeyboardInterrupt in the library, it can be raised in a run of the world.

Python looks for signals after calls of what is no function of Python, where a function of Python begins, and where a loop goes back. A
trace function sees each instruction before it is executed.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import sparseallreduce as sar

KIND = "instruction"
_PROGRAMS = "world/faults.py"  # what ranks run: where a call of theirs begins, an interrupt is as one before the call
_FOLDER = sar.__file__.removesuffix("__init__.py")
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")


@contextmanager
def between_instructions(running: Callable[[], Any]) -> Iterator[None]:
    """Let these be points of the world that ``running`` returns, if any."""

    def entered(frame: FrameType, _event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return _Frame(running, within=not (frame.f_back is not None and frame.f_back.f_code.co_filename.endswith(_PROGRAMS)))

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def _takes_signals(code: CodeType) -> dict[int, bool | None]:
    """Of each instruction, by its offset: whether Python looks for signals after it; None of calls, where it depends on what is called."""
    return {
        each.offset: None if each.opname in _CALLS else "JUMP_BACKWARD" in each.opname  # with conditional ones of Python 3.11
        for each in dis.get_instructions(code)
    }


class _Frame:
    """The trace function of one frame."""

    def __init__(self, running: Callable[[], Any], within: bool) -> None:
        self._running = running
        self._looks: bool | None = within  # Python, after the instruction that was the last, or where the function begins or goes on
        self._returned = False  # to it, since then

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> _Frame:
        if event == "opcode":
            looks = not self._returned if self._looks is None else self._looks
            self._looks, self._returned = _takes_signals(frame.f_code).get(frame.f_lasti, False), False
            world = self._running()
            if looks and world is not None and world.injector is not None and world.running is not None and not world.running.quiet:
                world.running.calls[KIND] += 1
                world.injector(world.running, KIND)
        elif event == "return" and frame.f_back is not None and isinstance(frame.f_back.f_trace, _Frame):
            frame.f_back.f_trace._returned = True
        return self
