"""What a CPU computes otherwise than PyTorch would, where that was measured to be faster."""
