"""`kvkeep serve`: the engine behind OpenAI's HTTP API.

The only folder that imports fastapi, prometheus_client and llguidance, which the extra `[serve]` installs.
"""
