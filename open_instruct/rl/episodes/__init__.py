"""The walk of a prompt: asked, answered, judged.

Training and held-out prompts take the same one.
"""
