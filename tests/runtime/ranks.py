"""Processes that train together over gloo, each in a function of this package's tests.

python -m tests.runtime.ranks MODULE:FUNCTION RANK COUNT FOLDER
"""

import importlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]


def cache_with_extension(folder):
    """A cache folder with nothing in it but the compiled extension, which takes long to make."""
    from coop_plan.runtime.device import build

    built = Path(build.arena().__file__).parent
    (folder / "coop-plan").mkdir(parents=True)
    (folder / "coop-plan" / built.name).symlink_to(built)
    return folder


def together(target, folder, count=2, caches=None):
    """Run `module:function` on `count` ranks; `caches[rank]` is the cache folder of each."""
    folder.mkdir(exist_ok=True)
    processes = []
    for rank in range(count):
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        if caches is not None:
            environment["XDG_CACHE_HOME"] = str(caches[rank])
        command = [sys.executable, "-m", "tests.runtime.ranks", target, rank, count, folder]
        processes.append(
            subprocess.Popen(
                list(map(str, command)),
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=1200)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs


def main(target, rank, count, folder):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", None, timeout, store=store, rank=rank, world_size=count)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(rank, count)
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads outlive the group, even where nothing was done with it. One that asks for the
    # interpreter's lock while that ends, ends the process by std::terminate (seen once, 2.11).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
