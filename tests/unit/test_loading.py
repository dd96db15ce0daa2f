from __future__ import annotations

from pathlib import Path

import pytest

from relax_pipeline.config import load_config
from relax_pipeline.errors import ConfigError

MINIMAL = """
run_name: a
steps: 3
model: {path: models/base}
data: {train: {path: p.jsonl}}
sync: {mode: adapter}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def problems(file: Path, text: str) -> list[str]:
    """Lines of the error that MINIMAL and some more settings give, without the first, which names the file."""
    file.write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{file}: {len(lines)} problem{'s' * (len(lines) > 1)}"
    return [line.removeprefix("  ") for line in lines]


def test_relative_paths_count_from_the_file(file: Path) -> None:
    file.write_text(MINIMAL + "evaluation: {source: {path: ../held/out.jsonl}}\n")
    config = load_config(file)
    assert config.model.path == str(file.parent / "models/base")
    assert config.data.train.path == str(file.parent / "p.jsonl")
    assert config.evaluation is not None
    assert config.evaluation.source.path == str(file.parent.parent / "held/out.jsonl")


def test_home_is_expanded_and_absolute_paths_stay(file: Path) -> None:
    file.write_text(MINIMAL.replace("models/base", "~/base").replace("p.jsonl", "/data/p.jsonl"))
    config = load_config(file)
    assert config.model.path == str(Path.home() / "base")
    assert config.data.train.path == "/data/p.jsonl"


def test_overrides_are_yaml_and_later_ones_win(file: Path) -> None:
    overrides = ["steps=5", "steps=6", "lora.target_modules=[linear_qkv]", "rollout.temperature=1e0", "sync.verify=no"]
    config = load_config(file, overrides)
    assert config.steps == 6
    assert config.lora.target_modules == ("linear_qkv",)
    assert config.rollout.temperature == 1.0
    assert config.sync.verify is False


def test_override_keeps_the_rest_of_its_section(file: Path) -> None:
    assert load_config(file, ["sync.verify=false"]).sync.mode == "adapter"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set 'steps': write section.key=value"),
        ("=3", "--set '=3': write section.key=value"),
        ("steps.x=3", "--set 'steps.x=3': steps is a value, not a section"),
        ("steps=[", "--set 'steps=[': the value is not YAML"),
        ("lora.rnk=3", "lora.rnk: unknown key; did you mean rank?"),
    ],
)
def test_wrong_overrides_are_refused(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert message in str(caught.value)


def test_missing_file_points_to_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config file .*none\.yaml; see deployments/recipes/ for examples"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [1", "is not a YAML file: while parsing a flow sequence"),
        ("- steps", "holds list, not a mapping of settings"),
        ("", "holds NoneType, not a mapping of settings"),
        (b"\xff\xfe\x00", "is not a YAML file"),
    ],
)
def test_what_is_no_mapping_is_refused(file: Path, text: str | bytes, message: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a YAML file"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lora: {rang: 4}", "lora.rang: unknown key; did you mean rank?"),
        ("lorra: {}", "lorra: unknown key; did you mean lora?"),
        (
            "tracking: {zzz: 1}",
            "tracking.zzz: unknown key; known here: artifact_every, sample_completions, trackers",
        ),
        ("rewards: {scorers: [{knd: math}]}", "rewards.scorers.0.knd: unknown key; did you mean kind?"),
        ("evaluation: {sauce: {}, source: {path: x}}", "evaluation.sauce: unknown key; did you mean source?"),
        ("evaluation: {}", "evaluation.source: required, and not set"),
        ("engine: {replicas: 2}", "engine: set engine.kind to hf, sglang or vllm"),
        ("engine: {kind: sgl}", "engine: unknown kind 'sgl'; set engine.kind to hf, sglang or vllm"),
        ("trainer: {micro_batch_tokens: 9}", "trainer: set trainer.kind to fsdp or megatron"),
        ("engine: {kind: vllm, pyton: x}", "engine.pyton: unknown key; did you mean python?"),
        (
            "engine: {kind: hf, batch_size: many}",
            "engine.batch_size: input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
        ("lora: 4", "lora: input should be a valid dictionary or instance of LoraConfig, got 4"),
        ("model: null", "model: input should be a valid dictionary or instance of ModelConfig, got None"),
        ("rollout: {temperature: 0}", "rollout.temperature: input should be greater than 0, got 0"),
        (
            "publish: {enabled: true}",
            "publish.enabled needs publish.destination: file:///folder or s3://bucket/prefix",
        ),
    ],
)
def test_problems_name_the_key_and_the_remedy(file: Path, text: str, problem: str) -> None:
    assert problems(file, text) == [problem]


def test_all_problems_are_told_at_once(file: Path) -> None:
    assert problems(file, "seed: -1\nlora: {rang: 4, alpha: 0}\n") == [
        "seed: input should be greater than or equal to 0, got -1",
        "lora.alpha: input should be greater than 0, got 0",
        "lora.rang: unknown key; did you mean rank?",
    ]


def test_missing_sections_are_named(file: Path) -> None:
    file.write_text("run_name: a\nsteps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).splitlines()[1:] == [
        "  model: required, and not set",
        "  data: required, and not set",
    ]
