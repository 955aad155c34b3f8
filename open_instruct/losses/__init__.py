"""Loss functions on plain tensors; denominators come from outside."""
