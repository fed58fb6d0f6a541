"""What is measured: FLOPs."""
