"""`make bench`: the numbers of docs/performance.md, each from real runs, as ratios within one invocation."""
