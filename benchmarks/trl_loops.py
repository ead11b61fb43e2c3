"""TRL's trainers on a tiny Llama with three lengths: eager, `aot_eager`, and within `COOP_BUDGET`.

    pip install trl datasets
    python -m benchmarks.trl_loops [--trainers sft dpo grpo] [--budget 60%] [--steps 48]

Each mode is a process of its own, and the script in it does not name the project. The processes
train alternately, a step at a time, so that noise of the machine is shared. Peaks are of the
allocations in front of libc (`tests/runtime/outside_counter.cpp`), so that nothing of the project
counts. "later" is the median CPU time of the steps from the fourth of a length on; the times of
recomputed ops in it are the plan's overhead. "last planned" is the last step that took three times
as long as that. Exits 1 if weights differ from eager's, the largest peak is above eager's, or the
later steps within the budget take more than 1.5 times `aot_eager`'s.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from benchmarks.report import Column, Report, parser, scaled

ROOT = Path(__file__).parents[1]
LENGTHS = (40, 64, 96)
ROWS = 36
STEPPED = "one step more\n"
SETTLED = 3
"""Steps of a length after which nothing is planned anew."""


def build_counter(folder: Path) -> Path:
    """The counter as a library for LD_PRELOAD."""
    library = folder / "outside_counter.so"
    source = ROOT / "tests/runtime/outside_counter.cpp"
    build = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(build, check=True)
    return library


@contextmanager
def started(trainer: str, mode: str, steps: int, library: Path) -> Iterator["Training"]:
    """A training in a process of its own, which waits for a line before each step."""
    own = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if mode.endswith("%") or mode == "min":
        own["COOP_BUDGET"] = mode
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as log:
        environment = os.environ | own | {"XDG_CACHE_HOME": name}
        command = [sys.executable, "-m", __spec__.name, "--child", trainer, mode, str(steps), name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        try:
            yield Training(f"{trainer} {mode}", process, log, Path(name))
        finally:
            process.kill()
            process.communicate()


class Training(NamedTuple):
    """A process that trains, with its log and its folder."""

    name: str
    process: "subprocess.Popen[str]"
    log: TextIO
    folder: Path

    def step(self) -> None:
        """Let it run a step, and wait for the end of that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # it ended: so does its output
            print(file=self.process.stdin, flush=True)
        while (line := self.process.stdout.readline()) != STEPPED:
            if not line:
                self._fail()

    def result(self) -> dict[str, Any]:
        """Digest of the weights; lengths, CPU seconds and peaks by step."""
        if self.process.wait():
            self._fail()
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def _fail(self) -> None:
        self.log.seek(0)
        sys.exit(f"{self.name} ended with {self.process.wait()}:\n{self.log.read()}")


def run(trainer: str, modes: Sequence[str], steps: int, library: Path) -> dict[str, dict[str, Any]]:
    """Train in all modes alternately; returns the results by mode."""
    with ExitStack() as stack:
        started_all = [
            stack.enter_context(started(trainer, mode, steps, library)) for mode in modes
        ]
        for _ in range(steps):
            for training in started_all:
                training.step()
        return {m: training.result() for m, training in zip(modes, started_all, strict=True)}


def train(trainer: str, mode: str, steps: int, folder: Path) -> None:
    """Train in this process, a step for each line of the input; writes `result.json`."""
    import hashlib

    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    counter, mappings = ctypes.CDLL(None), ctypes.c_long()
    counter.outside_peak.restype = ctypes.c_long
    found: dict[str, list[Any]] = {"length": [], "cpu_s": [], "peak_bytes": []}

    class Watch(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            counter.outside_reset()
            self.began = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["cpu_s"].append(time.process_time() - self.began)
            found["peak_bytes"].append(counter.outside_peak(ctypes.byref(mappings)))
            print(STEPPED, end="", flush=True)

    model = tiny_llama()
    if mode == "eager":  # in the others a hook would be traced

        def note(_: Any, __: Any, arguments: Any) -> None:
            if torch.is_grad_enabled():
                found["length"].append(arguments["input_ids"].shape[1])

        model.register_forward_pre_hook(note, with_kwargs=True)
    if mode == "aot_eager":
        model.compile(backend=mode)
    made = made_trainer(trainer, model, steps, str(folder), Watch())
    made.train()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    result = {"digest": digest.hexdigest(), **found}
    (folder / "result.json").write_text(json.dumps(result))


def words(count: int, seed: int) -> str:
    """A text of `count` words of the vocabulary."""
    return " ".join(f"w{(i * 7 + seed) % 509}" for i in range(count))


def tiny_llama() -> Any:
    """A Llama of 4 layers of width 128 and 512 words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads, **special))


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(509)]
    of_words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, "<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=of_words, **special)


def made_trainer(trainer: str, model: Any, steps: int, folder: str, watch: Any) -> Any:
    """TRL's trainer for a model, as its documentation makes it."""
    import copy

    import trl
    from datasets import Dataset

    lengths = [LENGTHS[(i // 2) % 3] for i in range(ROWS)]
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 4 if trainer == "grpo" else 2,
        "max_steps": steps,
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
    }
    others: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": [watch], "model": model}
    if trainer == "sft":
        rows = [{"text": words(n, i)} for i, n in enumerate(lengths)]
        config = trl.SFTConfig(**arguments, max_length=128)
        return trl.SFTTrainer(args=config, train_dataset=Dataset.from_list(rows), **others)
    if trainer == "dpo":
        rows = [
            {"prompt": words(n // 2, i), "chosen": words(n // 2, 3), "rejected": words(n // 2, 5)}
            for i, n in enumerate(lengths)
        ]
        config = trl.DPOConfig(**arguments, max_length=128)
        others["ref_model"] = copy.deepcopy(model)
        return trl.DPOTrainer(args=config, train_dataset=Dataset.from_list(rows), **others)
    rows = [{"prompt": words(n // 2, i)} for i, n in enumerate(lengths)]
    config = trl.GRPOConfig(**arguments, num_generations=4, max_completion_length=16)
    others["reward_funcs"] = distinct_words
    return trl.GRPOTrainer(args=config, train_dataset=Dataset.from_list(rows), **others)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text.split()))) for text in completions]


def settled(kinds: list[int]) -> list[int]:
    """Steps that are at least the fourth of their kind."""
    return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) >= SETTLED]


def main() -> None:
    """Run the trainers, each in three modes, and compare."""
    if sys.argv[1:2] == ["--child"]:
        trainer, mode, steps, folder = sys.argv[2:]
        train(trainer, mode, int(steps), Path(folder))
        return
    arguments = parser(__doc__)
    arguments.add_argument("--trainers", nargs="+", default=["sft", "dpo", "grpo"])
    arguments.add_argument("--budget", default="60%")
    arguments.add_argument("--steps", type=int, default=48)
    options = arguments.parse_args()
    mb = scaled(1e-6, ".2f")
    report = Report(
        *("trainer", "mode", Column("equal", "equals eager")),
        *(Column("peak", "peak, MB", mb), Column("cpu", "later, CPU ms", scaled(1e3, ".0f"))),
        *(Column("ratio", "÷ aot_eager", ".2f"), Column("planned", "last planned")),
        progress=True,
    )
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        library = build_counter(Path(folder))
        for trainer in options.trainers:
            modes = ("eager", "aot_eager", options.budget)
            runs = run(trainer, modes, options.steps, library)
            later = settled(runs["eager"]["length"][: options.steps])
            expected, most = runs["eager"]["digest"], max(runs["eager"]["peak_bytes"])
            base = statistics.median(runs["aot_eager"]["cpu_s"][i] for i in later)
            for mode, found in runs.items():
                peak = max(found["peak_bytes"])
                cpu = statistics.median(found["cpu_s"][i] for i in later)
                planned = [i for i, took in enumerate(found["cpu_s"]) if took > 3 * cpu]
                equal = found["digest"] == expected
                failed |= not equal
                failed |= mode == options.budget and (peak > most or cpu > 1.5 * base)
                report.add(
                    trainer=trainer,
                    mode=mode,
                    equal="yes" if equal else "no",
                    peak=peak,
                    cpu=cpu,
                    ratio=cpu / base,
                    planned=planned[-1] + 1 if planned else 0,
                )
    report.finish(options.csv)
    sys.exit(failed)


if __name__ == "__main__":
    main()
