"""Agents: programs that speak to an OpenAI endpoint, and are trained exactly as they ask.

Read in this order: `session_tree.py` (which ids a request goes on from), `session.py` (a request
becomes a reply), `api_requests.py` and `api_replies.py` (OpenAI's forms), `endpoint.py` (HTTP),
`episodes.py` (an episode runs a program), `finished_session.py` (a tree becomes a completion),
`nodes.py` and `node.py` (agents on several nodes).
"""
