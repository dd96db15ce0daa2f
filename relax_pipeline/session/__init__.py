"""A training session: the steps of a run on live trainer and engines, without a workflow engine."""
