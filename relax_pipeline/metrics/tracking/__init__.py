"""Where a run's curves go besides metrics.jsonl: one service a file behind the protocol in `base`."""
