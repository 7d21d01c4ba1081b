"""The rewards that come with Leeway. Each has TRL's signature, as a user's own would; `resolve.py` holds their names."""
