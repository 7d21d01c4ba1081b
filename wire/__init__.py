"""What two processes must agree on: records, messages, their encoding, the weight manifest, sockets, errors. No torch."""
