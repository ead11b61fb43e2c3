"""The verifier's model of time: compute stream, copy engines, and the host that launches."""

from collections.abc import Iterable

from coop_plan.schemas import Device


class Clock:
    """Times in µs since the first step: of compute, of the host's launches and of its runs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.now_us = self.launched_us = self.host_free_us = 0.0
        self.free_us = {"d2h": 0.0, "h2d": 0.0}

    def _launch(self, launch_us: float) -> float:
        """Launch a step; returns the time at which it can begin."""
        if self.device.kind == "cpu":  # the launches delay compute
            self.launched_us = self.now_us = self.now_us + launch_us
        else:
            self.launched_us += launch_us
        return max(self.now_us, self.launched_us)

    def run(self, cost_us: float) -> None:
        """Run a variant on the device."""
        if cost_us:
            self.now_us = self._launch(self.device.launch_us) + cost_us

    def run_on_host(self, cost_us: float, ready_us: Iterable[float]) -> None:
        """Run a variant on the host, which reads copies that end at these times."""
        begin_us = self._launch(self.device.copy_launch_us) if cost_us else self.now_us
        self.host_free_us = max(begin_us, self.host_free_us, *ready_us) + cost_us

    def copy(self, engine: str, bytes_us: float) -> float:
        """Begin a copy whose bytes take `bytes_us`; returns its end."""
        begin_us = max(self._launch(self.device.copy_launch_us), self.free_us[engine])
        self.free_us[engine] = begin_us + self.device.copy_latency_us + bytes_us
        return self.free_us[engine]

    def wait(self, end_us: float) -> float:
        """Wait for a copy; returns the time that compute waits."""
        stall_us = max(0.0, end_us - self.now_us)
        self.now_us = max(self.now_us, end_us)
        return stall_us
