"""A server of our own as a process, for tests."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import httpx


@contextlib.contextmanager
def serving(folder, *options):
    """
    A client of `coop-plan serve` on a free port of the loopback; its process is `.process`.

    Only what is asked for is done, unless the options say `--improve`.
    """
    script = "from coop_plan.api.cli.main import main; main()"
    command = [sys.executable, "-c", script, "serve", "--port", "0", "--no-improve", *options]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stderr=log, cwd=Path(__file__).parents[2]) as process,
    ):
        try:
            while (found := re.search(r"http://\S+(?=,)", (folder / "log").read_text())) is None:
                assert process.poll() is None, (folder / "log").read_text()
            patience = {"Prefer": "wait=100"}  # the machine may be busy
            with httpx.Client(base_url=found[0], timeout=300, headers=patience) as client:
                client.process = process
                yield client
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
