"""The front door: the `leeway` command, the local run, the tools over a run. Thin."""
