"""Names of the files of an OLMo-core checkpoint."""

WEIGHTS_FOLDER = "model_and_optim"
METADATA_NAME = ".metadata"
MODEL_PREFIX = "model."
