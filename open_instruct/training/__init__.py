"""The learner holds the weights and steps them:

OLMo-core's train module on FSDP2, or DeepSpeed's ZeRO.
"""
