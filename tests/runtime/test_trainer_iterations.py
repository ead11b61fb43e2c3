"""Whole iterations of transformers' Trainer: numbers, arguments and checkpoints of the Trainer."""

import pytest
import torch

import coop_plan
from coop_plan import runtime
from tests.runtime.iterating import assert_within_budget, in_float16

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own

ROWS, LENGTH, WORDS = 20, 16, 64


def trainer_of(folder, *, kind=transformers.Trainer, **arguments):
    """A Trainer of a small GPT-2 with dropout; rows have labels that are left out."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=WORDS, n_positions=LENGTH, use_cache=False
    )
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH))
    labels = tokens.masked_fill(torch.rand(ROWS, LENGTH) < 0.2, -100)
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "no"}
    given |= {"report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True}
    return kind(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(str(folder), **given | arguments),
        train_dataset=[
            {"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)
        ],
    )


def planned(trainer, budget="60%", **options):
    from coop_plan.runtime.integrations.trainer import plan_iterations

    plan_iterations(trainer, budget, **{"method": "coop"} | options)
    return trainer


def train(trainer, **given):
    torch.manual_seed(1)  # of the order of the rows, and of dropout
    trainer.train(**given)
    return trainer


def numbers(trainer):
    """Parameters, states and logs, but times."""
    optimizer = trainer.optimizer.state_dict()["state"]
    states = [v for _, one in sorted(optimizer.items()) for v in one.values() if torch.is_tensor(v)]
    kept = {"loss", "learning_rate", "epoch"} | (
        {"grad_norm"} if trainer.args.max_grad_norm else set()
    )
    logs = [{k: v for k, v in log.items() if k in kept} for log in trainer.state.log_history]
    return [p.detach().clone() for p in trainer.model.parameters()] + states, logs


def assert_same(first, second):
    (tensors, logs), (others, other_logs) = numbers(first), numbers(second)
    assert all(map(torch.equal, tensors, others))
    assert logs == other_logs


CASES = [
    {},
    {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "warmup_steps": 2},
    {"gradient_accumulation_steps": 2, "optim": "sgd", "lr_scheduler_type": "cosine"},
    {"bf16": True, "max_grad_norm": 0.0, "weight_decay": 0.1},
]


@pytest.mark.parametrize("arguments", CASES)
def test_a_trainer_has_its_numbers(arguments, tmp_path):
    """With micro-batches that an epoch ends early, clipping and schedules of its arguments."""
    eager, ours = trainer_of(tmp_path, **arguments), planned(trainer_of(tmp_path, **arguments))
    for trainer in (eager, ours):
        train(trainer)
    assert_same(eager, ours)
    assert_within_budget(4)


@pytest.mark.parametrize("arguments", [{"optim": "adamw_torch"}, CASES[1]])
def test_a_trainer_in_float16_has_its_numbers(arguments, tmp_path):
    """With steps that its scaler leaves out; the scaler's state is in checkpoints."""
    arguments = {"save_strategy": "steps", "save_steps": 4} | arguments
    eager = trainer_of(tmp_path / "eager", **arguments)
    ours = planned(trainer_of(tmp_path / "ours", **arguments), "min")
    for trainer in (eager, ours):
        in_float16(trainer.accelerator, 2.0**19)
        train(trainer)
    (tensors, logs), (others, other_logs) = numbers(eager), numbers(ours)
    assert all(map(torch.equal, tensors, others))
    assert repr(logs) == repr(other_logs)  # with norms that are nan
    names = [tmp_path / one / "checkpoint-4" / "scaler.pt" for one in ("eager", "ours")]
    states = [*map(torch.load, names)]
    assert states[0] == states[1]
    assert "inf" in repr(logs)
    assert_within_budget(4)


@pytest.mark.parametrize("options", [{}, {"link": "8GB/s", "method": "coop-offline"}])
def test_a_trainer_saves_and_resumes(options, tmp_path):
    """From eager to planned and back; checkpoints are equal."""
    arguments = {"save_strategy": "steps", "save_steps": 2}
    eager = trainer_of(tmp_path / "eager", **arguments)
    ours = planned(trainer_of(tmp_path / "ours", **arguments), "min", **options)
    for trainer in (eager, ours):
        train(trainer)
    assert_same(eager, ours)
    again = planned(trainer_of(tmp_path / "again", **arguments), "min", **options)
    train(again, resume_from_checkpoint=str(tmp_path / "eager" / "checkpoint-2"))
    assert_same(eager, again)
    other = trainer_of(tmp_path / "other", **arguments)
    train(other, resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same(eager, other)


def test_a_trainer_evaluates_and_trains_again_without_a_plan(tmp_path):
    eager, ours = trainer_of(tmp_path), planned(trainer_of(tmp_path))
    for trainer in (eager, ours):
        train(trainer)
        trainer.eval_dataset = trainer.train_dataset
    assert eager.evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]
    ours.pop_callback(ours.callback_handler.callbacks[-1])
    steps = sum(report.steps_run for report in coop_plan.reports())
    for trainer in (eager, ours):
        train(trainer)
    assert_same(eager, ours)
    assert sum(report.steps_run for report in coop_plan.reports()) == steps


def test_the_last_plan_of_a_trainer_counts(tmp_path):
    """As a cell of a notebook that runs twice, or after a training that failed."""
    eager, ours = trainer_of(tmp_path), planned(planned(trainer_of(tmp_path), "80%"), "60%")
    for trainer in (eager, ours):
        train(trainer)
    assert_same(eager, ours)
    assert len(coop_plan.reports()) == 1
    assert "training_step" not in vars(ours)


class Own(transformers.Trainer):
    def training_step(self, *given):
        return super().training_step(*given)


class Masking(transformers.Trainer):
    """Makes its inputs of a batch, as trainers of TRL do."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


class StopsAmid(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **_):
        control.should_training_stop = True


class ReadsGradients(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "callback", "reason"),
    [
        ({"torch_compile": True}, None, "torch_compile"),
        ({"kind": Own}, None, "Own.training_step"),
        ({"kind": Masking}, None, "Masking._prepare_inputs"),
        ({}, StopsAmid, "StopsAmid.on_substep_end"),
        ({}, ReadsGradients, "ReadsGradients.on_pre_optimizer_step"),
        ({"enable_jit_checkpoint": True}, None, "JITCheckpointCallback.on_pre_optimizer_step"),
    ],
)
def test_what_a_trainer_cannot_have_is_refused(arguments, callback, reason, tmp_path):
    trainer = planned(trainer_of(tmp_path, **arguments))
    if callback is not None:
        trainer.add_callback(callback)
    with pytest.raises(runtime.OptionsError, match=reason):
        trainer.train()
    with pytest.raises(runtime.OptionsError, match="bugdet"):
        planned(trainer, bugdet=1)


def test_a_training_step_of_the_object_is_refused(tmp_path):
    trainer = planned(trainer_of(tmp_path))
    trainer.training_step = lambda *given: type(trainer).training_step(trainer, *given)
    with pytest.raises(runtime.OptionsError, match=r"Trainer.training_step"):
        trainer.train()


class Fails(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        raise KeyboardInterrupt


def test_a_training_after_one_that_failed_is_that_of_its_callbacks(tmp_path):
    eager, ours = trainer_of(tmp_path), planned(trainer_of(tmp_path))
    plans = ours.callback_handler.callbacks[-1]
    for trainer in (eager, ours):
        trainer.add_callback(Fails)
        with pytest.raises(KeyboardInterrupt):
            train(trainer)
        trainer.remove_callback(Fails)
    ours.remove_callback(plans)
    for trainer in (eager, ours):
        train(trainer)
    assert_same(eager, ours)
    assert sum(report.steps_run for report in coop_plan.reports()) == 1


def test_parameters_that_the_model_has_not_are_refused(tmp_path):
    """The Trainer would update them without clipping them."""
    trainer = planned(trainer_of(tmp_path))
    trainer.create_optimizer().add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(runtime.OptionsError, match="a parameter that the model has not"):
        trainer.train()
