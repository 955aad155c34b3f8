"""Memory, traffic and time of a run, predicted from its flags alone, before it is started and
without torch.
"""
