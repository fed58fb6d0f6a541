"""What is measured: predictions, FLOPs of a forward pass, the cost of a training."""
