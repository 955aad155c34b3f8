"""The sharding layout of ranks, the process group, and exchanges between ranks."""
