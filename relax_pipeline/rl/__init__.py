"""From rewards to a loss: advantages, logprobs, losses, and how samples become batches."""
