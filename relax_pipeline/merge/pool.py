"""Threads for work on tensors: as many as there are processors, each with torch on one of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_WORKERS = 16


def worker_pool() -> ThreadPoolExecutor:
    """Return a pool of one thread a processor.

    The chunks are small enough for one core's cache, so torch's own threads would only wait for each other.
    """
    workers = max(1, min(MAX_WORKERS, os.cpu_count() or 1))
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
