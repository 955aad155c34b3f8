"""What `plan_memory.py` compares: the steps, their memory as PyTorch tracks it, and as real ranks
hold it.
"""
