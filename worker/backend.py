"""From the settings to a runner. Each backend is imported only when it is chosen: a fake worker needs no
torch, a CPU worker no GPU library."""

from __future__ import annotations

import importlib.util

import structlog

from checkpoint.checkpoint import Checkpoint
from checkpoint.paths import user_path
from checkpoint.resolve import resolve
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.runner import Runner


def make_runner(config: WorkerConfig) -> Runner:
    """Find the model, load it, size the KV cache and warm up. Takes as long as that takes. Raises
    ConfigError, CheckpointError or StartError, each with a message for the user."""
    log = structlog.get_logger("worker.backend")
    attention = choose_attention(config.attention)
    if attention == "fake":
        from worker.fake import make_fake_runner

        return make_fake_runner(config, _checkpoint(config) if config.model else None)
    if importlib.util.find_spec("torch") is None:
        raise StartError(
            "a worker with a model needs torch, which is not installed: pip install '.[worker]' in a checkout"
        )
    checkpoint = _checkpoint(config)
    log.info("model found", model=checkpoint.name, path=str(checkpoint.path), kind=checkpoint.kind)
    if attention == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            raise StartError(
                "--attention flashinfer needs FlashInfer, which is not installed: pip install '.[gpu]' in a"
                " checkout"
            )
        from worker.gpu.start import make_gpu_runner

        return make_gpu_runner(config, checkpoint)
    from worker.openmp import set_wait_policy

    set_wait_policy()
    from worker.cpu_runner import make_cpu_runner

    return make_cpu_runner(config, checkpoint)


def choose_attention(asked: str) -> str:
    """What `auto` means on this host: flashinfer when an NVIDIA GPU and the library are there, else torch."""
    if asked != "auto":
        return asked
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("flashinfer") is None:
        return "torch"
    import torch

    return "flashinfer" if torch.cuda.is_available() else "torch"


def _checkpoint(config: WorkerConfig) -> Checkpoint:
    log = structlog.get_logger("worker.backend")
    return resolve(
        config.model,
        cache_dir=user_path(config.cache_dir) if config.cache_dir else None,
        offline=config.offline,
        revision=config.revision or None,
        say=lambda line: log.info(line),
    )
