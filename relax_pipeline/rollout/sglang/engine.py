"""The production engine: an SGLang server as a child process, asked for tokens and given weights over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_pipeline.config import ModelConfig, SglangEngineConfig
from relax_pipeline.errors import EngineError
from relax_pipeline.lora.adapter import peft_config
from relax_pipeline.lora.fingerprint import combine_digests
from relax_pipeline.rollout.base import EngineInfo, adapter_name
from relax_pipeline.rollout.filed import FiledTensors
from relax_pipeline.rollout.sglang.checks import check_adapter, check_weights, digests_of
from relax_pipeline.rollout.sglang.flavour import in_sglang_flavour
from relax_pipeline.rollout.sglang.gate import Gate
from relax_pipeline.rollout.sglang.launch import LoraRoom, on_cpu, server_command, server_environment
from relax_pipeline.rollout.sglang.model_folder import read_model_folder
from relax_pipeline.rollout.sglang.requests import completion, generate_body, logprobs_body, sequence_logprobs
from relax_pipeline.rollout.sglang.server import Server
from relax_pipeline.rollout.sglang.versions import Versions
from relax_pipeline.rollout.sglang.wire import FORMAT, bucket, mappable
from relax_pipeline.types import Ack, Adapter, Completion, GenerateRequest


class SglangEngine:
    """Implements `Engine`; methods may be called from several threads, and the server batches over all of them.

    The server tells what it holds by name only, so an `Ack` here has the digest of what this engine was given, before
    `in_sglang_flavour`, once the server has confirmed the name. That it serves it is what the probe of `WeightSync`
    shows.

    Requests' seeds are honoured with `deterministic` only; without it the server draws from a stream of its own.
    A completion ends at its stop tokens and, if it has any, at the end tokens of the model's own configuration.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        model: ModelConfig,
        config: SglangEngineConfig,
        lora: LoraRoom | None,
        log_folder: Path,
        control_timeout: float,
        generate_timeout: float,
    ) -> None:
        """Start the server and wait for it.

        Args:
            engine_id: Name of the engine's place; its incarnation is drawn anew.
            model: The base.
            config: The backend's settings.
            lora: Room for adapters; None: the engine serves whole models only.
            log_folder: Gets the server's log.
            control_timeout: Seconds for the start, and for every call but `generate`.
            generate_timeout: Seconds for `generate`.

        Raises:
            EngineError: The server did not come up; with the end of its log.
            ModelError: The model folder is no checkpoint.
        """
        self._id, self._incarnation = engine_id, uuid.uuid4().hex[:12]
        self._config, self._lora = config, lora
        self._control_timeout, self._generate_timeout = control_timeout, generate_timeout
        self._base, self._folder = model.path, read_model_folder(Path(model.path))
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._versions = Versions(engine_id, self._incarnation, self._folder.tensors)
        self._gate = Gate(f"engine {engine_id}")
        with ThreadPoolExecutor(1) as thread:
            digest = thread.submit(self._folder.digest, self._dtype)
            self._server = Server(
                lambda port: server_command(config, model, lora=lora, port=port),
                server_environment(config),
                name=f"engine {engine_id} (SGLang)",
                log=log_folder / f"{engine_id}-{self._incarnation}.log",
                timeout=control_timeout,
            )
        self._info = EngineInfo(
            engine_id=engine_id,
            incarnation=self._incarnation,
            pid=self._server.pid,
            base_tensors_digest=digest.result(),
            leaf_modules=lora.leaf_modules if lora else (),
            max_rank=lora.rank if lora else None,
            expert_adapters=not on_cpu(config),
            data_parallel_size=config.data_parallel_size,
        )

    @property
    def busy(self) -> bool:
        """Whether requests are running."""
        return self._gate.busy

    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        self._server.get("/health", timeout=self._control_timeout)
        return self._info

    def stage(self, adapter: Adapter) -> None:
        """See `Engine.stage`."""
        version = adapter.info.version
        self._versions.refuse_known(version)
        check_adapter(adapter, room=self._lora, linears=self._folder.linear_shapes())
        digest = combine_digests(digests_of(adapter.tensors, version=version))
        sent = in_sglang_flavour(adapter)
        if isinstance(sent.tensors, FiledTensors):
            folder = str(sent.tensors.path.parent)
            self._control("/load_lora_adapter", lora_name=adapter_name(version), lora_path=folder)
        else:
            with mappable(sent.tensors) as block:
                self._control(
                    "/load_lora_adapter_from_tensors",
                    lora_name=adapter_name(version),
                    config_dict=peft_config(sent.spec, self._base),
                    serialized_tensors=bucket(block),
                    load_format=FORMAT,
                )
        self._versions.stage(version, digest=digest, modules=adapter.info.modules)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """See `Engine.load_weights`."""
        check_weights(tensors, version=version, shapes=self._folder.shapes, dtype=self._dtype)
        digests = digests_of(tensors, version=version)
        with self._gate.shut("replace its weights"), mappable(tensors) as block:
            self._versions.begin_weights(version)
            self._control(
                "/update_weights_from_tensor",
                serialized_named_tensors=[bucket(block, self._folder.stored_names)] * self._config.tensor_parallel_size,
                load_format=FORMAT,
                flush_cache=True,  # or prompts seen before are answered from the old weights' cache
                weight_version=str(version),
            )
            self._versions.add_weights(digests)

    def activate(self, version: int) -> Ack:
        """See `Engine.activate`."""
        listed = self._server.get("/v1/models", timeout=self._control_timeout)["data"]
        return self._versions.activate(version, listed={entry["id"] for entry in listed})

    def retire(self, version: int) -> None:
        """See `Engine.retire`."""
        if self._versions.drop(version):
            self._control("/unload_lora_adapter", lora_name=adapter_name(version))

    def generate(self, requests: Sequence[GenerateRequest], *, version: int) -> list[Completion]:
        """See `Engine.generate`."""
        with self._gate.request():
            body = generate_body(requests, adapter=self._versions.adapter(version), seeded=self._config.deterministic)
            answers = self._server.post("/generate", body, timeout=self._generate_timeout)
        return [
            completion(answer, policy_version=version, engine_id=self._id, incarnation=self._incarnation)
            for answer in answers
        ]

    def logprobs(self, sequences: Sequence[Sequence[int]], *, version: int | None) -> list[NDArray[np.float32]]:
        """See `Engine.logprobs`."""
        with self._gate.request():
            body = logprobs_body(sequences, adapter=self._versions.adapter(version))
            answers = self._server.post("/generate", body, timeout=self._control_timeout)
        return [sequence_logprobs(answer) for answer in answers]

    def sleep(self) -> None:
        """See `Engine.sleep`.

        Raises:
            EngineError: Requests are running, which SGLang would not survive.
        """
        if self._config.offload == "none":
            return
        with self._gate.shut("sleep"):
            self._server.get("/flush_cache", timeout=self._control_timeout)
            self._control("/release_memory_occupation", tags=self._freed_tags())
            self._gate.asleep = True

    def wake(self) -> None:
        """See `Engine.wake`."""
        if self._gate.asleep:
            self._control("/resume_memory_occupation", tags=self._freed_tags())  # others would end the server
            self._gate.asleep = False

    def close(self) -> None:
        """See `Engine.close`."""
        self._server.stop()

    def _freed_tags(self) -> list[str]:
        return ["kv_cache"] if self._config.offload == "kv_cache" else ["kv_cache", "weights"]

    def _control(self, path: str, **body: Any) -> None:
        answer = self._server.post(path, body, timeout=self._control_timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("error_message") or answer.get("message")
            raise EngineError(f"engine {self._id}: SGLang refused {path}: {reason}")
