"""Conversations of rows: their messages and tool calls, whatever form a published data set uses."""
