"""Prefect flows: what happens in which order.

- `flows.train.train_policy`: one attempt at a named training run; the same name again goes on where it stopped.
- `flows.merge_publish.merge_and_publish`: the run's newest checkpoint, merged, verified and published.
- `flows.cli`: the same from a terminal.
"""
