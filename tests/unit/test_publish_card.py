"""The model card: front matter that loaders read, and what a person wants to know."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from relax_pipeline.publish.card import base_licence, model_card

README = "---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\ntags: [x]\n---\n# Tiny\n"


def card(**changes: Any) -> dict[str, str]:
    arguments: dict[str, Any] = {
        "run_name": "demo",
        "step": 120,
        "base_name": "owner/tiny",
        "base_digest": "ab" * 32,
        "base_readme": README,
        "config": {"model_type": "qwen3"},
        "lora": {"Rank": 8, "Alpha": 16.0, "Targets": ("q_proj", "k_proj")},
        "data": {"Prompts": 7473, "Fingerprint": "cd" * 32},
        "metrics": {"Reward mean": [(1, 0.25), (2, 0.5), (3, 0.375)]},
    }
    return model_card(**(arguments | changes))


def front_matter(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return fields


def test_front_matter_names_base_and_licence() -> None:
    fields = front_matter(card()["README.md"])
    assert fields["base_model"] == "owner/tiny"
    assert (fields["license"], fields["license_name"], fields["license_link"]) == ("other", "tiny", "LICENSE")
    assert (fields["library_name"], fields["pipeline_tag"]) == ("transformers", "text-generation")


def test_a_base_without_hub_id_is_named_but_not_linked() -> None:
    text = card(base_name="my base")["README.md"]
    assert "base_model" not in front_matter(text)
    assert "| Model | my base |" in text


@pytest.mark.parametrize(
    "row",
    [
        "| Run | demo |",
        "| Steps | 120 |",
        "| Rank | 8 |",
        "| Alpha | 16 |",
        "| Targets | q_proj, k_proj |",
        "| Prompts | 7473 |",
        f"| Fingerprint | {'cd' * 32} |",
        f"| Content sha256 | {'ab' * 32} |",
        "| Reward mean | 0.25 | 0.375 | 0.25 | 0.5 |",
    ],
)
def test_card_states(row: str) -> None:
    assert row in card()["README.md"].splitlines()


def test_each_metric_has_its_curve() -> None:
    files = card()
    assert list(files) == ["README.md", "curves/reward-mean.svg"]
    assert "(curves/reward-mean.svg)" in files["README.md"]
    assert files["curves/reward-mean.svg"].startswith("<svg ")


def test_metric_without_values_is_listed_empty() -> None:
    assert "| KL | | | | |" in card(metrics={"KL": []})["README.md"].splitlines()


def test_full_training_says_so() -> None:
    assert "| Method | all weights |" in card(lora=None)["README.md"]


@pytest.mark.parametrize("readme", [None, "# Tiny", "---\ntags: [x]\n---\n", "---\n: [\n---\n"])
def test_missing_licence_is_said(readme: str | None) -> None:
    text = card(base_readme=readme)["README.md"]
    assert "license" not in front_matter(text)
    assert "states no licence" in text


def test_licence_of_windows_line_ends() -> None:
    assert base_licence("---\r\nlicense: mit\r\n---\r\n") == {"license": "mit"}


def test_vision_model_is_loaded_with_its_processor() -> None:
    text = card(config={"vision_config": {}, "auto_map": {}})["README.md"]
    assert "processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)" in text
    assert front_matter(text)["pipeline_tag"] == "image-text-to-text"


def test_values_cannot_break_the_table() -> None:
    assert "| Note | a \\| b c |" in card(data={"Note": "a | b\nc"})["README.md"]


def test_same_run_gives_the_same_card() -> None:
    assert card() == card()
