"""What samples.jsonl keeps of a step: the prompts it trained on, and a few completions to read."""

from __future__ import annotations

from typing import Any

from relax_pipeline.rl.groups import Rollout


def samples_row(rollout: Rollout, *, num_completions: int) -> dict[str, Any]:
    """Return the rows of the trained prompts in the dataset, and the first completion of some of all groups drawn."""
    shown = [
        {
            "prompt": group.prompt.text,
            "completion": group.texts[0],
            "label": group.prompt.label,
            "reward": group.scores[0].value,
            "policy_version": group.completions[0].policy_version,
        }
        for group in rollout.drawn[:num_completions]
    ]
    return {"trained_prompts": [group.prompt.index for group in rollout.groups], "samples": shown}
