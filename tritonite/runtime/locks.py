"""Locks that are free in a forked child."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from typing import Any

# Every lock by the order of creation; a lock leaves with the object that owns it.
_locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_order = itertools.count()
_held = contextlib.ExitStack()


def fork_safe_lock() -> Any:
    """Return a reentrant lock that a fork waits for: in the child the lock is free and the guarded data complete.

    A fork takes the newest lock first. A thread that takes several locks must use the same order.
    """
    lock = threading.RLock()
    _locks[next(_order)] = lock
    return lock


def _hold_all() -> None:
    global _held
    with contextlib.ExitStack() as stack:
        for reference in reversed(_locks.valuerefs()):
            if (lock := reference()) is not None:
                stack.enter_context(lock)
        _held = stack.pop_all()


def _release_all() -> None:
    _held.close()


# Guards short critical sections that take no other lock.
brief = fork_safe_lock()
os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
