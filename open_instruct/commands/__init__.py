"""The commands of `open-instruct`: each file is one command, or a part that several share."""
