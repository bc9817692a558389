"""How exact dQ, dK, dV and dBias are, against float64 and beside others. ``python benchmarks/backward_equivalence.py --help``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import compare

if __name__ == "__main__":
    raise SystemExit(compare.main("backward_equivalence", "Backward: largest errors against float64", compare.BACKWARD))
