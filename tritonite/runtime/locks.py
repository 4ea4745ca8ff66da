"""Locks that no other thread holds at a fork."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from typing import Any

# By the order in which they were made; those of objects that are gone are gone.
_locks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_places = itertools.count()
_held = contextlib.ExitStack()


def fork_safe_lock() -> Any:
    """A reentrant lock that a fork waits for, so that in the child it is free and what it guards is complete.

    A fork takes the lock made last first. So must a thread that takes several.
    """
    lock = threading.RLock()
    _locks[next(_places)] = lock
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


# For a few statements that take no other lock.
brief = fork_safe_lock()
os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
