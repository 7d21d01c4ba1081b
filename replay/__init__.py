"""The versioned store: daemon, client, staleness budget, sampler, ledger, audit without a model. No torch."""
