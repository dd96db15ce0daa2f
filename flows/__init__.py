"""Prefect flows: what happens in which order.

- `flows.train.train_policy`: one attempt at a named training run; the same name again goes on where it stopped.
- `flows.merge_publish.merge_and_publish`: the run's newest checkpoint, merged, verified and published.
- `flows.sweep.publish_finished`: the same for every finished run that is not published.
- `flows.evaluate.evaluate`: held-out evaluation of any checkpoint.
- `flows.pause.pause_run`: a training run is asked to pause.
- `flows.recover.recover`: a crashed training run is scheduled again.
- `flows.cli`: the same from a terminal.
"""
