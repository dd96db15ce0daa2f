"""A plan as rows for people to read."""

from __future__ import annotations

from relax_pipeline.config import RunConfig, TrainerConfig
from relax_pipeline.memory_gpu import sent_bytes
from relax_pipeline.metrics.text import bytes_text
from relax_pipeline.plan import Plan, PromptFacts, kept_checkpoints
from relax_pipeline.sizes import ModelSizes

_SHOWN_CHARACTERS = 200


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, value) pairs to show."""
    rows = [("run folder", str(plan.run_folder)), *_progress_rows(plan)]
    if plan.prompts:
        rows += _prompt_rows(plan.prompts)
    if plan.sizes:
        rows += _size_rows(plan.sizes, plan.config)
    rows += [("warning", text) for text in plan.warnings]
    return rows + [("refused", text) for text in plan.refusals]


def _progress_rows(plan: Plan) -> list[tuple[str, str]]:
    config, ref = plan.config, plan.resumes_from
    return [
        ("starts from", f"checkpoint of step {ref.step}" if ref else "the base"),
        ("steps to go", f"{plan.steps_to_go:,} of {config.steps:,}"),
        ("trainer, engines", f"{_trainer(config.trainer)}, {config.engine.replicas} x {config.engine.kind}"),
        ("sampled a step", f"up to {plan.tokens_per_step:,} tokens"),
    ]


def _trainer(trainer: TrainerConfig) -> str:
    """Return the kind, and the sizes above 1 of its layout."""
    sizes = {name.removesuffix("_size"): size for name, size in trainer if name.endswith("_parallel_size")}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{trainer.kind} ({layout})" if layout else trainer.kind


def _prompt_rows(prompts: PromptFacts) -> list[tuple[str, str]]:
    text = prompts.first_prompt
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
    return [
        ("prompts", f"{prompts.train_rows:,} to train, {prompts.eval_rows:,} held out"),
        ("first prompt", f"{shown!r} ({prompts.first_prompt_tokens:,} tokens)"),
    ]


def _size_rows(sizes: ModelSizes, config: RunConfig) -> list[tuple[str, str]]:
    rows = [("base", f"{sizes.base_parameters:,} parameters")]
    if config.lora.enabled:
        share = sizes.adapter_parameters / sizes.base_parameters
        saving = sizes.merged_bytes / sizes.adapter_bytes
        rows += [
            ("adapter", f"{sizes.adapter_parameters:,} parameters ({share:.2%}) on {sizes.adapted_modules:,} modules"),
            ("sync, adapter mode", f"{bytes_text(sizes.adapter_bytes)} ({saving:,.1f} times less than merge)"),
        ]
    rows += [
        ("sync, merge mode", bytes_text(sizes.merged_bytes)),
        ("sync of this run", f"{config.sync.mode} mode, {'verified' if config.sync.verify else 'NOT verified'}"),
        *_memory_rows(sizes, config),
        ("checkpoint", f"{bytes_text(sizes.checkpoint_bytes)}, at most {kept_checkpoints(config):,} at once"),
    ]
    return rows


def _memory_rows(sizes: ModelSizes, config: RunConfig) -> list[tuple[str, str]]:
    if "cpu" in (config.trainer.device, config.engine.device):
        return []
    rows = []
    if memory := sizes.trainer_memory:
        rows.append(
            (
                "memory, trainer GPU",
                f"{bytes_text(memory.total)} at {memory.tokens:,} tokens a micro-batch: weights "
                f"{bytes_text(memory.weights)}, what trains {bytes_text(memory.trained)}, activations "
                f"{bytes_text(memory.activations)}, logits {bytes_text(memory.logits)}",
            )
        )
    sent = sent_bytes(config, model_bytes=sizes.merged_bytes, adapter_bytes=sizes.adapter_bytes, gpu_bytes=None)
    if sent:
        rows.append(("memory, first rank", f"{bytes_text(sent)} more for what was sent, an eighth of its GPU at most"))
    if engine := sizes.engine_memory:
        rows.append(
            (
                "memory, engine GPU",
                f"weights {bytes_text(engine.weights)}, adapters {bytes_text(engine.adapters)}, cache "
                f"{bytes_text(engine.cache_of_token)} a token: {bytes_text(engine.cache)} for "
                f"{engine.completions:,} completions of full length at once",
            )
        )
    return rows
