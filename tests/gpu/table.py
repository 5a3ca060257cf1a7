"""The product's table of targets over the results file, kept in it; and what failed."""

from __future__ import annotations

import sys

from tests.bench import figures
from tests.bench.engine.gpu.results import read, write
from tests.bench.engine.gpu.targets import failures, table


def main() -> int:
    lines = read()
    found = table(lines)
    for figure in found:
        value = "not measured" if figure.value is None else figure.value
        write("table", figure.name, measured=value, target=figure.target, unit=figure.unit)
    figures.write(found, as_json=False)
    failed = failures(lines)
    print(f"{len(failed)} checks failed" + "".join(f"\n  {failure}" for failure in failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
