"""Locks that a forked child finds free."""

import os
import threading


def fork_safe_lock() -> threading.RLock:
    """A lock, for the life of the process, that is held while the process forks.

    Otherwise a child that is forked while another thread has it would wait for ever; what it guards
    is whole in the child.
    """
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock
