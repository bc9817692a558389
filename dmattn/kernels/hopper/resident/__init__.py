"""Backward passes of narrow heads that share a bias, which stays on chip: `bias` (who works on what), `query_grad` (by `line`), `key_grad`."""
