"""What `offload_vs_trl.py` compares: our side of it, on ranks of CPUs and on the pretended GPU."""
