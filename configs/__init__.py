"""The typed config tree and the shipped TOML files. Imports nothing of ours."""
