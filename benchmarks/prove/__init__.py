"""The proof: one command that tests dmattn on a GPU in every way that a CI without one cannot, and writes docs/proof.md.

``make prove`` on a machine with a GPU; ``python -m benchmarks.prove --help``. Reading order: `part` (what a part is given and says), `problems`
(drawn problems), a file for each part (`random_problems`, `errors`, `adversarial` with `hidden` and `huge`, `repetition`, `memory`, `threads`,
`oom`, `sanitizers`, `speed`), `schedule` (which parts run side by side, in which share of the time), `processes` with `worker` (how they are
run), `report` (the page, of the result file alone), `__main__`.
"""
