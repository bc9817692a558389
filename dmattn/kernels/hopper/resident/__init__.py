"""Narrow heads that share a bias, which stays on chip: `bias` (who works on what), `forward`, `query_grad` and `key_grad`."""
