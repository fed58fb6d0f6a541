"""What is measured: predictions, diversity, sparsity, exploration, FLOPs, significance; each usable alone."""
