"""The learner on FSDP2: OLMo-core's train module, as HSDP, with tensor and context parallel."""
