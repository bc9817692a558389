"""The plan of a dynamic mask: `lifetimes` and `top_keys`, made of `ranks` and `ascending`; `reorder` brings keys into its order."""
