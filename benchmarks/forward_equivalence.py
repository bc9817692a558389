"""How exact out and lse are, against float64 and beside others. ``python benchmarks/forward_equivalence.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import compare

if __name__ == "__main__":
    raise SystemExit(compare.main("forward_equivalence", "Forward: largest errors against float64", compare.FORWARD))
