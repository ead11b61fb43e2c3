"""Locks that are free in a forked child."""

import os
import threading


def fork_safe_lock() -> threading.RLock:
    """A process-lifetime lock that is held during forks.

    Otherwise a child forked while another thread holds it would deadlock. The guarded state is
    consistent in the child.
    """
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock
