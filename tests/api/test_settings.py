"""A server's settings: a flag comes first, then the environment, a file and the default."""

import pytest

from coop_plan.api.service.settings import Settings, settings_of
from coop_plan.schemas import InvalidInputError


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "coop-plan.toml"
    path.write_text('max_body = "1MiB"\nmax_ops = 7\nqueue = 3\nallow_host = ["a", "b"]\n')
    monkeypatch.setenv("COOP_PLAN_MAX_BODY", "2MiB")
    monkeypatch.setenv("COOP_PLAN_MAX_OPS", "8")
    return path


@pytest.mark.parametrize("by_environment", [False, True])
def test_the_nearest_source_wins(file, monkeypatch, by_environment):
    flags = {"max_body": "3MiB", "max_ops": None, "allow_host": ()}
    if by_environment:
        monkeypatch.setenv("COOP_PLAN_CONFIG", str(file))
    else:
        flags["config"] = str(file)
    found = settings_of(flags)
    assert (found.max_body, found.max_ops, found.queue, found.port) == (3 << 20, 8, 3, 8000)
    assert found.allow_host == ("a", "b")
    monkeypatch.setenv("COOP_PLAN_ALLOW_HOST", "c,d")
    assert settings_of(flags).allow_host == ("c", "d")
    limits = found.service("nowhere", b"").limits
    assert (limits.body_bytes, limits.ops, limits.seconds) == (3 << 20, 8, 600.0)


def test_addresses_and_secrets_are_not_printed(monkeypatch):
    monkeypatch.setenv("COOP_PLAN_BROKER", "redis://:sesame@host/0")
    found = settings_of({"store": "redis://:sesame@host/1"})
    assert found.broker == "redis://:sesame@host/0"
    assert "sesame" not in repr(found)
    assert "sesame" not in repr(found.service(found.store, b"sesame"))
    monkeypatch.setenv("COOP_PLAN_PORT", "redis://:sesame@host/0")
    with pytest.raises(InvalidInputError) as caught:
        settings_of({})
    assert "--port (COOP_PLAN_PORT)" in str(caught.value)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_TIME_LIMIT", "nan"),
        ("MAX_TIME_LIMIT", "0.5"),
        ("MAX_BODY", "much"),
        ("MAX_BODY", "-1"),
        ("SOLVERS", "0"),
        ("PORT", "65536"),
        ("QUEUE", "-1"),
        ("IMPROVE", "perhaps"),
    ],
)
def test_a_wrong_value_is_named_wherever_it_is(name, value, monkeypatch, tmp_path, run):
    option = f"--{name.lower().replace('_', '-')}"
    monkeypatch.setenv(f"COOP_PLAN_{name}", value)
    with pytest.raises(InvalidInputError, match=rf"{option} \(COOP_PLAN_{name}\): "):
        settings_of({})
    monkeypatch.delenv(f"COOP_PLAN_{name}")
    path = tmp_path / "coop-plan.toml"
    path.write_text(f'{name.lower()} = "{value}"\n')
    code, _, error = run("serve", "--config", path, "--store", tmp_path / "plans")
    assert code == 2
    assert error.count("\n") == 1
    assert option in error


@pytest.mark.parametrize(
    ("text", "said"), [(None, "is no file"), ("max_body = ", "no TOML"), ("x = 1", "--x ")]
)
def test_a_wrong_file_is_named(text, said, tmp_path, run):
    path = tmp_path / "coop-plan.toml"
    if text is not None:
        path.write_text(text)
    code, _, error = run("serve", "--config", path)
    assert code == 2
    assert error.count("\n") == 1
    assert said in error


def test_every_setting_is_an_option(run):
    _, out, _ = run("serve", "--help")
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in out
