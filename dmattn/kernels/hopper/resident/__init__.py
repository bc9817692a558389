"""Narrow heads that share a bias, which stays on chip: `bias` (who works on what), `forward`, `query_grad` with its `line`, `key_grad`."""
